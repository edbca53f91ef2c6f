"""Many runs, a few at a time, each in a process with one thread: faster on small steps than one run with many threads."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.queues
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import TYPE_CHECKING, Protocol

from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.folder import RunFolder
from fedvlm.machine import cores
from fedvlm.planning import Job
from fedvlm.records import RoundRecord
from fedvlm.train import OnRound, train

if TYPE_CHECKING:
    Rounds = multiprocessing.queues.Queue[tuple[int, RoundRecord] | None]


class OnProgress(Protocol):
    def __call__(self, i: int, record: RoundRecord | None, error: str) -> None:
        """Run `i` finished a round, or (record None) ended, with an error or without ("")."""


def run_all(jobs: list[Job], at_once: int, pools: Pools, report: OnProgress) -> list[RunFolder]:
    """Every job's finished run; one that fails is reported, the rest go on, and the failure is raised at the end."""
    if len(jobs) == 1:
        ((setup, folder),) = jobs
        return [train(setup, pools.load(setup), folder, lambda record: report(0, record, ""))]
    failed: list[str] = []

    def ended(i: int, error: str) -> None:
        report(i, None, error)
        if error:
            failed.append(f"{jobs[i].folder.name}: {error}")

    at_once = at_once or cores()
    if at_once == 1:
        for i, job in enumerate(jobs):
            ended(i, attempt(job, pools, partial(report, i, error="")))
    else:
        _in_processes(jobs, at_once, report, ended)
    if failed:
        raise FedvlmError(f"{len(failed)} of {len(jobs)} runs failed:\n  " + "\n  ".join(failed[:10]))
    return [RunFolder(job.folder) for job in jobs]


def attempt(job: Job, pools: Pools, on_round: OnRound) -> str:
    """Trains; what went wrong, in words, or ""."""
    try:
        train(job.setup, pools.load(job.setup), job.folder, on_round)
    except FedvlmError as error:
        return str(error)
    except Exception as error:  # a defect in one run does not end the others
        return f"{type(error).__name__}: {error} (a defect; `fedvlm run` it alone with --debug)"
    return ""


def _in_processes(jobs: list[Job], at_once: int, report: OnProgress, ended: Callable[[int, str], None]) -> None:
    context = multiprocessing.get_context("spawn")
    rounds: Rounds = context.Queue()

    def listen() -> None:
        for i, record in iter(rounds.get, None):
            report(i, record, "")

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    with ProcessPoolExecutor(min(at_once, len(jobs)), context, _begin, (rounds,)) as processes:
        with _main_hidden():
            waiting = {processes.submit(_one, i, job): i for i, job in enumerate(jobs)}
        for done in as_completed(waiting):
            try:
                ended(waiting[done], done.result())
            except BrokenProcessPool:
                ended(waiting[done], "its process died; what was saved stands, and the same command goes on")
    rounds.put(None)
    listener.join()


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


class _Child:
    """What a process of the pool has: set once, when it starts."""

    rounds: Rounds
    pools: Pools


def _begin(rounds: Rounds) -> None:
    _Child.rounds, _Child.pools = rounds, Pools()
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """A bench that is killed takes its runs along: what they saved stands, and no process holds them."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _one(i: int, job: Job) -> str:
    return attempt(job, _Child.pools, lambda record: _Child.rounds.put((i, record)))
