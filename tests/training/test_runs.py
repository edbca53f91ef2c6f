"""Run folders: killed at any moment and resumed to the same bits, recognised, locked, never half written."""

from __future__ import annotations

import contextlib
import errno
import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock, Timeout
from helpers import scores, small_setup, train_small

from fedvlm import api
from fedvlm.backbones.arithmetic import arithmetic
from fedvlm.config.config import Setup
from fedvlm.core.records import RoundRecord
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.training import train
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.processes import run_all


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "fedvlm", *words]


def test_killed_again_and_again_it_ends_with_the_same_bits(images, tmp_path):
    """kill -9 when its folder is there, and after its sixth and its 17th record; where in a round that is, differs."""
    words = [f"data={images}", "unseen=noto", "rounds=30", "lr=0.05", "seed=7"]
    subprocess.run(command("run", "fedot", *words, f"out={tmp_path / 'whole'}"), check=True, capture_output=True)
    folder = tmp_path / "cut"
    records = folder / "rounds.jsonl"
    points = [
        folder.exists,
        *(lambda n=n: records.exists() and records.read_bytes().count(b"\n") >= n for n in (6, 17)),
    ]
    for reached in points:  # benchmarks/faults.py does it hundreds of times, at random moments
        begun = (folder / "run.json").exists()
        again = ("resume", str(folder)) if begun else ("run", "fedot", *words, f"out={folder}")
        process = subprocess.Popen(command(*again), stdout=subprocess.DEVNULL)
        while not reached() and process.poll() is None:
            time.sleep(0.002)
        process.kill()
        assert process.wait() != 0, "it ended before it was killed"
    subprocess.run(command("resume", str(folder)), check=True, stdout=subprocess.DEVNULL)
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    assert whole.done and cut.done
    assert scores(whole) == scores(cut)
    for name in ("state.safetensors", "rows.bin", "outputs.safetensors"):
        assert (whole.folder / name).read_bytes() == (cut.folder / name).read_bytes(), name


