"""Runs on other machines: what is sent is words, and a folder is all that comes back. A stand-in for a cluster carries the
words out in this process."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from helpers import same

from fedvlm.cli import main
from fedvlm.config.config import resolve
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.training import processes, slurm
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun


class Cluster:
    """Carries a command out when it is asked how it goes, the second time."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.cancelled: list[int] = []
        self.options: dict[str, object] = {}
        self.fails = ""

    def submit(self, commands: Sequence[list[str]], logs: object, at_once: int, options: dict[str, object]):
        self.options = options
        self.sent += commands
        return [self.task(n, words) for n, words in enumerate(commands)]

    def task(self, n: int, words: list[str]) -> SimpleNamespace:
        looks: list[int] = []

        def error() -> str | None:
            looks.append(1)
            if len(looks) == 1:
                return None
            if self.fails:
                return self.fails
            return "" if main(words[words.index("resume") :]) == 0 else "fedvlm: it failed"

        return SimpleNamespace(error=error, cancel=lambda: self.cancelled.append(n))


@pytest.fixture
def cluster(monkeypatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(slurm, "submit", found.submit)
    monkeypatch.setattr(slurm, "check_launcher", lambda name: None)
    monkeypatch.setattr(slurm, "POLL", 0.0)
    return found


def jobs_of(images, folder, **more) -> list[PlannedRun]:
    given = {"data": str(images), "rounds": 2, "launcher": "slurm", "launch": "cpus_per_task:4,slurm_partition:gpu"}
    setups = [resolve("fedclip", given | more | {"seed": s}) for s in (1, 2)]
    return [PlannedRun(setup, Pools().load(setup), folder / str(setup.config.seed)) for setup in setups]


def test_runs_elsewhere_are_the_runs_here(images, tmp_path, cluster):
    told: list[tuple[int, int]] = []

    def report(i, record, error):
        told.append((i, -1 if record is None else record["round"]))

    found = processes.run_all(jobs_of(images, tmp_path / "there"), 0, report)
    assert all(words[1:4] == ["-m", "fedvlm", "resume"] for words in cluster.sent) and len(cluster.sent) == 2
    assert all(isinstance(word, str) for words in cluster.sent for word in words)
    assert cluster.options == {"cpus_per_task": 4, "slurm_partition": "gpu"}
    assert [n for i, n in told if i == 0] == [0, 1, 2, -1]
    assert found[0].record.config["launcher"] == "none"  # else it would be sent on from there
    here = processes.run_all(jobs_of(images, tmp_path / "here", launcher="none"), 1, lambda *_, **__: None)
    for a, b in zip(found, here, strict=True):
        same(a.load()[0].shared, b.load()[0].shared)
    processes.run_all(jobs_of(images, tmp_path / "there"), 0, report)
    assert len(cluster.sent) == 2 and not cluster.cancelled  # finished runs are not sent again


def test_a_job_that_fails_is_told_and_one_that_is_lost_goes_on(images, tmp_path, cluster):
    cluster.fails = "Traceback …\nSomeError: fedvlm: the disk is full\n- /logs/1.out"
    with pytest.raises(FedvlmError, match="2 of 2 runs failed:\n  1, 2: the disk is full"):
        processes.run_all(jobs_of(images, tmp_path), 0, lambda *_, **__: None)
    cluster.fails = ""
    found = processes.run_all(jobs_of(images, tmp_path), 0, lambda *_, **__: None)
    assert all(run.done for run in found) and len(cluster.sent) == 4


def test_ctrl_c_cancels_what_was_submitted(images, tmp_path, cluster):
    def stop(i, record, error):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.run_all(jobs_of(images, tmp_path), 0, stop)
    assert cluster.cancelled == [0, 1]


def test_a_job_that_ended_without_its_run(tmp_path, images, cluster):
    run = RunFolder(tmp_path)
    assert slurm.reason("", SimpleNamespace(done=True)) == ""
    assert "the same command goes on" in slurm.reason("", SimpleNamespace(done=False))
    assert slurm.reason("killed", run) == "killed"


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None)
    with pytest.raises(FedvlmError, match=r'launcher=slurm needs submitit.*pip install "fedvlm\[slurm\]"'):
        slurm.check_launcher("slurm")
    slurm.check_launcher("none")


def test_what_a_job_asks_for():
    assert slurm.options_of(["num_gpus:0.5", "a:b:c", "n:3"]) == {"num_gpus": 0.5, "a": "b:c", "n": 3}
    with pytest.raises(FedvlmError, match="launch=4: expected NAME:VALUE"):
        slurm.options_of(["4"])
