"""Many runs, a few at a time, each in a process with one thread: faster on small steps than one run with many."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fedvlm.config import Setup
from fedvlm.core import FedvlmError
from fedvlm.runs import Run
from fedvlm.train import Watch, load_pool, train


class Report(Protocol):
    def __call__(self, i: int, record: dict[str, Any] | None, error: str) -> None:
        """Run `i` did a round, or (record None) ended, with an error or without."""


_queue: Any = None


def run_all(jobs: list[tuple[Setup, Path]], at_once: int, report: Report) -> list[Run]:
    """Every job's finished run; one that fails is reported, the rest go on, and the failure is raised at the end."""
    if len(jobs) == 1:
        (setup, folder), *_ = jobs
        return [train(setup, load_pool(setup), folder, lambda record: report(0, record, ""))]
    failed: list[str] = []

    def ended(i: int, error: str) -> None:
        report(i, None, error)
        if error:
            failed.append(f"{jobs[i][1].name}: {error}")

    at_once = at_once or len(os.sched_getaffinity(0))
    if at_once == 1:
        for i, (setup, folder) in enumerate(jobs):
            ended(i, attempt(setup, folder, partial(report, i, error="")))
    else:
        _in_processes(jobs, at_once, report, ended)
    if failed:
        raise FedvlmError(f"{len(failed)} of {len(jobs)} runs failed:\n  " + "\n  ".join(failed[:10]))
    return [Run(folder) for _, folder in jobs]


def attempt(setup: Setup, folder: Path, watch: Watch) -> str:
    """Trains; what went wrong, in words, or nothing."""
    try:
        train(setup, load_pool(setup), folder, watch)
    except FedvlmError as error:
        return str(error)
    except Exception as error:  # a defect in one run does not take the others along
        return f"{type(error).__name__}: {error} (a defect; `fedvlm run` it alone with --debug)"
    return ""


def _in_processes(
    jobs: list[tuple[Setup, Path]], at_once: int, report: Report, ended: Callable[[int, str], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()

    def listen() -> None:
        for i, record in iter(queue.get, None):
            report(i, record, "")

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    with ProcessPoolExecutor(min(at_once, len(jobs)), context, _begin, (queue,)) as processes:
        waiting = {processes.submit(_one, i, setup, folder): i for i, (setup, folder) in enumerate(jobs)}
        for done in as_completed(waiting):
            ended(waiting[done], done.result())
    queue.put(None)
    listener.join()


def _begin(queue: Any) -> None:
    global _queue
    _queue = queue
    threading.Thread(target=_with, args=(os.getppid(),), daemon=True).start()


def _with(parent: int) -> None:
    """A bench that is killed takes its runs along: what they had saved stands, and nobody holds them."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _one(i: int, setup: Setup, folder: Path) -> str:
    return attempt(setup, folder, lambda r: _queue.put((i, r)))
