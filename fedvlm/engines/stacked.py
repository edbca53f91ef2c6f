"""Clients in this process, a chunk of them side by side; serial is a chunk of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedvlm.adapters.base import Adapter
from fedvlm.core import Data, FedvlmError, Params, nbytes
from fedvlm.engines.rows import Rows
from fedvlm.method import Method

Warn = Callable[[str], None]
CPU = torch.device("cpu")


class Stacked:
    def __init__(
        self,
        method: Method,
        data: Data,
        chunk: int = 0,
        rows: Path | None = None,
        warn: Warn = print,
        device: str = "cpu",
    ):
        """`data` holds every client, at position = id. chunk=0: as many side by side as the measured rule says.
        Client steps run on the device, where the examples lie; messages and rows stay in main memory."""
        self.chunk = chunk or stack(method, device)
        self.rows = Rows(method.newcomer, len(data), rows)
        self.warn, self.device = warn, torch.device(device)
        if device != "cpu":
            more = {k: v.to(device) for k in ("outside", "corrupted") if (v := getattr(data, k)) is not None}
            halves = {k: (x.to(device), y.to(device)) for k, (x, y) in data.halves.items()}
            data = replace(data, x=data.x.to(device), y=data.y.to(device), halves=halves, **more)
            new, start = (moved(p, self.device) for p in (method.newcomer, method.initial))
            method = replace(method, task=method.task.to(self.device), newcomer=new, initial=start)
        self.method, self.data = method, data

    def run(
        self, step: str, ids: np.ndarray, down: Params, round: int, exchange: int
    ) -> Iterator[tuple[np.ndarray, Params]]:
        ids = np.sort(ids)
        if self.chunk > 1:  # neighbours in size finish together; see Data.batches
            ids = ids[np.argsort(-self.data.counts("train")[ids], kind="stable")]
        down = self.method.ahead(step, moved(down, self.device))
        first = 0
        while first < len(ids):
            part = ids[first : first + self.chunk]
            own = moved(self.rows.read(part, round if exchange or step != "train" else round - 1), self.device)
            try:
                own, up = (moved(p, CPU) for p in self.method.play(step, own, down, self.at(part, round)))
            except torch.OutOfMemoryError as lack:
                self.narrow(lack)
                continue
            first += len(part)
            good = finite(own | up, len(part))
            if not good.all():
                names = ", ".join(str(i) for i in part[~good])
                self.warn(f"round {round}: client {names} diverged (its {step} reply is not finite) and is left out")
                keep = torch.from_numpy(np.flatnonzero(good))
                part, own, up = part[good], {k: v[keep] for k, v in own.items()}, {k: v[keep] for k, v in up.items()}
            if step == "train":
                self.rows.write(part, own, round)
            if any(-1 in shape for shape in self.method.sends.values()) and step == "train":
                yield from one_by_one(part, up, self.method.sends)
            elif len(part):
                yield part, up

    def narrow(self, lack: Exception) -> None:
        """Fewer clients side by side: what one of them gets does not depend on the others."""
        if self.chunk == 1:
            raise FedvlmError(
                "the GPU's memory does not hold a single client's step; give a smaller batch=, precision=half or device=cpu"
            ) from lack
        self.chunk //= 2
        self.warn(f"the GPU's memory is full: from here on {self.chunk} clients side by side (chunk={self.chunk})")

    def at(self, ids: np.ndarray, round: int) -> Data:
        """These clients' data at this moment of the run."""
        d = self.data
        return replace(d, bounds=d.bounds[ids], ids=d.ids[ids], round=round)

    def close(self) -> None:
        self.rows.flush()


def one_by_one(ids: np.ndarray, up: Params, sends: dict[str, tuple[int, ...]]) -> Iterator[tuple[np.ndarray, Params]]:
    """Replies that have a length of their own, without the padding that lay between clients: labels below 0."""
    loose = [k for k, shape in sends.items() if -1 in shape]
    for at, i in enumerate(ids):
        real = up["labels"][at] >= 0
        yield np.array([i]), {k: v[at, real][None] if k in loose else v[at : at + 1] for k, v in up.items()}


def moved(params: Params, device: torch.device) -> Params:
    return {k: v.to(device) for k, v in params.items()}


def finite(rows: Params, clients: int) -> np.ndarray:
    """Which clients' tensors hold only numbers: a sum is not finite if any of its terms is not."""
    good = torch.ones(clients, dtype=torch.bool)
    for v in rows.values():
        good &= v.reshape(clients, -1).sum(1).isfinite()
    return good.numpy()


def stack(method: Method, device: str = "cpu") -> int:
    """How many clients to train side by side: as many as keep their parameters within 4 MiB, near a core's cache; from
    there on a larger chunk gains nothing (benchmarks/speed.py measures it). A GPU gains for as long as they fit."""
    size = nbytes(method.initial) + nbytes(method.newcomer)
    return int(max(1, min(widest(method.adapter, device), (4 << (20 if device == "cpu" else 28)) // max(1, size))))


def widest(adapter: Adapter, device: str) -> int:
    """What an adapter's `most` is on this device: that of a CPU, and so many times it as a GPU has 16 GiB."""
    if device == "cpu":
        return adapter.most
    memory = int(torch.cuda.get_device_properties(device).total_memory)
    return adapter.most * max(1, memory // (16 << 30))
