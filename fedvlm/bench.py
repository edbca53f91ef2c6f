"""Many runs, a few at a time, each in a process with one thread: faster on small steps than one run with many."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from fedvlm.config import Setup
from fedvlm.core import FedvlmError
from fedvlm.data.federation import Pool
from fedvlm.runs import Run
from fedvlm.train import load_pool, train

Report = Callable[[int, dict[str, Any] | None, str], None]  # (run, its record or None when it ended, error or "")

_queue: Any = None


def run_all(jobs: list[tuple[Setup, Path]], pool: Pool, at_once: int, report: Report) -> list[Run]:
    """Every job's finished run; one that fails is reported, the rest go on, and the failure is raised at the end."""
    at_once = at_once or len(os.sched_getaffinity(0))
    failed: list[str] = []
    runs: dict[int, Run] = {}

    def ended(i: int, error: str, folder: Path) -> None:
        report(i, None, error)
        if error:
            failed.append(f"{folder.name}: {error}")
        else:
            runs[i] = Run(folder)

    if at_once == 1 or len(jobs) == 1:
        for i, (setup, folder) in enumerate(jobs):
            ended(i, attempt(lambda s=setup, f=folder, i=i: train(s, pool, f, lambda r: report(i, r, ""))), folder)
    else:
        _in_processes(jobs, at_once, report, ended)
    if failed:
        raise FedvlmError(f"{len(failed)} of {len(jobs)} runs failed:\n  " + "\n  ".join(failed[:10]))
    return [runs[i] for i in range(len(jobs))]


def attempt(work: Callable[[], Any]) -> str:
    try:
        work()
    except FedvlmError as error:
        return str(error)
    except Exception as error:  # a defect in one run does not take the others along
        logging.getLogger("fedvlm").debug("a run failed", exc_info=True)
        return f"{type(error).__name__}: {error} (a defect; `fedvlm run` it alone with --debug)"
    return ""


def _in_processes(jobs: list[tuple[Setup, Path]], at_once: int, report: Report, ended: Callable) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    listener = threading.Thread(target=lambda: [report(*m, "") for m in iter(queue.get, None)], daemon=True)
    listener.start()
    with ProcessPoolExecutor(min(at_once, len(jobs)), context, _begin, (queue,)) as processes:
        # the longest first would be best; the order given keeps a method's targets together for the reader
        waiting = {processes.submit(_one, i, s, f): (i, f) for i, (s, f) in enumerate(jobs)}
        for done in as_completed(waiting):
            ended(waiting[done][0], done.result(), waiting[done][1])
    queue.put(None)
    listener.join()


def _begin(queue: Any) -> None:
    global _queue
    _queue = queue


def _one(i: int, setup: Setup, folder: Path) -> str:
    c = setup.config
    return attempt(
        lambda: train(setup, load_pool(c.data, c.backbone, c.template, c.broken), folder, lambda r: _queue.put((i, r)))
    )
