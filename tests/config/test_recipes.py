"""Recipes, presets and published numbers: settings and numbers are those of a frozen table, and wrong files are named."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from fedvlm.config.recipe import AXES, Layer, _published, load, presets, published, published_data, recipe_names
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry

FROZEN = json.loads((Path(__file__).parents[1] / "data" / "recipes.json").read_text(encoding="utf-8"))
PRODUCT = ("fedavg", "fedprox", "ditto", "perfedavg", "ga", "grace", "afl", "q-ffl", "fft-gp")
OWN = "adapter: head\nlocal: prox\nmerge: mean\n"


def method_and_preset(name: str) -> tuple[str, str]:
    """The two words of a name such as `ga on=unet`; the preset is "" where there is none."""
    method, _, preset = name.partition(" on=")
    return method, preset


def merged(layers: list[Layer]) -> dict[str, object]:
    return {key: value for layer in layers for key, value in layer.settings.items()}


def effective(kinds: dict[str, str], settings: dict[str, object]) -> dict[str, object]:
    """The parts, and every setting with the parts' defaults filled in. Other keys (rounds, backbone, …) are the run's."""
    out: dict[str, object] = settings | kinds
    for axis, name in kinds.items():
        for f in fields(registry.find(axis, name)):
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            out.setdefault(f.name, default)
    return out


@pytest.mark.parametrize("name", FROZEN["recipes"])
def test_every_recipe_has_the_settings_of_the_frozen_table(name):
    before, recipe = FROZEN["recipes"][name], load(*method_and_preset(name))
    kinds = {axis: getattr(recipe, axis) for axis in AXES}
    assert kinds == {axis: before[axis] for axis in AXES}
    tuned, paper = merged(recipe.layers("mini-clip")), merged(recipe.layers("mini-clip", tuned=False))
    assert effective(kinds, tuned) == effective(kinds, before["settings"])
    assert effective(kinds, paper) == effective(kinds, before["paper_settings"])


def test_a_method_on_its_own_network_is_itself():
    plain, on = load("fft-gp"), load("fft-gp", "attention")
    kinds = {axis: getattr(plain, axis) for axis in AXES}
    assert kinds == {axis: getattr(on, axis) for axis in AXES}
    for tuned in (True, False):
        one, other = (effective(kinds, merged(r.layers("mini-clip", tuned))) for r in (plain, on))
        assert one == other
    assert merged(load("promptfl").layers("mini-clip")) == merged(load("fedavg", "prompt").layers("mini-clip"))


@pytest.mark.parametrize("name", FROZEN["recipes"])
def test_every_published_number_is_kept(name):
    before, (method, preset) = FROZEN["recipes"][name]["published"], method_and_preset(name)
    assert before.keys() <= set(published_data(method, preset))
    for data, numbers in before.items():
        known = [e.numbers for e in _published() if (e.method, e.on, e.data) == (method, preset, data)]
        assert numbers in known and published(method, preset, data) == max(known, key=len)
    assert published(method, preset, "roles") == before.get("roles", {})


@pytest.mark.parametrize("table", FROZEN["base_to_novel"])
def test_base_to_novel_numbers_hold_under_their_settings_only(table):
    partition, _, shots = table.partition(" ")
    given = {"protocol": "base-to-novel", "partition": partition, "shots": 0 if shots == "full" else 16, "alpha": 0.1}
    for method, numbers in FROZEN["base_to_novel"][table].items():
        found = published(method, "", "caltech101", given)
        assert f"{found['base']:.2f}/{found['novel']:.2f}" == numbers
        assert str(found["source"]).startswith("FedDTL Table 1")
        assert published(method, "", "caltech101", given | {"shots": 4}) == {}
    assert published("promptfl", "", "pacs", given) == published("promptfl", "", "pacs")


def test_all_files_can_be_read_and_name_methods_and_presets_that_exist():
    for name in recipe_names():
        recipe = load(name)
        assert recipe.name == name and recipe.title and recipe.idea and not recipe.path and not recipe.on
        assert all(getattr(recipe, axis) in registry.names(axis) for axis in AXES)
    for preset in presets():
        titles = {load(name, preset).title for name in PRODUCT}
        assert len(titles) == len(PRODUCT)
        assert {load(name, preset).adapter for name in PRODUCT} == {preset}


def test_layers_are_ordered_and_say_where_they_come_from(tmp_path):
    def origins(*of: str) -> list[str]:
        return [layer.origin for layer in load(*of).layers("mini-clip")]

    assert origins("fedavg") == ["paper", "tuned for mini-clip"]
    assert [layer.origin for layer in load("fedavg").layers("other")] == ["paper"]
    assert [layer.origin for layer in load("fedavg").layers("mini-clip", tuned=False)] == ["paper"]
    assert origins("zero-shot") == ["recipe zero-shot"]
    assert origins("q-ffl", "unet") == ["on unet", "q-ffl on unet"]
    assert origins("ga", "attention") == ["on attention", "tuned for mini-clip, on attention"]
    inherited = ["paper, like promptfl", "tuned for mini-clip, like promptfl"]
    assert origins("fedlapt") == [*inherited, "paper", "tuned for mini-clip"]

    mine = tmp_path / "my.yaml"
    mine.write_text("like: fedavg\nsettings: {lr: 0.5}\ntuned: {mini-clip: {rounds: 7}}\non: {unet: {lr: 0.1}}\n")
    recipe = load(str(mine))
    expected = ["paper, like fedavg", "tuned for mini-clip, like fedavg"]
    expected += ["recipe my.yaml", "tuned for mini-clip, recipe my.yaml"]
    assert origins(str(mine)) == expected
    expected = {"lr": 0.5, "batch": 32, "epochs": 1, "rounds": 7, "schedule": "cosine"}
    assert merged(recipe.layers("mini-clip")) == expected
    assert (recipe.name, recipe.path, recipe.title) == ("my", str(mine), "FedAvg")
    on = load(str(mine), "unet")
    assert origins(str(mine), "unet") == ["on unet", "recipe my.yaml, on unet"]
    assert merged(on.layers("mini-clip"))["lr"] == 0.1 and on.title == "FedAvg on a U-Net" and on.on == "unet"


def test_the_backbone_that_a_recipe_asks_for(tmp_path):
    assert load("fedavg").backbone() is None
    assert load("fedavg", "resnet").backbone() == "pixels:64"
    mine = tmp_path / "my.yml"
    mine.write_text(OWN + "settings: {backbone: a}\ntuned: {a: {backbone: b}}\n")
    assert load(str(mine)).backbone() == "a"


def test_what_a_caller_changes_stays_its_own():
    load("fedavg").layers("mini-clip")[0].settings["lr"] = 9
    published("fedot", "", "pacs")["C"] = 0.0
    assert load("fedavg").layers("mini-clip")[0].settings["lr"] == 0.01
    assert published("fedot", "", "pacs")["C"] == 96.64


def test_like_follows_paths_and_names(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.yaml").write_text(OWN + "title: Base\nsettings: {lr: 1, mu: 2}\non: {any: {mu: 3}}\n")
    (tmp_path / "deep" / "child.yaml").write_text("like: ../base.yaml\nadapter: mlp\nsettings: {lr: 4}\n")
    child = load(str(tmp_path / "deep" / "child.yaml"))
    assert (child.title, child.adapter, child.local) == ("Base", "mlp", "prox")
    assert merged(child.layers("")) == {"lr": 4, "mu": 2}
    assert merged(load(child.path, "tower").layers(""))["mu"] == 3
    (tmp_path / "fedot.yaml").write_text("like: fedot\n")  # a name is the built-in recipe, not the file itself
    assert load(str(tmp_path / "fedot.yaml")).adapter == "rotation"


@pytest.mark.parametrize(
    ("name", "on", "words"),
    [
        ("fedott", "", "did you mean fedot?"),
        ("", "", "no such recipe"),
        ("on/unet", "", "no such recipe"),
        ("../recipe", "", "no such recipe"),
        ("nowhere.yaml", "", "no such file"),
        ("ga", "unett", "on=unett: no such preset; did you mean unet?"),
        ("fedot", "unet", "depends on its adapter, rotation; on= works with afl, centralised, ditto"),
        ("local-only", "prompt", "depends on its adapter, head"),
    ],
)
def test_a_name_that_does_not_exist_or_combine(name, on, words):
    with pytest.raises(FedvlmError) as caught:
        load(name, on)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- adapter\n- local\n", "expected lines of key: value, found a list"),
        ("fedot", "found the text 'fedot'"),
        ("7", "found the number 7"),
        (OWN + "setings: {lr: 1}\n", "setings: no such key; did you mean settings?"),
        (OWN + "3: x\n", "3: no such key"),
        (OWN + "settings: 5\n", "settings: expected pairs such as {lr: 0.01, rounds: 50}, found the number 5"),
        (OWN + "settings:\n", "settings: expected pairs"),
        (OWN + "settings: [lr, 1]\n", "found a list"),
        (OWN + "settings: {lr: {a: 1}}\n", "settings: lr: found a mapping"),
        (OWN + "settings: {lr: [[1]]}\n", "settings: lr: found a list"),
        (OWN + "settings: {out: 2026-01-01}\n", "settings: out: found a date"),
        (OWN + "settings: {adapter: mlp}\n", "settings: adapter: not a setting; write adapter: at the top level"),
        (OWN + "settings: {lr: 1, lr: 2}\n", "line 4: the key lr is given twice"),
        (OWN + "tuned: {lr: 1}\n", "tuned: lr: expected pairs"),
        (
            OWN + "tuned: mini-clip\n",
            "tuned: expected pairs such as {mini-clip: {lr: 0.03}}, found the text 'mini-clip'",
        ),
        (OWN + "on: unet\n", "on: expected pairs such as {unet: {lr: 0.001}}, found the text 'unet'"),
        (OWN + "on: {unett: {lr: 1}}\n", "on: unett: no such preset; did you mean unet?"),
        ("adapter: head\n", "local and merge missing; add local: NAME, or like: RECIPE"),
        ("title: Mine\n", "adapter and local and merge missing"),
        ("like: fedott\n", "like: fedott: no such recipe; did you mean fedot?"),
        ("like: other.yaml\n", "like: other.yaml: no such file"),
        ("like: my.yaml\n", "circular (my.yaml → my.yaml)"),
        ("like: 5\n", 'like: expected text, found the number 5; put it in quotes: like: "5"'),
        ("like: [fedavg, ga]\n", "like: expected text, found a list"),
        (OWN + "title:\n", "title: has no value"),
        (OWN + "title: 2024\n", 'title: expected text, found the number 2024; put it in quotes: title: "2024"'),
        ("adapter: null\nlocal: sgd\nmerge: mean\n", "adapter: has no value"),
        ("adapter: ''\nlocal: sgd\nmerge: mean\n", "adapter: has no value"),
        ("adapter: yes\nlocal: sgd\nmerge: mean\n", "adapter: expected text, found true"),
        (OWN + "settings: {lr: 1\nidea: x\n", "line 5: "),
        (OWN + "title: a: b\n", "line 4: mapping values are not allowed in this context; indent with spaces"),
        (OWN + "\tidea: x\n", "line 4: "),
        (OWN + "idea: !!python/object:os.system x\n", "line 4: "),
        (OWN + "? [a]\n: b\n", "line 4: "),
        (OWN + "idea: 2026-99-99\n", "not YAML"),
        (OWN + "---\nidea: x\n", "line 4: "),
        (OWN + "settings: &a {lr: *a}\n", "settings: lr: found a mapping"),
        (OWN + "idea: \x07\n", "not YAML"),
        ("[" * 5000, ""),
    ],
)
def test_a_wrong_recipe_is_named_with_the_key_and_a_way_out(content, words, tmp_path):
    mine = tmp_path / "my.yaml"
    mine.write_text(content)
    with pytest.raises(FedvlmError) as caught:
        load(str(mine))
    assert str(caught.value).startswith(f"recipe {mine}: ") and words in str(caught.value)


def test_a_circle_of_several_recipes(tmp_path):
    for one, other in ("ab", "bc", "ca"):
        (tmp_path / f"{one}.yaml").write_text(f"like: {other}.yaml\n")
    with pytest.raises(FedvlmError, match=r"circular \(a.yaml → b.yaml → c.yaml → a.yaml\)"):
        load(str(tmp_path / "a.yaml"))


def test_text_encodings(tmp_path):
    mine = tmp_path / "my.yaml"
    mine.write_bytes(b"\xef\xbb\xbf" + (OWN + "title: Schrödinger\n").encode())  # as Windows' editors write it
    assert load(str(mine)).title == "Schrödinger"
    mine.write_bytes((OWN + "title: Schrödinger\n").encode("latin-1"))
    with pytest.raises(FedvlmError, match="not UTF-8"):
        load(str(mine))


def test_no_torch():
    """Commands that only list or check recipes start at once."""
    code = "import sys; from fedvlm.config import recipe; recipe.load('ga', 'unet'); recipe.published('ga', '', 'pacs')"
    code += "; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
