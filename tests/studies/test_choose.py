"""`fedvlm choose`: what it tries in which order, by what it judges, that it keeps to its limits and goes on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import fedvlm
from fedvlm.cli import main
from fedvlm.core.records import RoundRecord
from fedvlm.errors import FedvlmError
from fedvlm.studies import choose
from fedvlm.training.folder import RunFolder, find_runs

METHODS = ["zero-shot", "moments", "fedavg", "ditto", "local-only"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("choose")


@pytest.fixture(scope="module")
def found(images: Path, out: Path) -> choose.Chosen:
    return fedvlm.choose(
        str(images), methods=METHODS, rounds=4, seeds=[1, 2, 3], out=str(out), minutes=20, unseen="noto"
    )


def searched(out: Path) -> list[RunFolder]:
    return [RunFolder(p.parent) for p in (out / "sweep").rglob("run.json")]


def test_the_answer_has_a_sentence_a_table_and_a_command(found: choose.Chosen) -> None:
    rows = {str(v["method"]) for v in found.table.values}
    assert found.method in rows and "zero-shot" in rows and "moments" in rows and len(rows) in (3, 4)
    assert found.sentence.startswith(f"{found.method}") and " MB; " in found.sentence
    assert all(v["seeds"] == 3 for v in found.table.values) and not found.table.unlike
    assert found.command.startswith(f"fedvlm run {found.method} data=") and "rounds=4" in found.command
    assert found.sentence in repr(found) and found.command in repr(found) and found.not_tried == {}


def test_candidates_train_in_part_on_the_first_seed_and_survivors_at_several_rates(
    found: choose.Chosen, out: Path
) -> None:
    runs = [r.record for r in searched(out)]
    assert {r.seed for r in runs} == {1}
    first = {r.method.name for r in runs if r.rounds == math.ceil(4 / choose.FIRST)}
    assert first == {"moments", "fedavg", "ditto", "local-only"} or first | {"moments"} == {*METHODS} - {"zero-shot"}
    second = [(r.method.name, r.local.settings["lr"]) for r in runs if r.rounds == math.ceil(4 / choose.SECOND)]
    assert len(second) == 3 * len({name for name, _ in second}) and {n for n, _ in second} <= {*METHODS[2:]}
    assert not any(out / "sweep" in r.folder.parents for r in find_runs([str(out)]))


def test_the_same_command_repeats_nothing(found: choose.Chosen, out: Path, images: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in out.rglob("run.json")}
    again = fedvlm.choose(
        str(images), methods=METHODS, rounds=4, seeds=[1, 2, 3], out=str(out), minutes=20, unseen="noto"
    )
    assert (again.method, again.settings, again.sentence) == (found.method, found.settings, found.sentence)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("run.json")} == before


def test_it_judges_by_validation_images_alone() -> None:
    last: RoundRecord = {"round": 1, "newcomer": {"val": 0.4, "test": 0.9}, "personal": {"val": 0.6, "test": 0.0}}
    assert choose.validation(last, "new-clients") == 0.4 and choose.validation(last, "own-clients") == 0.6
    assert choose.validation(last, "both") == 0.5
    assert choose.validation({"round": 1, "personal": {"val": 0.6}}, "both") == -math.inf


def test_what_sends_too_much_or_takes_too_long_is_named(images: Path, tmp_path: Path) -> None:
    keys = {"methods": ["moments", "fedavg", "ditto"], "rounds": 2, "seeds": [1], "unseen": "noto"}
    small = fedvlm.choose(str(images), **keys, out=str(tmp_path / "a"), mb=0.2)
    assert small.method in ("fedavg", "ditto") and "more than mb=0.2" in small.not_tried["moments"]
    assert "1 seed cannot decide" in small.sentence
    with pytest.raises(FedvlmError, match="no candidate could be tried"):
        fedvlm.choose(str(images), **keys, out=str(tmp_path / "b"), minutes=0)


def test_a_goal_that_cannot_be_measured_is_refused(images: Path) -> None:
    with pytest.raises(FedvlmError, match="give new-clients, own-clients, both"):
        fedvlm.choose(str(images), goal="winning")
    with pytest.raises(FedvlmError, match="measured on test images only"):
        fedvlm.choose(str(images), goal="outsiders")


def test_one_domain_and_few_images(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """class/image: nobody can be held out, so it goes by own clients."""
    one = images / "noto"
    words = ["choose", f"data={one}", "methods=moments,fedavg", "rounds=2", "seeds=1,2,3", "clients=2"]
    assert main([*words, f"out={tmp_path / 'one'}", "partition=iid"]) == 0
    text = capsys.readouterr().out
    assert "on own clients" in text and "new clients were not tested" in text and "next: fedvlm run " in text
    assert main([*words, "goal=new-clients", f"out={tmp_path / 'two'}"]) == 1
    assert "nobody can be held out" in capsys.readouterr().err
