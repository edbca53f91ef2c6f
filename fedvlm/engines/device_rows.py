"""Clients' private rows for steps on a GPU: the newest stay in its memory as far as they fit, and threads write them to disk
while other clients train. A personal copy of CLIP's image tower is 340 MB, and packing, checksum and writing take longer
than training it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.state import Params, copy_per_client, nbytes, on_device
from fedvlm.engines.rows import Rows

WRITERS = 4  # threads; each holds one chunk's rows in main memory


class Held(NamedTuple):
    round: int  # in which it was trained
    row: Params


class DeviceRows:
    def __init__(self, rows: Rows, newcomer: Params, device: torch.device, room: int):
        """`newcomer` is on the device; at most `room` bytes of rows stay there."""
        self.rows, self.newcomer, self.device = rows, newcomer, device
        self.most = room // max(1, nbytes(newcomer))  # clients
        self.held: dict[int, Held] = {}
        self.writers = ThreadPoolExecutor(WRITERS)
        self.writes: list[tuple[np.ndarray, Future[None]]] = []

    def read(self, ids: np.ndarray, upto: int) -> Params:
        """Read rows like `Rows.read`, on the device."""
        if not self.newcomer:
            return {}
        self.rows.refresh(ids)
        newest = self.rows.stamps[:, ids].max(0)  # by another process, perhaps
        found = [self.held.get(int(i)) for i in ids]
        held = [h.row for h, n in zip(found, newest, strict=True) if h is not None and n <= h.round <= upto]
        if len(held) == len(ids):
            return {k: torch.stack([row[k] for row in held]) for k in self.newcomer}
        self.finish_writing()
        if not self.rows.stamps[:, ids].any():
            return copy_per_client(self.newcomer, len(ids))
        return on_device(self.rows.read(ids, upto), self.device)

    def write(self, ids: np.ndarray, rows: Params, round: int) -> None:
        """Write rows like `Rows.write`, by a thread; they are on disk when `finish_writing` returns."""
        if not self.newcomer or not len(ids):
            return
        for at, i in enumerate(ids.tolist()):
            self.held.pop(i, None)
            if len(self.held) < self.most:
                self.held[i] = Held(round, {k: copy_of_row(v, at).to(self.device) for k, v in rows.items()})
        if any(np.isin(ids, other).any() for other, _ in self.writes):  # a client's rows are written in order
            self.finish_writing()
        while len(self.writes) >= WRITERS:  # the rest waits, so that main memory holds a few rows only
            self.writes.pop(0)[1].result()
        self.writes.append((ids, self.writers.submit(self._store, ids, rows, round)))

    def _store(self, ids: np.ndarray, rows: Params, round: int) -> None:
        self.rows.write(ids, on_device(rows, torch.device("cpu")), round)

    def finish_writing(self) -> None:
        """Returns when all rows are in the file; raises what went wrong."""
        pending, self.writes = self.writes, []
        for _, write in pending:
            write.result()

    def release(self) -> bool:
        """Frees the device's memory; whether there was something to free."""
        freed = bool(self.held)
        self.held.clear()
        return freed

    def flush(self) -> None:
        try:
            self.finish_writing()
        finally:
            self.writers.shutdown()
            self.rows.flush()


def copy_of_row(rows: Tensor, at: int) -> Tensor:
    """One of them; a copy, where a view would keep the others in memory, too."""
    return rows[at] if len(rows) == 1 else rows[at].clone()
