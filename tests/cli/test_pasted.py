"""What a command prints can be given to the next one, from any folder; of several runs the best by validation is named."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import DOMAINS, write

from fedvlm.api import Run, Runs
from fedvlm.cli import main
from fedvlm.errors import FedvlmError
from fedvlm.studies.comparison import best_runs, next_steps
from fedvlm.training import places
from fedvlm.training.folder import RunFolder, find_runs

VALIDATION = {"zero-shot": 0.99, "fedavg": 0.4, "fedclip": 0.7, "fedot": 0.5}


def with_validation(run: RunFolder, score: float) -> RunFolder:
    record = run.record
    last = record.finished.last | {"personal": {"test": 0.1, "val": score}}
    run.write("run.json", replace(record, result=replace(record.finished, last=last)).to_json().encode())
    return run


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunFolder]:
    """Four methods, three held-out targets; fedclip is the best on validation, above all with `photo` held out."""
    monkeypatch.setenv("FEDVLM_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "runs" / "mine"
    return [
        with_validation(write(home, method, domain, 1, 3 * (method != "zero-shot")), score + 0.01 * (domain == "photo"))
        for method, score in VALIDATION.items()
        for domain in DOMAINS
    ]


@pytest.mark.parametrize("command", ["show", "compare", "report", "resume"])
def test_names_that_ls_prints_are_taken_from_any_folder(
    command: str,
    bench: list[RunFolder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ls", "runs"]) == 0
    text = capsys.readouterr().out
    name, home = bench[0].folder.name, str(tmp_path / "runs" / "mine")
    assert all(run.folder.name in text for run in bench) and f"{home}: 12 runs" in text
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for words in (name, f"mine/{name}", f"{home}/{name}"):
        assert main([command, words]) == 0, words
    assert len(find_runs(["mine"])) == len(find_runs([home])) == 12


def test_a_name_is_known_where_the_run_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    one = write(Path("mine"), "fedavg", "art").folder
    assert one.name and places.named(one.name) is None
    places.remember(one)
    places.remember(one)
    assert (tmp_path / "cache" / places.LIST).read_text() == f"{tmp_path / 'mine'}\n"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert places.named(one.name) == tmp_path / one and places.named("mine") == tmp_path / "mine"
    assert places.named("other") is None and places.named("/other") is None
    places.remember(write(tmp_path / "second", "fedavg", "art").folder)
    with pytest.raises(FedvlmError, match="there are several"):
        places.named(one.name)


def test_what_is_no_run_is_said(bench: list[RunFolder], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "fedclip-art-1-2"]) == 1
    assert "no such method, recipe or run; did you mean fedclip-art-1-3" in capsys.readouterr().err
    assert main(["compare", "fedclip-art-1-2"]) == 1
    assert "no such run or folder of runs" in capsys.readouterr().err


def test_the_best_by_validation_is_named_not_the_last(bench: list[RunFolder]) -> None:
    """zero-shot has the highest validation score, and is no model to deploy where there is another."""
    assert [r.folder.name for r in best_runs(bench)] == ["fedclip-photo-1-3", "fedot-photo-1-3", "fedavg-photo-1-3"]
    assert best_runs(bench[:1]) == bench[:1]
    steps = next_steps(Runs([Run(r) for r in bench]))
    assert [s for s in steps if "predict" in s] == [f"next: fedvlm predict {bench[7].folder} IMAGE"]


@pytest.mark.parametrize("command", ["predict", "export", "show"])
def test_of_several_runs_a_command_asks_which(
    command: str, bench: list[RunFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.png").touch()
    words = [command, "runs/mine"] + ["x.png"] * (command == "predict")
    assert main(words) == 1
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert "holds 12 runs; give one of them" in lines[0]
    pasted = [shlex.split(line) for line in lines if line.startswith("fedvlm ")]
    assert [p[:3] for p in pasted] == [
        ["fedvlm", command, f"runs/mine/{n}-photo-1-3"] for n in ("fedclip", "fedot", "fedavg")
    ]