def test_a_bench_that_is_killed_takes_its_runs_along(images, tmp_path):
    """kill -9 while two runs are under way: within seconds nobody holds them, and the same command goes on."""
    out = tmp_path / "runs"
    words = ["bench", "fedot", "fedclip", f"data={images}", "unseen=noto", "seeds=1", "rounds=4000", f"out={out}"]
    process = subprocess.Popen(command(*words, "jobs=2"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def held() -> list[bool]:
        found = []
        for lock in out.glob("*/.lock"):
            try:
                with FileLock(lock, timeout=0):
                    found.append(False)
            except Timeout:
                found.append(True)
        return found

    try:
        deadline = time.monotonic() + 90
        while held().count(True) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert held().count(True) == 2
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 30
    while any(held()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(held())


@pytest.mark.parametrize("engine", ["stacked", "serial"])
def test_stopped_after_each_step_it_goes_on_alike(images, tmp_path, engine, monkeypatch):
    """Every place between two writes of a round, tried one by one."""
    whole = train_small(images, tmp_path / "whole", engine=engine)
    for place in ("append", "save", "finish"):
        for at in range(1, 5):
            folder = tmp_path / f"{place}{at}"
            calls = {"n": 0}

            inner = getattr(RunFolder, place)

            class Stop(Exception):
                pass

            def stopping(self, *args, calls=calls, at=at, inner=inner):
                calls["n"] += 1
                if calls["n"] == at:
                    raise Stop
                return inner(self, *args)

            with monkeypatch.context() as patch:
                patch.setattr(RunFolder, place, stopping)
                with contextlib.suppress(Stop):
                    train_small(images, folder, engine=engine)
            again = train_small(images, folder, engine=engine)
            assert scores(again) == scores(whole)
            assert (again.folder / "state.safetensors").read_bytes() == (
                whole.folder / "state.safetensors"
            ).read_bytes()


def test_the_same_run_is_recognised(images, tmp_path):
    first = train_small(images, tmp_path / "run")
    stamp = (first.folder / "state.safetensors").stat().st_mtime_ns
    train_small(images, tmp_path / "run")
    assert (first.folder / "state.safetensors").stat().st_mtime_ns == stamp


def test_other_weights_under_the_old_name_are_another_run(images, tmp_path):
    """So are other images: nothing is taken for finished that would give other numbers."""
    setup = small_setup(images)
    pool = Pools().load(setup)
    name, _, mark = pool.backbone.rpartition("@")
    marks = {PlannedRun(setup, one).name for one in (pool, replace(pool, backbone=f"{name}@{mark[::-1]}"))}
    marks.add(PlannedRun(setup, replace(pool, fingerprint=pool.fingerprint[::-1])).name)
    assert len(marks) == 3
    train.train(PlannedRun(setup, pool, tmp_path / "run"))
    with pytest.raises(FedvlmError, match="holds another run"):
        train.train(PlannedRun(setup, replace(pool, backbone=f"{name}@{mark[::-1]}"), tmp_path / "run"))


def test_an_idea_that_was_edited_is_another_run(images, tmp_path):
    idea = tmp_path / "idea.py"
    code = (
        "from dataclasses import dataclass\nfrom fedvlm.parts import Head\n\n\n"
        "@dataclass(frozen=True)\nclass Idea(Head):\n    pass\n"
    )
    idea.write_text(code)
    train_small(images, tmp_path / "run", adapter=str(idea))
    idea.write_text(code + "# better\n")
    with pytest.raises(FedvlmError, match="holds another run"):
        train_small(images, tmp_path / "run", adapter=str(idea))


def test_gaps_are_told_by_name(images, tmp_path):
    last = train_small(images, tmp_path / "run", merge="ga").rounds()[-1]
    assert set(last["gaps"]) == set(last["weights"]) == {"noto", "twemoji"} and last["gap_variance"] >= 0


def test_another_run_in_the_folder_is_not_overwritten(images, tmp_path):
    train_small(images, tmp_path / "run")
    with pytest.raises(FedvlmError, match="differs in local"):
        train_small(images, tmp_path / "run", lr=0.01)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(FedvlmError, match="not empty"):
        train_small(images, tmp_path / "mine")


def test_two_processes_do_not_share_a_run(images, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with RunFolder(folder).locked(), pytest.raises(FedvlmError, match="another process"):
        train_small(images, folder)


def test_a_full_disk_loses_nothing(images, tmp_path, monkeypatch):
    whole = train_small(images, tmp_path / "whole")
    inner, calls = Path.replace, {"n": 0}

    def full(self, target):
        if target.name == "state.safetensors":
            calls["n"] += 1
            if calls["n"] == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
        return inner(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(FedvlmError, match="No space left"):
            train_small(images, tmp_path / "run")
    assert scores(train_small(images, tmp_path / "run")) == scores(whole)


def test_a_damaged_folder_is_named(tmp_path, images):
    folder = train_small(images, tmp_path / "run").folder
    (folder / "state.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(FedvlmError, match="damaged"):
        RunFolder(folder).load()
    (folder / "run.json").write_text("{")
    with pytest.raises(FedvlmError, match="damaged"):
        _ = RunFolder(folder).record


def test_what_a_run_records(images, tmp_path):
    run = train_small(images, tmp_path / "run", participation=0.5, dropout=0.0)
    record = run.record
    assert record.seed == record.config["seed"] == 50 and record.data.images == 150 and record.format == 2
    assert record.backbone.name == "mini-clip" and len(record.backbone.fingerprint) == 16
    assert {"fedvlm", "torch", "python", "commit"} <= set(record.versions)
    assert record.method.name == "fedot" and record.adapter.name == "rotation" and record.local.settings["lr"] == 0.05
    assert record.given["participation"] == 0.5 and record.unseen == ["openmoji"]
    last = run.rounds()[-1]
    assert last["asked"] == 1 and set(last["weights"].values()) == {1.0}
    head, word = 5 * 256 * 4, 4
    assert last["bytes_down"] == head and last["bytes_up"] == head + 2 * word
    assert {"round", "bytes_down", "bytes_up", "seconds", "shared", "personal", "newcomer", "G", "P"} <= set(last)
    assert record.finished.selected["round"] in range(4) and record.finished.last == last
    assert json.loads((run.folder / "run.json").read_text()) == json.loads(record.to_json())


def test_a_run_says_with_what_it_was_computed_and_where_that_changed(images, tmp_path, monkeypatch, capsys):
    whole = small_setup(images, rounds=2)
    run = RunFolder(tmp_path / "run")

    def stop(record: RoundRecord) -> None:
        if record["round"] == 1:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        train.train(PlannedRun(whole, Pools().load(whole), run.folder), stop)
    here = str(arithmetic())
    assert run.record.processors == {"server": [here]} and arithmetic().mark in here
    monkeypatch.setattr(train, "described_arithmetic", lambda device: "oneDNN, AVX2, on another processor (00000000)")
    train.train(PlannedRun(whole, Pools().load(whole), run.folder))
    assert run.done and run.record.processors == {"server": [here, "oneDNN, AVX2, on another processor (00000000)"]}
    run.computed_by({"server": here})
    assert run.record.processors["server"][2:] == [here]
    told = "server computes with oneDNN, AVX2, on another processor (00000000) from here on"
    assert told in (run.folder / "log.txt").read_text() and told in capsys.readouterr().err


def test_a_run_folder_is_all_that_is_needed_to_go_on(images, tmp_path):
    """Its setup builds the same parts, from what was recorded and not from today's recipes."""
    run, setup = train_small(images, tmp_path / "run", batch=7), small_setup(images, batch=7)
    again = run.setup()
    assert again.parts == setup.parts and again.config == setup.config and again.method == setup.method
    assert (again.adapter, again.local, again.merge) == (setup.adapter, setup.local, setup.merge)
    assert again.binding() == setup.binding()


def test_a_run_keeps_the_code_of_the_users_own_parts(images, tmp_path):
    (tmp_path / "mine").mkdir()
    idea = tmp_path / "mine" / "idea.py"
    idea.write_text(
        "from dataclasses import dataclass\nfrom fedvlm.parts import Head\nfrom beside import STRENGTH\n\n\n"
        "@dataclass(frozen=True)\nclass Idea(Head):\n    strength: float = STRENGTH\n"
    )
    (tmp_path / "mine" / "beside.py").write_text("STRENGTH = 0.5\n")
    run = train_small(images, tmp_path / "run", adapter=str(idea))
    idea.unlink()
    (tmp_path / "mine" / "beside.py").unlink()
    assert run.setup().adapter.strength == 0.5 and type(run.setup().adapter).__name__ == "Idea"
    assert api.Run(run).predict(sorted((images / "noto" / "bird").iterdir())[0])[0][0] in run.record.data.classes


def test_lost_clients_are_absent_and_the_round_goes_on(images, tmp_path):
    run = train_small(images, tmp_path / "run", dropout=0.3, quorum=0.0, rounds=8, seed=3)
    answered = [r["answered"] for r in run.rounds()[1:]]
    assert min(answered) < 2 and max(answered) == 2


def test_a_round_without_quorum_is_void_and_three_in_a_row_stop_the_run(images, tmp_path):
    run = train_small(images, tmp_path / "run", dropout=0.15, quorum=1.0, rounds=8, seed=4)
    rounds = run.rounds()[1:]
    assert any("void" in r for r in rounds) and any("void" not in r for r in rounds)
    for r in rounds:
        assert ("weights" in r) == ("void" not in r)
    with pytest.raises(FedvlmError, match="3 rounds in a row"):
        train_small(images, tmp_path / "dead", dropout=1.0, rounds=8)
    assert RunFolder(tmp_path / "dead").load()[1] == 2


def test_no_global_random_state_is_used(images, tmp_path):
    import numpy as np
    import torch

    states = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())  # noqa: NPY002
    train_small(images, tmp_path / "run")
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1]) and states[2] == random.getstate()  # noqa: NPY002


def test_nothing_to_run_is_done():
    """Every learning rate chosen already: a benchmark asks for no runs, and gets none."""
    assert len(api.execute([], 4)) == 0


def planned_run(setup: Setup, folder: Path) -> PlannedRun:
    return PlannedRun(setup, Pools().load(setup), folder)


@pytest.mark.parametrize("at_once", [1, 2])
def test_of_several_runs_one_that_fails_is_named_and_the_others_finish(at_once, images, tmp_path):
    good = [planned_run(small_setup(images, seed=s), tmp_path / f"good-{s}") for s in (1, 2)]
    bad = planned_run(small_setup(images, dropout=1.0, rounds=8), tmp_path / "bad")
    told: list[tuple[int, RoundRecord | None, str]] = []
    with pytest.raises(FedvlmError, match=r"1 of 3 runs failed:\n  bad: 3 rounds in a row") as caught:
        run_all([good[0], bad, good[1]], at_once, lambda i, record, error: told.append((i, record, error)))
    assert "good" not in str(caught.value)
    assert all(RunFolder(job.folder).done for job in good) and not RunFolder(bad.folder).done
    assert {(i, error.split(";")[0]) for i, record, error in told if record is None} == {
        (0, ""),
        (1, "3 rounds in a row changed nothing"),
        (2, ""),
    }
    for i in (0, 2):
        assert [record["round"] for k, record, _ in told if k == i and record] == [0, 1, 2, 3]


def test_runs_that_fail_alike_are_told_once(images, tmp_path):
    setups = {s: small_setup(images, dropout=1.0, rounds=8, seed=s) for s in (1, 2)}
    jobs = [planned_run(setup, tmp_path / f"bad-{s}") for s, setup in setups.items()]
    with pytest.raises(FedvlmError, match=r"^2 of 2 runs failed:\n  bad-1, bad-2: 3 rounds in a row") as caught:
        run_all(jobs, 1, lambda i, record, error: None)
    assert str(caught.value).count("\n") == 1
