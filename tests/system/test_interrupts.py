"""Ctrl-C in a bench: a real process group, and the signal that a terminal sends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from fedvlm.errors import FedvlmError
from fedvlm.system.interrupts import held, key_words, stoppable


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal to a process group")
@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_ends_a_bench_and_cancels_what_is_queued(jobs, images, tmp_path):
    """Also where the shell had told it to ignore the signal, as those that run scripts do with background jobs."""
    out = tmp_path / "my runs"
    words = ["bench", "fedclip", "fedavg", f"data={images}", "unseen=noto", "seeds=1,2", "rounds=100000", f"out={out}"]
    words.append(f"jobs={jobs}")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the process
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedvlm", *words],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 90
        while len(under_way(out)) < jobs and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=20)
        took = time.monotonic() - began
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130 and took < 5, said  # two seconds where no other test runs
    assert "Traceback" not in said and f"'out={out}' jobs={jobs}" in said.splitlines()[-1]
    kept = "fedvlm: stopped; everything written so far is kept; continue with: fedvlm bench fedclip"
    assert said.splitlines()[-1].startswith(kept)
    assert len(under_way(out)) == jobs  # the others never started


def under_way(out):
    """Runs that have trained; zero-shot is one evaluation."""
    return [p for p in out.glob("fed*/rounds.jsonl") if p.read_text().count("\n") > 1]


def test_an_interrupt_that_was_swallowed_counts():
    """In a destructor it would get lost, and an import may turn it into another error. The handler of before comes back,
    also where the signal was ignored: so it is for whoever starts the tests with nohup or in the background."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stoppable() as check:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        check()
        raise AssertionError("unreachable")
    with pytest.raises(KeyboardInterrupt), stoppable():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise TypeError("expected a message argument") from None
    with pytest.raises(FedvlmError), stoppable():
        raise FedvlmError("another error stays what it is")
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_a_process_that_is_started_does_not_see_it():
    """From its first moment on: it may be importing for seconds before it could say so itself."""
    with held():
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(0.3); print(1)"], stdout=subprocess.PIPE
        )
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[0] == b"1\n" and process.returncode == 0
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_keys_are_written_as_a_command_line_takes_them() -> None:
    """Lists come from records, tuples from Python: neither may be printed as Python writes them."""
    given = {"rounds": 5, "unseen": ["a", "b"], "classes": ("cat", "dog")}
    assert key_words(given) == ["rounds=5", "unseen=a,b", "classes=cat,dog"]
