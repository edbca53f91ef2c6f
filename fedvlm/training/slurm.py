"""Runs on other machines that share a folder with this one (launcher=slurm): one array job, through submitit.
launch=cluster:local runs them on this machine instead.

This process writes the folder of every run, with all its settings, and has `fedvlm resume FOLDER` carried out elsewhere: a
list of words is all that is sent. Rounds are read from the folders as they appear. A run that was interrupted goes on when
the command is given again, here or there.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from fedvlm.core.records import RoundRecord
from fedvlm.errors import FedvlmError
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun

HERE = "none"
POLL = 1.0  # seconds between looks at the folders
LAST = 40  # lines of an error that are looked at

Value = str | int | float
OnRound = Callable[[int, RoundRecord], None]


class SubmittedTask(Protocol):
    """A command on its way."""

    def error(self) -> str | None:
        """None while it waits or runs, "" once it ended well, else what it said."""
        ...

    def cancel(self) -> None: ...


def check_launcher(name: str) -> None:
    """An error where the launcher's package is not installed."""
    if name != HERE and importlib.util.find_spec("submitit") is None:
        raise FedvlmError('launcher=slurm needs submitit; install it with `pip install "fedvlm[slurm]"`')


def run_elsewhere(
    jobs: Sequence[PlannedRun], at_once: int, on_round: OnRound, ended: Callable[[int, str], None]
) -> None:
    """Runs all that are not finished. Ctrl-C cancels those that were submitted."""
    config = jobs[0].setup.config
    check_launcher(config.launcher)
    waiting = [i for i, job in enumerate(jobs) if not started(job).done]
    for i in set(range(len(jobs))) - set(waiting):
        ended(i, "")
    commands = [resume_command(jobs[i].folder) for i in waiting]
    logs = jobs[0].folder.parent / "jobs"
    tasks = dict(zip(waiting, submit(commands, logs, at_once, options_of(config.launch)), strict=True))
    seen = {i: len(RunFolder(jobs[i].folder).rounds()) for i in tasks}
    try:
        while tasks:
            time.sleep(POLL)
            for i, task in list(tasks.items()):
                error, run = task.error(), RunFolder(jobs[i].folder)
                for record in run.rounds()[seen[i] :]:
                    seen[i] += 1
                    on_round(i, record)
                if error is not None:
                    del tasks[i]
                    ended(i, reason(error, run))
    finally:
        for task in tasks.values():
            task.cancel()


def started(job: PlannedRun) -> RunFolder:
    """The run's folder, ready to be resumed; without the launcher, which the resumed run would call again."""
    job = PlannedRun(job.setup.with_(launcher="none", launch=()), job.pool, job.folder)
    _ = job.method  # an error before anything is submitted
    return RunFolder.start(job)


def resume_command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "fedvlm", "resume", str(folder.resolve())]


def reason(error: str, run: RunFolder) -> str:
    """Why a run failed: fedvlm's own sentence, where there is one among the last lines; "" where it finished."""
    if not error:
        return "" if run.done else "its job ended before the run did; the same command goes on"
    lines = [line.strip() for line in error.strip().splitlines()[-LAST:] if line.strip()]
    own = [line.partition("fedvlm: ")[2] for line in lines if "fedvlm: " in line]
    return (own or lines or ["its job failed without a word"])[-1]


def options_of(words: Sequence[str]) -> dict[str, Value]:
    """What a job asks for, from words such as gpus_per_node:1."""
    found: dict[str, Value] = {}
    for word in words:
        name, colon, text = word.partition(":")
        if not colon or not name or not text:
            raise FedvlmError(f"launch={word}: expected NAME:VALUE, such as cpus_per_task:4 (see docs/launchers.md)")
        found[name] = parsed_number(text)
    return found


def parsed_number(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class SlurmTask:
    def __init__(self, job: Any):
        self.job = job  # submitit's

    def error(self) -> str | None:
        if not self.job.done():
            return None
        found = self.job.exception()
        return "" if found is None else str(found)

    def cancel(self) -> None:
        self.job.cancel()


def submit(
    commands: Sequence[list[str]], logs: Path, at_once: int, options: dict[str, Value]
) -> Sequence[SubmittedTask]:
    """Submit each command as a task, `at_once` at a time (0: as many as there is room for)."""
    import submitit

    cluster = str(options.pop("cluster", "slurm"))
    if cluster == "slurm" and shutil.which("sbatch") is None:
        raise FedvlmError("launcher=slurm: there is no sbatch here; start it on a machine that can submit jobs")
    executor = submitit.AutoExecutor(folder=logs.resolve(), cluster=cluster)
    if at_once and cluster == "slurm":
        options = {"slurm_array_parallelism": at_once} | options
    try:
        executor.update_parameters(**({"timeout_min": 24 * 60} | options))
    except (NameError, TypeError) as error:
        raise FedvlmError(f"launch=: submitit does not take this ({error})") from error
    if not commands:
        return []
    with executor.batch():  # one array job
        jobs = [executor.submit(submitit.helpers.CommandFunction(words, verbose=False)) for words in commands]
    return [SlurmTask(job) for job in jobs]
