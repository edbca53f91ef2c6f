"""The GPUs that torch sees here, how much fits on one, and which run goes where."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from fedvlm.system.machine import cores

UNIT = 16 << 30  # bytes of GPU memory that an adapter's limits are meant for
VISIBLE = "CUDA_VISIBLE_DEVICES"
CONTEXT = 600 << 20  # bytes that a process takes on a GPU before it computes anything
ROOM = 0.9  # share of a GPU's memory that runs may fill together
MOST = 5  # runs on a GPU; more gain nothing
ON_CPU = -1


@lru_cache
def memory(device: torch.device) -> int:
    """Bytes, of a GPU; other devices share the computer's own and count as one UNIT."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else UNIT


def blocks_at_once(device: torch.device) -> int:
    """How many times an adapter's limits fit: a GPU computes more side by side than a CPU gains from."""
    return max(1, memory(device) // UNIT)


def visible() -> tuple[str, ...]:
    """The GPUs, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    given = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return tuple(given[:count] if len(given) >= count else map(str, range(count)))


def share_in_use() -> float:
    """The largest share of its GPU's memory that this process has needed so far; 0 where it used none."""
    if not torch.cuda.is_initialized():
        return 0.0
    return (torch.cuda.max_memory_reserved() + CONTEXT) / memory(torch.device("cuda"))


class Places:
    """The GPUs that runs are placed on. At first one runs on each; when it has told what it needs, as many as fit."""

    def __init__(self, gpus: int, at_once: int = 0):
        """at_once=0: a run per core and, on a GPU, as many as its memory holds; else that many, spread over the GPUs."""
        self.running = {ON_CPU: 0} | dict.fromkeys(range(gpus), 0)
        self.at_once, self.most = at_once, at_once or max(cores(), gpus)
        self.needed = 0.0  # the largest share of a GPU's memory that a run has needed; 0: not known yet

    def take(self, on_gpu: bool) -> int | None:
        """The number of a GPU, or ON_CPU; None: nothing is free now."""
        if sum(self.running.values()) >= self.most:
            return None
        gpus = [k for k in self.running if k != ON_CPU]
        place = min(gpus, key=self.running.__getitem__) if on_gpu and gpus else ON_CPU
        if place != ON_CPU and not self.at_once and self.running[place] >= self.fits:
            return None
        self.running[place] += 1
        return place

    def leave(self, place: int) -> None:
        self.running[place] -= 1

    @property
    def fits(self) -> int:
        """Runs on a GPU."""
        return max(1, min(MOST, int(ROOM / self.needed))) if self.needed else 1

    def learn(self, share: float) -> None:
        """A run needed this share of its GPU's memory."""
        self.needed = max(share, self.needed)
