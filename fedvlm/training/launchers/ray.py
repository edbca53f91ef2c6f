"""launcher=ray: each run is a task of an existing Ray cluster (RAY_ADDRESS, or the one that this machine belongs to)."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedvlm.errors import FedvlmError
from fedvlm.training.launchers.base import Task, Value


class RayTask:
    def __init__(self, reference: Any):
        self.reference = reference

    def error(self) -> str | None:
        import ray

        ready, _ = ray.wait([self.reference], timeout=0)
        if not ready:
            return None
        try:
            return str(ray.get(self.reference))
        except ray.exceptions.RayError as error:  # its machine or its process is lost
            return str(error)

    def cancel(self) -> None:
        import ray

        ray.cancel(self.reference)  # a KeyboardInterrupt in `carry_out`, which ends its process


def submit(commands: Sequence[list[str]], logs: Path, at_once: int, options: dict[str, Value]) -> Sequence[Task]:
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise FedvlmError(
                "launcher=ray: no Ray cluster is found from here; `ray start --head` one, or set RAY_ADDRESS"
            ) from error
    try:
        task = ray.remote(**({"num_cpus": 1, "max_retries": 1} | options))(carry_out)
    except ValueError as error:
        raise FedvlmError(f"launch=: Ray does not take this ({error})") from error
    return [RayTask(task.remote(words, str(Path.cwd()))) for words in commands]


def carry_out(words: list[str], folder: str) -> str:
    """On the other machine: what the command said when it failed, or ""."""
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = process.communicate()[1]
        except BaseException:
            process.kill()
            raise
    return "" if process.returncode == 0 else said.strip() or f"exit code {process.returncode}"
