"""A bench whose processes die: the run of a dead process is tried once more, and all others finish."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from helpers import scores
from safetensors.torch import save_file

from fedvlm.config.config import Setup, resolve
from fedvlm.core.records import RoundRecord
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.processes import run_all

DEADLY = '''"""Dies while it trains, in the middle of a record on the pipe to its parent."""
import gc
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection

from fedvlm.parts import Local


@dataclass(frozen=True)
class Deadly(Local):
    def train(self, *args, **kwargs):
        if os.name == "posix":
            for pipe in [c for c in gc.get_objects() if isinstance(c, Connection)]:
                os.write(pipe.fileno(), b"\\0\\0\\x10\\0half")
        os._exit(3)
'''


@pytest.fixture
def points(tmp_path) -> Path:
    """A file of embeddings: nothing has to be encoded."""
    draw, path = torch.Generator().manual_seed(1), tmp_path / "points.safetensors"
    x, text = torch.randn(90, 8, generator=draw), torch.randn(3, 8, generator=draw)
    save_file({"x": x, "y": torch.arange(90) % 3, "text": text}, path)
    return path


def setup(points: Path, **keys: object) -> Setup:
    return resolve("fedot", {"data": str(points), "partition": "iid", "clients": 3, "rounds": 4, "lr": 0.05, **keys})


def planned_run(points: Path, folder: Path, **keys: object) -> PlannedRun:
    one = setup(points, **keys)
    return PlannedRun(one, Pools().load(one), folder)


def jobs(points: Path, folder: Path) -> list[PlannedRun]:
    return [planned_run(points, folder / str(s), seed=s) for s in (1, 2, 3)]


def test_a_child_that_is_killed_is_replaced_and_every_run_ends_with_the_same_bits(points, tmp_path):
    whole = run_all(jobs(points, tmp_path / "whole"), 1, lambda i, record, error: None)
    killed: list[int] = []
    told: list[tuple[int, str]] = []

    def kill_one(i: int, record: RoundRecord | None, error: str) -> None:
        if record is None:
            told.append((i, error))
        elif record["round"] == 2 and not killed:
            killed.append(i)
            for child in multiprocessing.active_children():  # one of them plays this run; another may be idle
                child.kill()

    cut = run_all(jobs(points, tmp_path / "cut"), 2, kill_one)
    assert killed and sorted(told) == [(i, "") for i in range(3)]
    for one, other in zip(whole, cut, strict=True):
        assert one.done and scores(one) == scores(other)
        for name in ("state.safetensors", "rows.bin", "outputs.safetensors"):
            assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes(), name
    logs = [run.folder / "log.txt" for run in cut]
    assert sum("its process died" in log.read_text() for log in logs if log.exists()) in (1, 2)
    assert not multiprocessing.active_children()


def test_a_run_that_always_dies_is_named_and_the_others_finish(points, tmp_path):
    (tmp_path / "deadly.py").write_text(DEADLY)
    planned = jobs(points, tmp_path)
    planned[0] = planned_run(points, tmp_path / "deadly", local=str(tmp_path / "deadly.py"))
    with pytest.raises(
        FedvlmError, match=r"^1 of 3 runs failed:\n  deadly: its process died twice \(exit code 3\)"
    ) as e:
        run_all(planned, 2, lambda i, record, error: None)
    assert [run.folder for run in e.value.finished] == [job.folder for job in planned[1:]]
    assert all(RunFolder(job.folder).done for job in planned[1:]) and not RunFolder(tmp_path / "deadly").done
    assert not multiprocessing.active_children()
