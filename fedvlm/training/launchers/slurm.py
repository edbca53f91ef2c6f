"""launcher=slurm: the runs as one array job, through submitit. launch=cluster:local runs them on this machine instead."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedvlm.errors import FedvlmError
from fedvlm.training.launchers.base import Task, Value


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


def submit(commands: Sequence[list[str]], logs: Path, at_once: int, options: dict[str, Value]) -> Sequence[Task]:
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
