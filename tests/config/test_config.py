"""Keys, recipes and what overrides what."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedvlm.cli import main
from fedvlm.config import recipe
from fedvlm.config.config import COMMAND_LINE, Config, key_values, resolve
from fedvlm.config.keys import key_of
from fedvlm.errors import FedvlmError


@pytest.mark.parametrize("name", recipe.recipe_names())
def test_every_recipe_resolves_and_says_what_it_is(name):
    setup = resolve(name, {})
    assert setup.method.title and setup.method.idea
    assert setup.method.name == name


def test_the_papers_settings_are_kept():
    """From the papers' own text (METHODS sheets): a change here is a change of the method."""
    paper = {"values": "paper"}
    fedot = resolve("fedot", paper)
    assert (fedot.local.lr, fedot.local.weight_decay, fedot.local.epochs, fedot.config.rounds) == (5e-5, 5e-4, 1, 200)
    assert fedot.merge.weights == "uniform" and fedot.adapter.private == ("skew",) and fedot.local.optimiser == "sgd"
    fedclip = resolve("fedclip", paper)
    assert fedclip.local.optimiser == "adam" and 5e-5 <= fedclip.local.lr <= 5e-3
    assert (fedclip.local.batch, fedclip.config.rounds, fedclip.merge.weights) == (32, 200, "size")
    assert recipe.published("fedot", "", "pacs")["C"] == 96.64


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_defaults():
    assert resolve("fedot", {"lr": "0.5"}).local.lr == 0.5
    assert resolve("fedot", {"weights": "size"}).merge.weights == "size"
    assert resolve("fedot", {"rounds": "3"}).config.rounds == 3
    assert resolve("fedot", {"values": "paper"}).config.rounds == 200 != Config.rounds


def test_switching_a_part_keeps_what_the_new_one_knows_and_another_method_keeps_nothing():
    setup = resolve("fedclip", {"local": "ditto", "values": "paper"})
    assert setup.local.lr == 5e-4 and setup.local.optimiser == "adam" and setup.parts["local"].name == "ditto"
    assert resolve("fedavg", {"values": "paper"}).local.lr == 0.01
    replaced = resolve("fedot-b", {"adapter": "head", "values": "paper"}).parts["adapter"]
    assert replaced.name == "head" and "blocks" not in replaced.settings


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("False", False), ("no", False), ("1", True), ("0", False)]
)
def test_false_means_false(word, value):
    assert resolve("fedavg", {"cosine": word}).merge.cosine is value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lrr": "1"}, "did you mean lr?"),
        ({"lr": "fast"}, "expected a number"),
        ({"lr": "nan"}, "expected a number"),
        ({"lr": "-1"}, "above 0"),
        ({"rounds": "2.5"}, "whole number"),
        ({"rounds": "-1"}, "at least 0"),
        ({"batch": "0"}, "between 1 and"),
        ({"engine": "stackd"}, "did you mean stacked?"),
        ({"cosine": "maybe"}, "true or false"),
        ({"adapter": "rotate"}, "did you mean rotation?"),
        ({"adapter": "nowhere.py"}, "no such file"),
        ({"participation": "0"}, "above 0 and at most 1"),
        ({"quorum": "2"}, "between 0 and 1"),
        ({"seed": "-1"}, "expected a whole number between 0 and"),
        ({"betas": "0.9"}, "expected 2 values"),
    ],
)
def test_what_does_not_fit_is_named_with_a_way_out(given, words):
    with pytest.raises(FedvlmError, match=words.replace("?", r"\?")):
        resolve("fedavg", given)


def test_words_that_are_no_pairs():
    with pytest.raises(FedvlmError, match="key=value"):
        key_values(["rounds"])
    with pytest.raises(FedvlmError, match="twice"):
        key_values(["lr=1", "lr=2"])
    with pytest.raises(FedvlmError, match="did you mean fedot"):
        resolve("fedott", {})


def test_a_qualified_key_reaches_its_part_only():
    assert resolve("fedavg", {"local.lr": "0.3"}).local.lr == 0.3
    with pytest.raises(FedvlmError):
        resolve("fedavg", {"merge.lr": "0.3"})


def test_no_key_means_two_things():
    """Every key has one home in every combination of the recipes, so none has to be qualified."""
    from dataclasses import fields

    for name in recipe.recipe_names():
        setup = resolve(name, {})
        names = [f.name for part in (setup.config, setup.adapter, setup.local, setup.merge) for f in fields(part)]
        assert len(names) == len(set(names))


def test_lists():
    words = key_of("x", tuple[str, ...], [], "")
    assert words.coerce("a, b") == ["a", "b"]
    assert words.coerce("none") == []
    assert key_of("x", tuple[float, ...], [], "").coerce([60, 20, 20]) == [60, 20, 20]


