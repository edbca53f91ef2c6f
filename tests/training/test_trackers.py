"""Trackers (log=): the numbers of each round, in an installed tracker's own files."""

from __future__ import annotations

import importlib.util
import sqlite3
import sys

import pytest
from helpers import small_setup

from fedvlm.cli import main
from fedvlm.data.pool import Pools
from fedvlm.training import train
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.trackers import numbers

TRACKERS = ("tensorboard", "wandb", "mlflow")


def test_the_numbers_of_a_round():
    """Words, lists and what is by client are left out."""
    record = {"round": 3, "P": 0.5, "G": None, "void": "why", "missing": ["a"], "weights": {"a": 0.1}}
    record |= {"shared": {"test": 0.25, "val": None}, "metrics": {"ece": {"personal": {"test": 0.125}}}}
    record |= {"clients": {"a": {"shared": {"test": 1.0}}}, "asked": 2, "effects": {"drift": 2.0}}
    assert numbers(record) == {
        "P": 0.5,
        "asked": 2.0,
        "shared/test": 0.25,
        "metrics/ece/personal/test": 0.125,
        "effects/drift": 2.0,
    }


@pytest.mark.parametrize("name", TRACKERS)
def test_one_that_is_missing_is_named_before_anything_is_encoded(name, images, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert main(["run", "fedavg", f"data={images}", "rounds=1", f"log={name}", f"out={tmp_path / 'run'}"]) == 1
    said = capsys.readouterr().err
    assert f'log={name} needs {name}; install it with `pip install "fedvlm[tracking]"`' in said
    assert not (tmp_path / "run").exists()


def test_nothing_is_imported_unless_asked_for(images, tmp_path):
    before = set(sys.modules)
    setup = small_setup(images, "fedavg", rounds=1)
    train.train(PlannedRun(setup, Pools().load(setup), tmp_path / "run"))
    assert not {*TRACKERS, *(f"fedvlm.training.trackers.{name}" for name in TRACKERS)} & (sys.modules.keys() - before)


@pytest.mark.parametrize("name", TRACKERS)
def test_the_rounds_are_in_the_trackers_files(name, images, tmp_path, monkeypatch):
    pytest.importorskip(name)
    for variable in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    setup = small_setup(images, "fedavg", rounds=2, log=name)
    run = train.train(PlannedRun(setup, Pools().load(setup), tmp_path / "run"))
    wanted = [(r["round"], pytest.approx(r["P"], abs=1e-6)) for r in run.rounds()]
    assert len(wanted) == 3
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run.folder / "tensorboard"))
        events.Reload()
        assert [(e.step, e.value) for e in events.Scalars("P")] == wanted
    elif name == "mlflow":
        with sqlite3.connect(run.folder / "mlflow.db") as store:
            assert store.execute("select step, value from metrics where key = 'P' order by step").fetchall() == wanted
    else:
        (written,) = run.folder.glob("wandb/offline-run-*/run-*.wandb")
        assert written.stat().st_size > 500
