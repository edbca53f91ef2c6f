"""Many runs, a few at a time, each in a process with one thread: faster on small steps than one run with many threads."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Protocol

from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.folder import RunFolder
from fedvlm.interrupts import held, stoppable
from fedvlm.machine import cores
from fedvlm.planning import Job
from fedvlm.records import RoundRecord
from fedvlm.train import OnRound, train

MOST = 60 if sys.platform == "win32" else sys.maxsize  # processes; Windows waits for 63 pipes at most


class OnProgress(Protocol):
    def __call__(self, i: int, record: RoundRecord | None, error: str) -> None:
        """Run `i` finished a round, or (record None) ended, with an error or without ("")."""


class RunsFailed(FedvlmError):
    """Some of several runs failed; `finished` holds the others."""

    def __init__(self, text: str, finished: list[RunFolder]):
        super().__init__(text)
        self.finished = finished


def run_all(jobs: list[Job], at_once: int, pools: Pools, report: OnProgress) -> list[RunFolder]:
    """Every job's finished run; one that fails is reported, the rest go on, and the failure is raised at the end. Ctrl-C
    ends those under way and starts no other."""
    with stoppable() as check:

        def tell(i: int, record: RoundRecord | None, error: str) -> None:
            check()
            report(i, record, error)

        return _run_all(jobs, at_once, pools, tell)


def _run_all(jobs: list[Job], at_once: int, pools: Pools, report: OnProgress) -> list[RunFolder]:
    if len(jobs) == 1:
        ((setup, folder),) = jobs
        return [train(setup, pools.load(setup), folder, lambda record: report(0, record, ""))]
    failed: dict[int, str] = {}

    def ended(i: int, error: str) -> None:
        report(i, None, error)
        if error:
            failed[i] = error

    at_once = at_once or cores()
    if at_once == 1:
        for i, job in enumerate(jobs):
            ended(i, attempt(job, pools, partial(report, i, error="")))
    else:
        _in_processes(jobs, min(at_once, MOST), report, ended)
    finished = [RunFolder(job.folder) for i, job in enumerate(jobs) if i not in failed]
    if failed:
        raise RunsFailed(f"{len(failed)} of {len(jobs)} runs failed:\n  {reasons(jobs, failed)}", finished)
    return finished


def reasons(jobs: list[Job], failed: dict[int, str]) -> str:
    """What went wrong, each thing once, with the runs that it happened to."""
    by_error: dict[str, list[str]] = {}
    for i, error in failed.items():
        by_error.setdefault(error, []).append(jobs[i].folder.name)
    lines = [f"{', '.join(n[:3])}{f' and {len(n) - 3} more' * (len(n) > 3)}: {error}" for error, n in by_error.items()]
    return "\n  ".join(lines[:10])


def attempt(job: Job, pools: Pools, on_round: OnRound) -> str:
    """Trains; what went wrong, in words, or ""."""
    try:
        train(job.setup, pools.load(job.setup), job.folder, on_round)
    except FedvlmError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # a defect in one run does not end the others
        return f"{type(error).__name__}: {error} (a defect; `fedvlm run` it alone with --debug)"
    return ""


def _in_processes(jobs: list[Job], at_once: int, report: OnProgress, ended: Callable[[int, str], None]) -> None:
    """A process takes one run after the other. Where one dies, its run is tried once more in a new process."""
    waiting, died = deque(range(len(jobs))), Counter[int]()
    idle: list[_Process] = []
    busy: dict[Connection, tuple[_Process, int]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < at_once:
                process, i = idle.pop() if idle else _Process(), waiting.popleft()
                busy[process.pipe] = process, i
                process.give(jobs[i])
            ready = wait(busy)
            for pipe in [p for p in busy if p in ready]:
                process, i = busy[pipe]
                try:
                    record, error = pipe.recv()
                except (EOFError, OSError):  # the child is dead, perhaps in the middle of a record
                    del busy[pipe]
                    how = process.end()
                    died[i] += 1
                    if died[i] == 1:
                        RunFolder(jobs[i].folder).log(f"its process died ({how}); it goes on in a new one")
                        waiting.append(i)  # last: if memory ran out, there may be more of it then
                    else:
                        advice = "what was saved stands, and the same command goes on (jobs=1 needs the least memory)"
                        ended(i, f"its process died twice ({how}); {advice}")
                    continue
                if record is None:
                    del busy[pipe]
                    idle.append(process)
                    ended(i, error)
                else:
                    report(i, record, "")
    finally:
        for process in [*idle, *(process for process, _ in busy.values())]:
            process.end()


class _Process:
    """A child and a pipe to it alone: with a queue that all share, one killed while it sends could block the others."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.child = context.Process(target=_serve, args=(theirs,))
        with _main_hidden(), held():  # Ctrl-C while it imports torch would print a traceback
            self.child.start()
        theirs.close()  # the child alone holds it now, so the pipe ends when the child does

    def give(self, job: Job) -> None:
        with contextlib.suppress(OSError):  # it is dead already: reading from it says so
            self.pipe.send(job)

    def end(self) -> str:
        """Ends it, where it is not dead already; how it ended, in words."""
        self.pipe.close()
        self.child.kill()
        self.child.join()
        code = self.child.exitcode or 0
        return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Children do not run the user's script again: without this, a script that calls `fedvlm.bench` would need a
    `if __name__ == "__main__"` guard."""
    script = vars(sys.modules["__main__"])
    hidden: dict[str, object] = {n: script.pop(n) for n in ("__file__", "__spec__") if n in script}
    script["__spec__"] = None
    try:
        yield
    finally:
        script.update(hidden)


def _serve(pipe: Connection) -> None:
    """The child: trains what comes through the pipe, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends its children
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    pools = Pools()
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send((None, attempt(pipe.recv(), pools, lambda record: pipe.send((record, "")))))


def _exit_with_parent() -> None:
    """A bench that is killed takes its runs along: what they saved stands, and no process holds them."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
