"""A run is prepared once, and the way from the command line to the first step is short."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import small_setup, train_small

from fedvlm.data.pool import Pools
from fedvlm.training import planning
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun

ROOT = Path(__file__).parents[2]
MOST_FRAMES = 16  # from main to the first optimiser step, both counted
ONCE = ("resolve", "federate", "Method.build")


@pytest.fixture(scope="module")
def traced(images, tmp_path_factory) -> dict[str, str]:
    """What benchmarks/house.py counts in `fedvlm run fedot rounds=1` with an empty feature store."""
    work = tmp_path_factory.mktemp("traced")
    words = ["run", "fedot", f"data={images}", "unseen=noto", "rounds=1", f"out={work}/run"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "FEDVLM_CACHE": f"{work}/cache"}
    call = [sys.executable, str(ROOT / "benchmarks" / "house.py"), "--trace", *words]
    done = subprocess.run(call, env=env, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_way_to_the_first_step_is_short(traced):
    assert 5 < int(traced["frames to the first step"]) <= MOST_FRAMES


def test_what_prepares_a_run_is_called_once(traced):
    assert {name: traced[f"calls of {name}"] for name in ONCE} == dict.fromkeys(ONCE, "1")
    assert traced["loads of the backbone"] == "1"


def test_its_record_is_parsed_once(traced):
    assert traced["parses of run.json"] == "1"


def test_a_record_that_was_written_here_is_what_a_reader_finds(images, tmp_path):
    run = train_small(images, tmp_path / "run", participation=0.5)
    assert run.record == RunFolder(run.folder).record and run.record.result is not None


def test_a_record_that_another_process_writes_is_read_anew(images, tmp_path):
    run = train_small(images, tmp_path / "run")
    before = run.record.processors
    RunFolder(run.folder).computed_by({"somebody": "another processor"})
    assert run.record.processors == before | {"somebody": ["another processor"]}


def test_what_was_made_before_encoding_holds_unless_images_are_left_out(images, tmp_path):
    """Then clients are shared out anew, from those that can be read."""
    data = Path(shutil.copytree(images, tmp_path / "data"))
    whole = prepared(data)
    sorted(data.glob("*/*/*"))[0].write_bytes(b"no image")
    rest = prepared(data)
    for first, run in (whole, rest):
        assert (run.shares is first.shares) == (run.method is first.plain_method) == (run is whole[1])
        assert len(run.federation.data.x) == len(run.pool.x) and run.federation.data.x.shape[1] > 0
    assert len(rest[1].pool.x) == len(whole[1].pool.x) - 1


def prepared(data: Path) -> tuple[PlannedRun, PlannedRun]:
    """A run before its images are encoded, and after."""
    pools = Pools()
    first = planning.checked(small_setup(data), pools)
    return first, first.on(pools.load(first.setup))