def test_a_part_of_ones_own(tmp_path):
    idea = tmp_path / "shift.py"
    idea.write_text(
        '"""A private bias on the embedding."""\n'
        "from dataclasses import dataclass\n"
        "import torch\n"
        "from fedvlm.parts import Adapter\n"
        "@dataclass(frozen=True)\n"
        "class Shift(Adapter):\n"
        '    private: tuple[str, ...] = ("shift",)\n'
        "    strength: float = 1.0\n"
        "    def init(self, task, seed):\n"
        '        return {"shift": torch.zeros(task.dim)}\n'
        "    def logits(self, task, params, x):\n"
        '        return task.scale * (x + self.strength * params["shift"][:, None]) @ task.names().mT\n'
    )
    setup = resolve("fedavg", {"adapter": str(idea), "strength": "0.5"})
    assert setup.adapter.strength == 0.5 and setup.parts["adapter"].name == str(idea)
    (tmp_path / "broken.py").write_text("import nothing_there")
    with pytest.raises(FedvlmError, match="does not import"):
        resolve("fedavg", {"adapter": str(tmp_path / "broken.py")})
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(FedvlmError, match="exactly one"):
        resolve("fedavg", {"adapter": str(tmp_path / "empty.py")})


def own(folder: Path, text: str) -> str:
    path = folder / "my.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_users_recipe_beats_tuned_settings_and_the_command_line_beats_both(tmp_path):
    tuned, paper = resolve("fedot", {}), resolve("fedot", {"values": "paper"})
    assert tuned.parts["local"].settings["lr"] != paper.parts["local"].settings["lr"]
    mine = own(tmp_path, "like: fedot\nsettings: {lr: 0.5}\n")
    for given in ({}, {"values": "paper"}):
        setup = resolve(mine, given)
        assert setup.parts["local"].settings["lr"] == setup.local.lr == 0.5
        assert setup.origins["local.lr"] == "recipe my.yaml"
    setup = resolve(mine, {})
    assert setup.parts["local"].settings["weight_decay"] == paper.local.weight_decay  # the rest is inherited
    assert (
        setup.config.rounds == tuned.config.rounds and setup.origins["run.rounds"] == "tuned for mini-clip, like fedot"
    )
    setup = resolve(mine, {"lr": "0.7"})
    assert setup.parts["local"].settings["lr"] == 0.7 and setup.origins["local.lr"] == COMMAND_LINE


def test_each_layer_counts_where_the_stronger_ones_say_nothing(tmp_path):
    text = "adapter: head\nlocal: sgd\nmerge: mean\nsettings: {lr: 0.2, batch: 8}\n"
    base = own(tmp_path, text + "tuned: {mini-clip: {lr: 0.3}, other: {lr: 0.4}}\n")
    setup = resolve(base, {})
    assert (setup.local.lr, setup.local.batch, setup.local.epochs) == (0.3, 8, 1)
    assert setup.origins["local.lr"] == "tuned for mini-clip, recipe my.yaml" and "local.epochs" not in setup.origins
    assert resolve(base, {"values": "paper"}).local.lr == 0.2
    assert resolve(base, {"backbone": "other"}).local.lr == 0.4 and resolve(base, {"backbone": "third"}).local.lr == 0.2
    (tmp_path / "child.yaml").write_text("like: my.yaml\nsettings: {lr: 0.6}\n")
    child = resolve(str(tmp_path / "child.yaml"), {})
    assert (child.local.lr, child.local.batch, child.method.name) == (0.6, 8, "child")


def test_a_method_on_a_network():
    setup = resolve("ga", {"on": "unet"})
    assert (setup.method.name, setup.method.on, setup.method.label) == ("ga", "unet", "ga on=unet")
    assert setup.parts["adapter"].name == "unet" and setup.parts["merge"].name == "ga"
    assert setup.config.backbone.startswith("pixels:") and "on" not in setup.settings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("settings: {lrr: 0.5}\n", "recipe my.yaml: lrr= is not a key here; did you mean lr?"),
        ("settings: {lr: fast}\n", "recipe my.yaml: lr=fast: expected a number"),
        ("settings: {rounds: 2.5}\n", "recipe my.yaml: rounds=2.5: expected a whole number"),
        ("settings: {betas: 3}\n", "recipe my.yaml: betas=3: expected 2 values, such as 0.9,0.999"),
        ("settings: {optimiser: adm}\n", "recipe my.yaml: optimiser=adm: did you mean adam?"),
        ("settings: {cosine: 7}\n", "recipe my.yaml: cosine=7: expected true or false"),
        ("settings: {local.lrr: 1}\n", "recipe my.yaml: local.lrr= is not a key here"),
        ("tuned: {mini-clip: {lrr: 1}}\n", "recipe my.yaml): lrr= is not a key here; did you mean lr?"),
        ("setings: {lr: 1}\n", "my.yaml: setings: no such key; did you mean settings?"),
        ("adapter: rotate\n", "adapter=rotate: no such adapter; did you mean rotation?"),
    ],
)
def test_a_wrong_line_in_a_users_recipe_is_answered_with_file_key_and_the_way_out(text, words, tmp_path):
    with pytest.raises(FedvlmError) as caught:
        resolve(own(tmp_path, "like: fedot\n" + text), {})
    assert words in str(caught.value)


