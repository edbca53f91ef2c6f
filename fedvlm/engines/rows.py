"""Clients' private rows on disk, two slots per client, each stamped with the round that wrote it.

Read through a memory map, written with plain writes: on a full disk these raise an error, where a map would end the process.
A round reads the newest row from before it and writes the other slot, so that repeating a round, after a crash or a resend,
starts from the same row and gives the same bits. Nothing else has to be committed.
"""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path

import numpy as np
import torch

from fedvlm.core import FedvlmError, Params

RELEASE = 256 << 20  # bytes read after which mapped pages are given back to the system


class Rows:
    def __init__(self, newcomer: Params, clients: int, path: Path | None = None):
        self.names = sorted(newcomer)
        self.shapes = {k: newcomer[k].shape for k in self.names}
        self.newcomer = self._pack({k: v[None] for k, v in newcomer.items()})[0]
        kind = np.dtype(
            [("stamp", "<i8", 2), ("row", self.newcomer.dtype, (2, max(1, len(self.newcomer))))], align=True
        )
        self.kind, self.offset = kind, kind.fields["row"][1] if kind.fields else 0
        mode = "r+b" if path and path.exists() else "w+b"
        file = path.open(mode, buffering=0) if path else tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self.file, size = file, kind.itemsize * clients
        if path and path.stat().st_size not in (0, size):
            raise FedvlmError(f"{path} holds rows of another shape; it belongs to another run")
        file.truncate(size)  # sparse: unwritten slots take no space, and their stamp reads 0, "never"
        self.map = mmap.mmap(file.fileno(), size)
        self.table: np.ndarray = np.frombuffer(self.map, kind)
        self.touched = 0

    def read(self, ids: np.ndarray, upto: int) -> Params:
        """Each client's newest row written in round `upto` or before; a new client's row where there is none."""
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
        """To the slot that a repetition of this round would not read."""
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
                self._put(start + 8 * s, none)  # a half-written row does not count
                self._put(start + self.offset + s * row.nbytes, row.tobytes())
                self._put(start + 8 * s, stamp)
        except OSError as error:
            raise FedvlmError(
                f"clients' rows cannot be written ({error.strerror}); the round is lost and all before it stands: make "
                "room and `fedvlm resume`"
            ) from error

    def _put(self, at: int, data: bytes) -> None:
        self.file.seek(at)
        view = memoryview(data)
        while view:  # an unbuffered write may be short
            view = view[self.file.write(view) or 0 :]

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
            advise = getattr(self.map, "madvise", None)  # not on Windows
            if advise is not None:
                advise(mmap.MADV_DONTNEED)
            self.touched = 0
