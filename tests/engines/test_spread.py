"""One run over several workers: the same bits as in one process. Most tests have their workers in threads, with the same
pipes and files; one starts processes and kills one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import same
from safetensors.torch import load_file

from fedvlm.config.config import resolve
from fedvlm.core.cohort import Cohort
from fedvlm.data.pool import Pools
from fedvlm.engines import spread
from fedvlm.engines.base import Job
from fedvlm.engines.rows import Rows
from fedvlm.engines.spread import Spread
from fedvlm.errors import FedvlmError
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.train import train


class Thread:
    """A worker in a thread of this process."""

    def __init__(self, target, *args: object) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.thread = threading.Thread(target=target, args=(theirs, *args), daemon=True)
        self.thread.start()

    def give(self, what: object) -> None:
        self.pipe.send(what)

    def end(self) -> str:
        self.pipe.close()
        return "closed"


@pytest.fixture
def threads(monkeypatch) -> None:
    monkeypatch.setattr(spread, "Child", Thread)
    monkeypatch.setattr(spread, "obey", lambda: None)


def played(method: str, folder: Path, images: Path, **given: object) -> RunFolder:
    setup = resolve(method, {"data": str(images), "rounds": 2, "partition": "iid", "clients": 7} | given)
    return train(PlannedRun(setup, Pools().load(setup), folder))


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("fedot", {"chunk": 2}),  # private parameters, autograd
        ("ditto", {"engine": "serial", "participation": 0.6}),  # a row that another worker wrote
        ("scaffold", {"chunk": 3, "adapter": "linear"}),  # more in the message than a model
        ("fedavg", {"chunk": 3, "dp": "client", "noise_at": "client", "noise_multiplier": 1.0}),  # noise of the clients
    ],
)
def test_workers_change_no_bit(method, given, images, tmp_path, threads):
    if "dp" in given:
        pytest.importorskip("dp_accounting")
    alone = played(method, tmp_path / "1", images, **given)
    shared = played(method, tmp_path / "3", images, workers=3, **given)
    for a, b in zip(alone.load()[0], shared.load()[0], strict=True):
        same(a, b)
    assert (alone.folder / "rows.bin").read_bytes() == (shared.folder / "rows.bin").read_bytes()
    same(*(load_file(run.folder / "outputs.safetensors") for run in (alone, shared)))
    left = [[{k: v for k, v in r.items() if k != "seconds"} for r in run.rounds()] for run in (alone, shared)]
    assert left[0] == left[1]
    assert not list(shared.folder.glob("*.part"))


def test_without_a_chunk_all_workers_have_something_to_do(images, tmp_path, threads):
    """Fewer clients side by side, and the same result but for rounding; a run goes on with another number of workers."""
    alone = played("fedclip", tmp_path / "1", images, rounds=3)
    shared = played("fedclip", tmp_path / "2", images, rounds=3, workers=2)
    for name, value in alone.load()[0].shared.items():
        torch.testing.assert_close(shared.load()[0].shared[name], value, rtol=1e-5, atol=1e-4)  # float32, three rounds
    engine = opened(tmp_path / "3", images, workers=3)
    assert [len(c) for c in engine.chunks(np.arange(7))] == [2, 2, 2, 1]
    assert engine.chunks(np.arange(0)) == []
    engine.close()


def opened(folder: Path, images: Path, **given: object) -> Spread:
    setup = resolve("fedot", {"data": str(images), "partition": "iid", "clients": 7} | given)
    planned = PlannedRun(setup, Pools().load(setup))
    method, federation = planned.method, planned.federation
    folder.mkdir()
    engine = Spread(Job(setup, method, federation, federation.data, folder, print, None), 2)
    engine.start = method.init(7)
    return engine


def test_a_worker_that_fails_says_why(images, tmp_path, threads):
    engine = opened(tmp_path / "run", images, workers=2)
    with pytest.raises(FedvlmError, match=r"a worker of this run failed: .*nonsense"):
        Cohort(engine, np.arange(7), 1).ask("nonsense", engine.start.message())
    assert (
        len(Cohort(engine, np.arange(7), 1).ask("train", engine.start.message()).ids) == 7
    )  # the others' answers wait
    replies = engine.run("train", np.arange(7), engine.start.message(), 2, 0)
    next(replies)
    replies.close()  # an exchange that was given up
    assert len(Cohort(engine, np.arange(7), 2).ask("score", engine.start.message()).ids) == 7
    engine.close()


def test_a_worker_that_is_killed_ends_the_run_in_words(images, tmp_path):
    """With real processes: the answer of one of them, then its end; nothing is left behind."""
    engine = opened(tmp_path / "run", images, workers=2)
    try:
        assert len(Cohort(engine, np.arange(7), 1).ask("train", engine.start.message()).ids) == 7
        os.kill(engine.workers[0].process.pid, signal.SIGTERM)
        engine.workers[0].process.join()
        with pytest.raises(FedvlmError, match=r"a worker of this run died \(.*\); .* fewer workers= need less memory"):
            Cohort(engine, np.arange(7), 1).ask("score", engine.start.message())
    finally:
        engine.close()
    assert not any(w.process.is_alive() for w in engine.workers)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["rows.bin"]


def test_rows_that_another_process_wrote(tmp_path):
    newcomer = {"w": torch.zeros(3)}
    one, other = (Rows(newcomer, 5, tmp_path / "rows.bin", several=True) for _ in range(2))
    at = np.array([3, 1, 2])
    one.write(at, {"w": torch.arange(9.0).view(3, 3)}, 1)
    assert torch.equal(other.read(at, 1)["w"], torch.arange(9.0).view(3, 3))
    other.write(at[:1], {"w": torch.ones(1, 3)}, 2)
    assert torch.equal(one.read(at[:1], 2)["w"], torch.ones(1, 3))
    assert torch.equal(one.read(at[:1], 1)["w"], torch.tensor([[0.0, 1, 2]]))
