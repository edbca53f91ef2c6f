"""Run folders: killed at any moment and resumed to the same bits, recognised, locked, never half written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_engines import run, told

from fedvlm.commands import run_all
from fedvlm.core import FedvlmError
from fedvlm.folder import Run


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "fedvlm.cli", *words]


def test_killed_at_any_moment_it_ends_with_the_same_bits(images, tmp_path):
    """kill -9 again and again, at random moments, until it is done."""
    words = [f"data={images}", "unseen=noto", "rounds=40", "lr=0.05", "seed=7"]
    subprocess.run(command("run", "fedot", *words, f"out={tmp_path / 'whole'}"), check=True, capture_output=True)
    kills, draw = 0, random.Random(4)
    process = subprocess.Popen(command("run", "fedot", *words, f"out={tmp_path / 'cut'}"), stdout=subprocess.DEVNULL)
    for _ in range(12):
        try:
            process.wait(timeout=draw.uniform(2.5, 3.5) if kills else 2.6)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            again = (
                ("resume", str(tmp_path / "cut"))
                if (tmp_path / "cut" / "run.json").exists()
                else ("run", "fedot", *words, f"out={tmp_path / 'cut'}")
            )
            process = subprocess.Popen(command(*again), stdout=subprocess.DEVNULL)
    else:
        assert process.wait(timeout=120) == 0
    whole, cut = Run(tmp_path / "whole"), Run(tmp_path / "cut")
    assert whole.done and cut.done
    assert told(whole) == told(cut)
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
            with lock.open("w") as handle:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found.append(False)
                except OSError:
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
    whole = run(images, tmp_path / "whole", engine=engine)
    for place in ("append", "save", "finish"):
        for at in range(1, 5):
            folder = tmp_path / f"{place}{at}"
            calls = {"n": 0}

            inner = getattr(Run, place)

            class Stop(Exception):
                pass

            def stopping(self, *args, calls=calls, at=at, inner=inner):
                calls["n"] += 1
                if calls["n"] == at:
                    raise Stop
                return inner(self, *args)

            with monkeypatch.context() as patch:
                patch.setattr(Run, place, stopping)
                with contextlib.suppress(Stop):
                    run(images, folder, engine=engine)
            again = run(images, folder, engine=engine)
            assert told(again) == told(whole)
            assert (again.folder / "state.safetensors").read_bytes() == (
                whole.folder / "state.safetensors"
            ).read_bytes()


def test_the_same_run_is_recognised(images, tmp_path):
    first = run(images, tmp_path / "run")
    stamp = (first.folder / "state.safetensors").stat().st_mtime_ns
    run(images, tmp_path / "run")
    assert (first.folder / "state.safetensors").stat().st_mtime_ns == stamp


def test_an_idea_that_was_edited_is_another_run(images, tmp_path):
    idea = tmp_path / "idea.py"
    code = (
        "from dataclasses import dataclass\nfrom fedvlm.adapters.head import Head\n\n\n"
        "@dataclass(frozen=True)\nclass Idea(Head):\n    pass\n"
    )
    idea.write_text(code)
    run(images, tmp_path / "run", adapter=str(idea))
    idea.write_text(code + "# better\n")
    with pytest.raises(FedvlmError, match="holds another run"):
        run(images, tmp_path / "run", adapter=str(idea))


def test_gaps_are_told_by_name(images, tmp_path):
    last = run(images, tmp_path / "run", merge="ga").rounds()[-1]
    assert set(last["gaps"]) == set(last["weights"]) == {"noto", "twemoji"} and last["gap_variance"] >= 0


def test_another_run_in_the_folder_is_not_overwritten(images, tmp_path):
    run(images, tmp_path / "run")
    with pytest.raises(FedvlmError, match="differs in local"):
        run(images, tmp_path / "run", lr=0.01)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(FedvlmError, match="not empty"):
        run(images, tmp_path / "mine")


def test_two_processes_do_not_share_a_run(images, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with Run(folder).locked(), pytest.raises(FedvlmError, match="another process"):
        run(images, folder)


def test_a_full_disk_loses_nothing(images, tmp_path, monkeypatch):
    whole = run(images, tmp_path / "whole")
    inner, calls = Path.write_bytes, {"n": 0}

    def full(self, data):
        if self.name == "state.safetensors.part":
            calls["n"] += 1
            if calls["n"] == 3:
                inner(self, data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
        return inner(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(FedvlmError, match="No space left"):
            run(images, tmp_path / "run")
    assert told(run(images, tmp_path / "run")) == told(whole)


def test_a_damaged_folder_is_named(tmp_path, images):
    folder = run(images, tmp_path / "run").folder
    (folder / "state.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(FedvlmError, match="damaged"):
        Run(folder).load()
    (folder / "run.json").write_text("{")
    with pytest.raises(FedvlmError, match="damaged"):
        _ = Run(folder).info


def test_what_a_run_records(images, tmp_path):
    run_ = run(images, tmp_path / "run", participation=0.5, dropout=0.0)
    info = run_.info
    assert (
        info["config"]["seed"] == 50
        and info["data"]["images"] == 150
        and info["backbone"]["name"].startswith("mini-clip@")
    )
    assert {"fedvlm", "torch", "python", "commit"} <= set(info["versions"])
    last = run_.rounds()[-1]
    assert last["asked"] == 1 and set(last["weights"].values()) == {1.0}
    head, word = 5 * 256 * 4, 4
    assert last["bytes_down"] == head and last["bytes_up"] == head + 2 * word
    assert {"round", "bytes_down", "bytes_up", "seconds", "shared", "personal", "newcomer", "G", "P"} <= set(last)
    assert info["result"]["selected"]["round"] in range(4)
    json.dumps(info)


def test_lost_clients_are_absent_and_the_round_goes_on(images, tmp_path):
    run_ = run(images, tmp_path / "run", dropout=0.3, quorum=0.0, rounds=8, seed=3)
    answered = [r["answered"] for r in run_.rounds()[1:]]
    assert min(answered) < 2 and max(answered) == 2


def test_a_round_without_quorum_is_void_and_three_in_a_row_stop_the_run(images, tmp_path):
    run_ = run(images, tmp_path / "run", dropout=0.15, quorum=1.0, rounds=8, seed=4)
    rounds = run_.rounds()[1:]
    assert any("void" in r for r in rounds) and any("void" not in r for r in rounds)
    for r in rounds:
        assert ("weights" in r) == ("void" not in r)
    with pytest.raises(FedvlmError, match="3 rounds in a row"):
        run(images, tmp_path / "dead", dropout=1.0, rounds=8)
    assert Run(tmp_path / "dead").load()[1] == 2


def test_no_global_random_state_is_used(images, tmp_path):
    import numpy as np
    import torch

    states = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())  # noqa: NPY002
    run(images, tmp_path / "run")
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1]) and states[2] == random.getstate()  # noqa: NPY002


def test_nothing_to_run_is_done():
    """Every learning rate chosen already: a benchmark asks for no runs, and gets none."""
    assert run_all([], 4) == []
