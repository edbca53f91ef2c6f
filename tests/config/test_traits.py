"""Every key says about itself what other modules ask: tables, sites, cards, pools. No module keeps a list of its own."""

from __future__ import annotations

import ast
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import pytest
from run_folders import write

import fedvlm
from fedvlm.config import catalogue
from fedvlm.config.config import TRAINING, Config, binding
from fedvlm.config.keys import Key, keys_of
from fedvlm.core.ranges import Purpose, Trait
from fedvlm.errors import FedvlmError
from fedvlm.report.gains import against_frozen
from fedvlm.report.tables import summarise
from fedvlm.training.folder import RunFolder

KEYS = keys_of(Config)
LISTS = {  # literal collections with names of keys that classify no keys: place → how many, and what they are
    "cli/commands/ls.py": (2, "headings of columns"),
    "cli/demo.py": (1, "what the demo runs"),
    "core/ranges.py": (1, "purposes"),
    "federation/remote.py": (1, "how long a call waits"),
    "federation/worker.py": (1, "entries of client.json"),
    "predict/finished.py": (1, "the questions to a finished run"),
    "report/page.py": (1, "headings of facts"),
}


def other(key: Key) -> object:
    """A value that is not the default and, where only some values count, one of these."""
    if key.decisive:
        return key.decisive[0]
    if key.choices:
        found: object = next(c for c in key.choices if c != key.default)
        return [found] if key.length else found
    if key.name == "split":
        return [80.0, 10.0, 10.0]
    if key.length:
        return [7] if key.type == "int" else ["noto"]
    return {"bool": True, "str": "another"}.get(key.type) or (0.75 if key.type == "float" else 7)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """zero-shot, fedavg and fedclip on three seeds; fedclip's scores are far better on all."""
    root = tmp_path_factory.mktemp("three")
    methods = {"zero-shot": 0, "fedavg": 3, "fedclip": 3}
    return [complete(write(root, method, "art", seed, n)) for method, n in methods.items() for seed in (1, 2, 3)]


def complete(run: RunFolder) -> RunFolder:
    """The run with all keys in its record; fedclip's clients are 20 points better, and a little more on later seeds."""
    record = run.record
    usual = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(Config()).items()}
    last = record.finished.last
    gain = (0.2 + record.seed / 1000) * (record.method.name == "fedclip")
    better = {
        n: {v: dict.fromkeys(("test", "val"), s["test"] + gain) for v, s in c.items()}
        for n, c in last["clients"].items()
    }
    last = last | {"clients": better}
    result = replace(record.finished, last=last, selected=last)
    run.write("run.json", replace(record, config=usual | record.config, result=result).to_json().encode())
    return run


def changed(runs: list[RunFolder], method: str, root: Path, **changes: object) -> list[RunFolder]:
    """The runs, those of one method with other keys."""
    out = []
    for run in runs:
        if run.record.method.name == method:
            copy = RunFolder(root / run.folder.name)
            copy.folder.mkdir(parents=True)
            config = run.record.config | changes
            copy.write("run.json", replace(run.record, config=config).to_json().encode())
            run = copy
        out.append(run)
    return out


def test_every_key_is_for_something_and_its_traits_exist():
    assert {k.purpose for k in KEYS} == set(get_args(Purpose))
    assert {t for k in KEYS for t in k.traits} == set(get_args(Trait)) - {"effort"}
    parts = [k for kind in catalogue.load().parts.values() for part in kind.values() for k in part.keys]
    assert {t for k in parts for t in k.traits} == {"effort", "path"} and not any(k.purpose for k in parts)
    assert catalogue.load().run == KEYS  # as the shipped JSON has them


def test_no_site_opens_a_place_that_another_party_names():
    assert set(catalogue.with_trait("path")) <= set(catalogue.with_trait("site", "central"))


@pytest.mark.parametrize("key", KEYS, ids=lambda k: k.name)
def test_rows_that_differ_in_a_key_are_named_unless_it_says_that_they_may(
    key: Key, three: list[RunFolder], tmp_path: Path
):
    """A key that rows must agree in: an error with fair=True, else a note; nothing is bold and nothing beats anything."""
    runs = changed(three, "fedclip", tmp_path, **{key.name: other(key)})
    if key.name == "seed":
        runs = [r for r in runs if (r.record.method.name, r.record.seed) != ("fedavg", 1)]
    for select in ("last", "selected"):
        table = summarise(runs, select)
        told = [n for n in table.notes if n.startswith("rows that follow different protocols")]
        if key.fair(select):
            assert len(told) == 1 and f"{key.name} " in told[0]
            assert "fedavg" in told[0] and "fedclip" in told[0]
            idle = key.purpose in TRAINING  # the frozen model has no such key
            assert table.bold == set() and any("fedclip" in v for v in against_frozen(table)) == idle
            assert not any("same protocol" in n or "best:" in n for n in table.notes)
            with pytest.raises(FedvlmError, match=rf"these differ in .*{key.name} "):
                summarise(runs, select, fair=True)
        else:
            assert told == [] and any(
                "same protocol for all rows" in n for n in summarise(runs, select, fair=True).notes
            )
    if not key.fair("selected"):
        assert {row for row, _ in table.bold} == {"fedclip"}
        assert all("above zero-shot: " in v and "fedclip" in v.split(";")[0] for v in against_frozen(summarise(runs)))


def test_a_key_that_says_nothing_must_agree():
    new = Key("new", "int", 1)
    assert new.fair("last") and new.fair("selected") and new.binds(1) and new.binds(2)


@pytest.mark.parametrize("key", KEYS, ids=lambda k: k.name)
def test_runs_with_other_numbers_have_another_identity(key: Key):
    """Those of keys that change no number, or only through the data's fingerprint, do not count."""
    usual = asdict(Config())
    same = binding(usual) == binding(usual | {key.name: other(key)})
    assert same == ("unbound" in key.traits)


def test_only_some_values_of_a_key_may_count():
    usual = asdict(Config())
    assert binding(usual) == binding(usual | {"protocol": "leave-one-domain-out"})
    assert binding(usual | {"encode": "half"}).keys() - binding(usual).keys() == {"encode"}


def test_training_says_nothing_of_a_method_that_trains_nothing(three: list[RunFolder], tmp_path: Path):
    """zero-shot beside methods with privacy, other rounds and half of the clients."""
    keys = {"participation": 0.5, "dp": "client", "secure": True, "evaluate_every": 3}
    both = changed(changed(three, "fedavg", tmp_path / "a", **keys), "fedclip", tmp_path / "b", **keys)
    assert {row for row, _ in summarise(both, fair=True).bold} == {"fedclip"}


def test_no_other_module_lists_keys():
    """Collections of three or more names of keys: as strings, as keys of a dict, or as attributes of a configuration."""
    names, root = {k.name for k in KEYS}, Path(fedvlm.__file__).parent
    found: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            entries = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else getattr(node, "keys", ())
            listed = [e.value for e in entries if isinstance(e, ast.Constant) and e.value in names]
            listed += [
                e.attr for e in entries if isinstance(e, ast.Attribute) and ast.unparse(e.value).endswith("config")
            ]
            if len(listed) >= 3:
                found.setdefault(path.relative_to(root).as_posix(), []).append(f"line {node.lineno}: {listed}")
    unknown = {place: lists for place, lists in found.items() if len(lists) > LISTS.get(place, (0, ""))[0]}
    assert unknown == {}, "give the keys a trait (core/ranges.py) and ask for it"
    assert LISTS.keys() <= found.keys(), "an exception that is no longer needed"
