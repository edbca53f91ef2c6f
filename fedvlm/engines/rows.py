"""Clients' private rows on disk, two slots a client, each stamped with the round that wrote it.

Read through a memory map, written with plain writes: on a full disk these fail in words, where a map would kill.
A round reads the newest row from before it and writes the other slot, so doing a round again, after a crash or a
resend, starts from the same row and gives the same bits. Nothing else has to be committed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from fedvlm.core import FedvlmError, Params

RELEASE = 256 << 20  # touched bytes after which mapped pages are handed back (they stay in the file)


class Rows:
    def __init__(self, newcomer: Params, clients: int, path: Path | None = None):
        self.names = sorted(newcomer)
        self.shapes = {k: newcomer[k].shape for k in self.names}
        self.newcomer = self._pack({k: v[None] for k, v in newcomer.items()})[0]
        kind = np.dtype(
            [("stamp", "<i8", 2), ("row", self.newcomer.dtype, (2, max(1, len(self.newcomer))))], align=True
        )
        self.kind, self.offset = kind, kind.fields["row"][1] if kind.fields else 0
        file = path.open("r+b" if path.exists() else "w+b") if path else tempfile.TemporaryFile()  # noqa: SIM115
        self.file, size = file, kind.itemsize * clients
        if path and path.stat().st_size not in (0, size):
            raise FedvlmError(f"{path} holds rows of another shape; it belongs to another run")
        file.truncate(size)  # sparse: a slot nobody wrote takes no space; a new stamp reads 0, "never"
        self.map = mmap.mmap(file.fileno(), size)
        self.table: np.ndarray = np.frombuffer(self.map, kind)
        self.touched = 0

    def read(self, ids: np.ndarray, upto: int) -> Params:
        """Each client's newest row written in round `upto` or before; the newcomer's where there is none."""
        if not self.names:
            return {}
        stamps = self.table["stamp"][ids]
        usable = np.where((stamps > 0) & (stamps <= upto), stamps, 0)
        slot = usable.argmax(1)
        rows = self.table["row"][ids, slot]
        rows[usable.max(1) == 0] = self.newcomer
        self._release(rows.nbytes)
        return self._unpack(rows)

    def write(self, ids: np.ndarray, rows: Params, round: int) -> None:
        """To the slot that a redo of this round would not read."""
        if not self.names or not len(ids):
            return
        stamps = self.table["stamp"][ids]
        before = np.where((stamps > 0) & (stamps < round), stamps, 0)
        slot = np.where(before.max(1) == 0, 0, 1 - before.argmax(1))
        packed = self._pack(rows)
        stamp, none = np.int64(round).tobytes(), np.int64(0).tobytes()
        try:
            for i, s, row in zip(ids.tolist(), slot.tolist(), packed, strict=True):
                start = i * self.kind.itemsize
                os.pwrite(self.file.fileno(), none, start + 8 * s)  # a row half written is no row
                os.pwrite(self.file.fileno(), row.data, start + self.offset + s * row.nbytes)
                os.pwrite(self.file.fileno(), stamp, start + 8 * s)
        except OSError as error:
            raise FedvlmError(
                f"clients' rows cannot be written ({error.strerror}); the round is lost and all before it stands: make "
                "room and `fedvlm resume`"
            ) from error

    def flush(self) -> None:
        self.map.flush()

    def _pack(self, rows: Params) -> np.ndarray:
        if not self.names:
            return np.zeros((1, 0), np.float32)
        return torch.cat([rows[k].reshape(len(rows[k]), -1) for k in self.names], dim=1).numpy()

    def _unpack(self, rows: np.ndarray) -> Params:
        flat = torch.from_numpy(rows)
        parts = torch.split(flat, [s.numel() for s in self.shapes.values()], dim=1)
        return {k: p.reshape(len(rows), *self.shapes[k]).contiguous() for k, p in zip(self.names, parts, strict=True)}

    def _release(self, nbytes: int) -> None:
        self.touched += nbytes
        if self.touched > RELEASE:
            self.map.madvise(mmap.MADV_DONTNEED)
            self.touched = 0
