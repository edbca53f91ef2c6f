"""Many runs, a few at a time, each in a process with one thread: faster on small steps than one run with many threads.

Runs that use a GPU are spread over those that are visible here (fedvlm/system/devices.py): a process sees one of them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Protocol

import torch

from fedvlm.core.records import RoundRecord
from fedvlm.data.pool import Pools
from fedvlm.engines.base import device_of
from fedvlm.errors import FedvlmError
from fedvlm.system.child_process import Child, obey
from fedvlm.system.devices import ON_CPU, VISIBLE, Places, share_in_use, visible
from fedvlm.system.interrupts import stoppable
from fedvlm.system.machine import cores
from fedvlm.training.folder import RunFolder
from fedvlm.training.planning import PlannedRun
from fedvlm.training.slurm import HERE, run_elsewhere
from fedvlm.training.train import OnRound, train

MOST = 60 if sys.platform == "win32" else sys.maxsize  # processes; Windows waits for 63 pipes at most


class OnProgress(Protocol):
    def __call__(self, i: int, record: RoundRecord | None, error: str) -> None:
        """Run `i` finished a round, or (record None) ended, with an error or without ("")."""


class RunsFailed(FedvlmError):
    """Some of several runs failed; `finished` holds the others."""

    def __init__(self, text: str, finished: list[RunFolder]):
        super().__init__(text)
        self.finished = finished


def run_all(jobs: list[PlannedRun], at_once: int, pools: Pools, report: OnProgress) -> list[RunFolder]:
    """Every job's finished run; one that fails is reported, the rest go on, and the failure is raised at the end. Ctrl-C
    ends those under way and starts no other."""
    with stoppable() as check:

        def tell(i: int, record: RoundRecord | None, error: str) -> None:
            check()
            report(i, record, error)

        return _run_all(jobs, at_once, pools, tell)


def _run_all(jobs: list[PlannedRun], at_once: int, pools: Pools, report: OnProgress) -> list[RunFolder]:
    elsewhere = bool(jobs) and jobs[0].setup.config.launcher != HERE
    if len(jobs) == 1 and not elsewhere:
        ((setup, folder),) = jobs
        return [train(setup, pools.load(setup), folder, lambda record: report(0, record, ""))]
    failed: dict[int, str] = {}

    def ended(i: int, error: str) -> None:
        report(i, None, error)
        if error:
            failed[i] = error

    if elsewhere:
        run_elsewhere(jobs, at_once, pools, partial(report, error=""), ended)
    elif (at_once or max(cores(), len(visible()))) == 1:
        for i, job in enumerate(jobs):
            ended(i, attempt(job, pools, partial(report, i, error="")))
    else:
        _in_processes(jobs, at_once, report, ended)
    finished = [RunFolder(job.folder) for i, job in enumerate(jobs) if i not in failed]
    if failed:
        raise RunsFailed(f"{len(failed)} of {len(jobs)} runs failed:\n  {reasons(jobs, failed)}", finished)
    return finished


def reasons(jobs: list[PlannedRun], failed: dict[int, str]) -> str:
    """What went wrong, each thing once, with the runs that it happened to."""
    by_error: dict[str, list[str]] = {}
    for i, error in failed.items():
        by_error.setdefault(error, []).append(jobs[i].folder.name)
    lines = [f"{', '.join(n[:3])}{f' and {len(n) - 3} more' * (len(n) > 3)}: {error}" for error, n in by_error.items()]
    return "\n  ".join(lines[:10])


def attempt(job: PlannedRun, pools: Pools, on_round: OnRound) -> str:
    """Trains; what went wrong, in words, or ""."""
    try:
        train(job.setup, pools.load(job.setup), job.folder, on_round)
    except FedvlmError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # a defect in one run does not end the others
        return f"{type(error).__name__}: {error} (a defect; `fedvlm run` it alone with --debug)"
    return ""


def _in_processes(jobs: list[PlannedRun], at_once: int, report: OnProgress, ended: Callable[[int, str], None]) -> None:
    """A process takes one run after the other. Where one dies, its run is tried once more in a new process."""
    waiting, died = list(range(len(jobs))), Counter[int]()
    idle: list[_Process] = []
    busy: dict[Connection, tuple[_Process, int]] = {}
    gpus = visible()
    places = Places(len(gpus), at_once)
    try:
        while waiting or busy:
            for i in list(waiting):
                if len(busy) >= MOST or (place := places.take(bool(gpus) and on_gpu(jobs[i]))) is None:
                    continue
                waiting.remove(i)
                process = process_at(place, gpus, idle)
                busy[process.pipe] = process, i
                process.give(jobs[i])
            ready = wait(busy)
            for pipe in [p for p in busy if p in ready]:
                process, i = busy[pipe]
                try:
                    record, error, share = pipe.recv()
                except (EOFError, OSError):  # the child is dead, perhaps in the middle of a record
                    del busy[pipe]
                    places.leave(process.place)
                    how = process.end()
                    died[i] += 1
                    if died[i] == 1:
                        RunFolder(jobs[i].folder).log(f"its process died ({how}); it goes on in a new one")
                        waiting.append(i)  # last: if memory ran out, there may be more of it then
                    else:
                        advice = "finished rounds are kept; the same command continues (jobs=1 needs the least memory)"
                        ended(i, f"its process died twice ({how}); {advice}")
                    continue
                places.learn(share)
                if record is None:
                    del busy[pipe]
                    places.leave(process.place)
                    idle.append(process)
                    ended(i, error)
                else:
                    report(i, record, "")
    finally:
        for process in [*idle, *(process for process, _ in busy.values())]:
            process.end()


def on_gpu(job: PlannedRun) -> bool:
    return device_of(job.setup) == "cuda"


def process_at(place: int, gpus: Sequence[str], idle: list[_Process]) -> _Process:
    """An idle process there, or a new one, in whose place an idle one elsewhere ends."""
    for process in idle:
        if process.place == place:
            idle.remove(process)
            return process
    if idle:
        idle.pop().end()
    return _Process(place, "" if place == ON_CPU else gpus[place])


class _Process(Child):
    def __init__(self, place: int = ON_CPU, gpu: str = "") -> None:
        """`gpu`: the only one that it sees; "": all."""
        self.place = place
        super().__init__(_serve, gpu)


def _serve(pipe: Connection, gpu: str) -> None:
    """The child: trains what comes through the pipe, until it ends."""
    if gpu:
        os.environ[VISIBLE] = gpu  # in time: CUDA reads it when it is first used
    obey()
    pools = Pools()
    with contextlib.suppress(EOFError, OSError):
        while True:
            error = attempt(pipe.recv(), pools, lambda record: pipe.send((record, "", share_in_use())))
            torch.cuda.empty_cache()  # for the others on this GPU
            pipe.send((None, error, share_in_use()))