@pytest.mark.parametrize("line", ["mu: 0.5", "merge.lr: 0.5", "on: unet"])
def test_no_line_of_a_users_recipe_is_ignored_in_silence(line, tmp_path):
    """mu= is a key of local=prox, which this recipe does not use; on= belongs to the command line."""
    with pytest.raises(FedvlmError, match=line.partition(":")[0]):
        resolve(own(tmp_path, f"like: fedot\nsettings: {{{line}}}\n"), {})
    replaced = resolve(own(tmp_path, "like: fedprox\nlocal: sgd\n"), {})  # but what it inherits may fall away
    assert "mu" not in replaced.parts["local"].settings


@pytest.mark.parametrize("method", recipe.recipe_names())
def test_show_yaml_is_a_recipe_with_the_same_settings(method, tmp_path, capsys):
    assert main(["show", method, "--yaml"]) == 0
    mine = own(tmp_path, capsys.readouterr().out)
    before, after = resolve(method, {}), resolve(mine, {})
    assert after.parts == before.parts and after.config == before.config
    assert (after.method.title, after.method.idea) == (before.method.title, before.method.idea)


def test_show_yaml_holds_what_was_given_and_says_where_each_value_comes_from(tmp_path, capsys):
    words = ["unseen=noto,twemoji", "template=a {}: # of 'ours'", "eps=1e-05", "lr=0.5", "betas=0.5,0.25"]
    assert main(["show", "fedot", *words, "--yaml"]) == 0
    text = capsys.readouterr().out
    mine, asked = resolve(own(tmp_path, text), {}), resolve("fedot", key_values(words))
    assert mine.parts == asked.parts and mine.config == asked.config
    assert mine.config.template == "a {}: # of 'ours'" and mine.local.eps == 1e-5
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert "# from command line" in lines["lr"] and "# from paper" in lines["weight_decay"]
    assert "# from tuned for mini-clip" in lines["rounds"] and "from" not in lines["momentum"]


def test_init_starts_a_recipe_that_runs(images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my.yaml", "like=fedclip", "lr=0.2"]) == 0
    mine, like = resolve("my.yaml", {}), resolve("fedclip", {})
    assert mine.local.lr == 0.2 != like.local.lr and mine.method.name == "my"
    changed = {"local": like.parts["local"].settings | {"lr": 0.2}}
    for axis in ("adapter", "local", "merge"):
        assert mine.parts[axis].name == like.parts[axis].name
        assert mine.parts[axis].settings == changed.get(axis, like.parts[axis].settings)
    assert main(["run", "my.yaml", f"data={images}", "rounds=1", "out=run"]) == 0
    assert resolve("my.yaml", {}).config == like.config  # the run's own keys are as in the recipe it starts from
    text = Path("my.yaml").read_text()
    capsys.readouterr()
    assert main(["init", "my.yaml"]) == 1 and "my.yaml exists; choose another name" in capsys.readouterr().err
    assert Path("my.yaml").read_text() == text
    assert main(["init", "plain.yaml"]) == 0
    assert resolve("plain.yaml", {}).parts == resolve("fedavg", {}).parts


def test_init_takes_every_key_that_show_takes(tmp_path, monkeypatch):
    """Parts and qualified keys, too."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "a.yaml", "like=fedavg", "adapter=mlp", "local.lr=0.2", "unseen=noto,twemoji"]) == 0
    made = resolve("a.yaml", {})
    assert made.parts["adapter"].name == "mlp" and made.local.lr == 0.2 and made.config.unseen == ("noto", "twemoji")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["my.txt"], "ends in .yaml"),
        (["my.yaml", "like=fedoot"], "did you mean fedot?"),
        (["my.yaml", "lrr=1"], "did you mean lr?"),
        (["my.yaml", "lr=x"], "expected a number"),
        (["nowhere/my.yaml"], "cannot be written"),
    ],
)
def test_init_refuses_and_writes_nothing(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", *words]) == 1
    assert says in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_users_recipe_can_ask_for_the_papers_settings(tmp_path):
    (tmp_path / "mine.yaml").write_text("like: fedot\nsettings: {values: paper}\n")
    assert resolve(str(tmp_path / "mine.yaml"), {}).parts["local"].settings["lr"] == 5e-5
    asked = resolve(str(tmp_path / "mine.yaml"), {"values": "tuned"})
    assert asked.parts["local"].settings["lr"] == resolve("fedot", {}).parts["local"].settings["lr"] != 5e-5


def test_a_value_out_of_range_names_its_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("like: fedot\nsettings: {lr: -1}\n")
    with pytest.raises(FedvlmError, match=r"mine\.yaml.*lr=-1: expected a number above 0"):
        resolve(str(tmp_path / "mine.yaml"), {})


def test_a_key_of_another_merge_is_answered_with_the_merges_that_have_it():
    with pytest.raises(FedvlmError, match=r"merge=mean has none, merge=(afl|ga|faa) has"):
        resolve("fedavg", {"step": 1})
