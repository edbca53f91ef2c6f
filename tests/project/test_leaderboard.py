"""benchmarks/leaderboard.py: cells are run once, kept, merged and counted; what was not run says so."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def leaderboard(monkeypatch, images):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import leaderboard  # benchmarks/leaderboard.py

    monkeypatch.setitem(leaderboard.PROTOCOLS, "small", (str(images), leaderboard.DOMAINS))
    return leaderboard


def words(out: Path, *more: str) -> list[str]:
    methods = ["zero-shot", "fedavg", "moments solver=ridge priors=0"]
    return ["--only", "small", "--rounds", "2", "--seeds", "1", "2", "--out", str(out), "--methods", *methods, *more]


def test_cells_are_run_once_and_folders_can_be_merged(leaderboard, tmp_path, monkeypatch, capsys):
    out = tmp_path / "a"
    leaderboard.main(words(out, "--against", "zero-shot"))
    files = {p.relative_to(out).as_posix() for p in (out / "small").rglob("*.json")}
    rows = ("zero-shot", "fedavg", "moments solver=ridge priors=0")
    assert files == {f"small/{row}/{seed}.json" for row in rows for seed in (1, 2)} | {"small/fedavg/lr.json"}
    with (out / "leaderboard.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 6 and {line["rounds"] for line in lines if line["method"] == "fedavg"} == {"2.0"}
    kept = json.loads((out / "small" / "fedavg" / "1.json").read_text())
    assert float(next(r["G"] for r in lines if r["method"] == "fedavg" and r["seed"] == "1")) == kept["G"]
    assert "6 of 6 cells were run" in (said := capsys.readouterr().out) and "| small | fedavg | " in said

    monkeypatch.setattr(leaderboard.train, "train", None)  # nothing is run again
    leaderboard.main(words(out))
    (out / "small" / "fedavg" / "2.json").unlink()
    leaderboard.main(words(tmp_path / "b", "--merge", str(out), "--read"))
    page = (tmp_path / "b" / "leaderboard.html").read_text()
    assert "5 of 6 cells were run" in page and '<table class="sortable">' in page


def test_what_was_not_run_says_so(leaderboard, tmp_path, capsys):
    leaderboard.main(words(tmp_path, "--minutes", "0"))
    said = capsys.readouterr().out
    assert "0 of 6 cells were run" in said and said.count(leaderboard.NOT_RUN) == 3


def test_the_lr_is_the_one_with_the_best_validation(leaderboard, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(leaderboard.Board, "runs", lambda board, setup, folder: given.append(setup) or [setup])
    monkeypatch.setattr(leaderboard, "validation", lambda runs, measure: -abs(runs[0].local.lr - 0.55))
    board = leaderboard.Board(leaderboard_args(leaderboard, tmp_path))
    assert board.rate("fedavg", "small") == {"lr": pytest.approx(0.6)}  # the recipe's 0.2 × 3
    assert {s.config.seed for s in given} == {leaderboard.TUNING} and leaderboard.TUNING not in leaderboard.SEEDS
    assert board.rate("moments", "small") == {} and len(given) == len(leaderboard.GRID)


def leaderboard_args(leaderboard, out: Path):
    from argparse import Namespace

    return Namespace(data=Path(), only=["small"], methods=[], seeds=[1], rounds=2, minutes=1.0, out=out)
