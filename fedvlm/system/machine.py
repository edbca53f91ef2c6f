"""Properties of the machine, read in the same way on every operating system."""

from __future__ import annotations

import os
from pathlib import Path

from fedvlm.errors import FedvlmError


def cores() -> int:
    """The number of CPU cores that this process may use, at least 1."""
    count = getattr(os, "process_cpu_count", None)  # Python 3.13 and later; respects CPU affinity
    if count is not None:
        return int(count() or 1)
    affinity = getattr(os, "sched_getaffinity", None)  # not on Windows and macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def cache_home() -> Path:
    """The folder of features and other things that can be made again (FEDVLM_CACHE)."""
    if given := os.environ.get("FEDVLM_CACHE"):
        return Path(given)
    try:
        return Path.home() / ".cache" / "fedvlm"
    except RuntimeError:
        raise FedvlmError("this user has no home folder for the cache; set FEDVLM_CACHE to a folder") from None


def runs_home() -> Path:
    """The folder of runs without `out=` (FEDVLM_RUNS)."""
    return Path(os.environ.get("FEDVLM_RUNS") or "runs")


def data_home() -> Path:
    """The folder of what a site or a server of a federation keeps and cannot make again (FEDVLM_DATA_HOME)."""
    if given := os.environ.get("FEDVLM_DATA_HOME"):
        return Path(given)
    try:
        return Path.home() / ".local" / "share" / "fedvlm"
    except RuntimeError:
        raise FedvlmError("this user has no home folder; set FEDVLM_DATA_HOME to a folder") from None
