"""Clients' private rows on disk, two slots per client, each stamped with the round that wrote it.

A round reads the newest row from before it and writes the other slot, so that repeating a round, after a crash or a resend,
starts from the same row and gives the same bits. Nothing else has to be committed.

The file is a head, a table of entries [slot, client] and the rows [slot, client]. While a row is written its entry says
round 0, so that a process that ends there leaves the older row. What does not agree with its checksum is damaged, and an
error: a client must not lose its model in silence. Reads and writes are plain ones, since on a full or failing disk a memory
map would end the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch

from fedvlm.core.state import Params, aligned
from fedvlm.errors import FedvlmError
from fedvlm.system import files

MAGIC = b"fedvlm rows 2\n"
HEAD = 32  # bytes: MAGIC, then a hash of what the rows are
# the round, its checksum, the row's checksum; 16 bytes, so that no entry lies across two sectors and is written by halves
ENTRY = np.dtype([("stamp", "<u4"), ("seal", "<u4"), ("check", "<u8")])
ODD = np.uint64(0x9E3779B97F4A7C15)  # its multiples are spread over all 64 bits
NOWHERE = -9  # the place of a row that was never written
RESTORE = "restore it together with state.safetensors from a copy, or start the run anew elsewhere"
WriteGuard = Callable[[], contextlib.AbstractContextManager[None]]  # entered around every write


class Rows:
    def __init__(
        self,
        newcomer: Params,
        clients: int,
        path: Path | None = None,
        guard: WriteGuard = contextlib.nullcontext,
        several: bool = False,
    ):
        """Open the rows at `path`, or in a temporary file. `guard` is entered around every write. several: other
        processes write rows of other clients there, too, so that entries are read again before they are used."""
        self.several = several
        self.names = sorted(newcomer)
        self.shapes = {k: tuple(newcomer[k].shape) for k in self.names}
        self.newcomer = self._pack({k: v[None] for k, v in newcomer.items()})[0]
        self.guard, self.lock, self.path = guard, threading.Lock(), path or Path("clients' rows")
        self.clients, self.row_bytes = clients, int(self.newcomer.nbytes)
        self.weights = np.arange(1, self.row_bytes // 8 + 9, dtype=np.uint64) * ODD | 1
        self.start = HEAD + 2 * clients * ENTRY.itemsize  # of the rows
        self.size = self.start + 2 * clients * self.row_bytes
        about = repr((clients, self.newcomer.dtype.str, self.shapes)).encode()
        head = MAGIC + hashlib.blake2b(about, digest_size=HEAD - len(MAGIC)).digest()
        with files.writing(self.path):
            self.file = self._open(path, head)
        table = self._load_table(head).reshape(2, clients)
        self.stamps, self.checks = table["stamp"].astype(np.int64), table["check"].copy()

    def _open(self, path: Path | None, head: bytes) -> BinaryIO:
        def lay_out(file: BinaryIO) -> None:
            file.write(head + table_entries(np.arange(2 * self.clients)).tobytes())
            file.truncate(self.size)  # rows take space when they are written

        if path is None:
            file = cast(BinaryIO, tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
            lay_out(file)
            return file
        if not path.exists() or not path.stat().st_size:
            with files.replaced(path, private=True) as out:
                lay_out(out)
        try:
            return path.open("r+b", buffering=0)
        except OSError:  # a read-only place, which is enough to predict
            return path.open("rb", buffering=0)

    def _load_table(self, head: bytes) -> np.ndarray:
        found, table = np.zeros(HEAD, np.uint8), np.zeros(2 * self.clients, ENTRY)
        size = self.file.seek(0, os.SEEK_END)
        if size >= self.start:
            self._get(0, flat(found))
            self._get(HEAD, flat(table))
        if found[: len(MAGIC)].tobytes() != MAGIC:
            raise FedvlmError(f"{self.path} is damaged, or another version of fedvlm wrote it; {RESTORE}")
        if found.tobytes() != head:
            raise FedvlmError(f"{self.path} holds rows of another shape; it belongs to another run")
        if size != self.size:
            raise FedvlmError(f"{self.path} is damaged: it has {size:,} bytes instead of {self.size:,}; {RESTORE}")
        expected = table_entries(np.arange(len(table)), table["stamp"])
        if (wrong := table["seal"] != expected["seal"]).any():
            raise self._damage(np.flatnonzero(wrong) % self.clients)
        return table

    def read(self, ids: np.ndarray, upto: int) -> Params:
        """Each client's newest row written in round `upto` or before; a new client's row where there is none."""
        if not self.names:
            return {}
        self.refresh(ids)
        stamps = self.stamps[:, ids]
        usable = np.where(stamps <= upto, stamps, 0)
        slot, known = usable.argmax(0), usable.max(0) > 0
        if not known.all() and (stamps > upto).all(0).any():
            raise FedvlmError(f"{self.path} is newer than round {upto}, from which the run would go on; {RESTORE}")
        rows = np.empty((len(ids), len(self.newcomer)), self.newcomer.dtype)
        rows[~known] = self.newcomer
        view = flat(rows)
        for low, high, place in consecutive(np.where(known, slot * self.clients + ids, NOWHERE)):
            if place != NOWHERE:
                self._get(self.start + place * self.row_bytes, view[low * self.row_bytes : high * self.row_bytes])
        if (wrong := known & (self._checksums(rows) != self.checks[slot, ids])).any():
            raise self._damage(ids[wrong])
        return self._unpack(rows)

    def write(self, ids: np.ndarray, rows: Params, round: int) -> None:
        """Write to the slot that a repetition of this round would not read."""
        if not self.names or not len(ids):
            return
        self.refresh(ids)
        packed = self._pack(rows)
        advice = "the round is lost and all before it stands: make room and `fedvlm resume`"
        with self.guard(), files.writing(self.path, advice):
            stamps = self.stamps[:, ids]
            before = np.where(stamps < round, stamps, 0)
            slot = np.where(before.max(0) == 0, 0, 1 - before.argmax(0))
            again = self.stamps[slot, ids] >= round
            if again.any():  # a row of this very round, which must not count while it is replaced
                self._stamp(slot[again], ids[again], 0, np.zeros(int(again.sum())))
            self._put(self.start, slot * self.clients + ids, packed)
            self._stamp(slot, ids, round, self._checksums(packed))

    def refresh(self, ids: np.ndarray) -> None:
        """Reads these clients' entries again, where other processes may have written them."""
        if not self.several:
            return
        for slot in range(2):
            entry = np.zeros(len(ids), ENTRY)
            for low, high, place in consecutive(slot * self.clients + ids):
                self._get(HEAD + place * ENTRY.itemsize, flat(entry[low:high]))
            self.stamps[slot, ids], self.checks[slot, ids] = entry["stamp"], entry["check"]

    def flush(self) -> None:
        with files.writing(self.path):
            os.fsync(self.file.fileno())

    def _stamp(self, slot: np.ndarray, ids: np.ndarray, round: int, checks: np.ndarray) -> None:
        """Sets entries, here and in the file."""
        places = slot * self.clients + ids
        self._put(HEAD, places, table_entries(places, round, checks))
        self.stamps[slot, ids], self.checks[slot, ids] = round, checks

    def _checksums(self, rows: np.ndarray) -> np.ndarray:
        """Sums of each row's words of 8 bytes times numbers that are odd, so that any changed word changes the sum. Three
        times as fast as CRC-32, which was noticeable in rounds of many small clients."""
        whole, octets = self.row_bytes // 8, rows.view(np.uint8)
        words, rest = octets[:, : 8 * whole].view("<u8"), octets[:, 8 * whole :]
        found: np.ndarray = words @ self.weights[:whole] + rest @ self.weights[whole : whole + rest.shape[1]]
        return found

    def _get(self, at: int, view: memoryview) -> None:
        try:
            with self.lock:
                self.file.seek(at)
                while view:  # an unbuffered read may be short
                    count = self.file.readinto(view)  # type: ignore[attr-defined]
                    if not count:
                        raise FedvlmError(f"{self.path} is damaged: it is shorter than before; {RESTORE}")
                    view = view[count:]
        except OSError as error:
            raise FedvlmError(f"{self.path} cannot be read ({error.strerror}); {RESTORE}") from error

    def _put(self, start: int, places: np.ndarray, items: np.ndarray) -> None:
        """Items of equal size, to their places in the table that begins at `start`."""
        view, size = flat(items), items[0].nbytes
        for low, high, place in consecutive(places):
            part = view[low * size : high * size]
            with self.lock:
                self.file.seek(start + place * size)
                while part:  # an unbuffered write may be short
                    part = part[self.file.write(part) or 0 :]

    def _damage(self, ids: np.ndarray) -> FedvlmError:
        names = ", ".join(map(str, ids[:5].tolist())) + (", …" if len(ids) > 5 else "")
        return FedvlmError(f"{self.path} is damaged for client {names} (checksum); {RESTORE}")

    def _pack(self, rows: Params) -> np.ndarray:
        if not self.names:
            return np.zeros((1, 0), np.float32)
        return torch.cat([rows[k].reshape(len(rows[k]), -1) for k in self.names], dim=1).numpy()

    def _unpack(self, rows: np.ndarray) -> Params:
        flat = torch.from_numpy(rows)
        parts = torch.split(flat, [int(np.prod(s)) for s in self.shapes.values()], dim=1)
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: aligned(p.reshape(len(rows), *shape).contiguous()) for (name, shape), p in named}


def table_entries(places: np.ndarray, stamp: int | np.ndarray = 0, check: int | np.ndarray = 0) -> np.ndarray:
    """Table entries for these places (slot × clients + client). A seal is never 0, so that lost blocks are noticed, and
    differs by place."""
    out = np.zeros(len(places), ENTRY)
    out["stamp"], out["check"] = stamp, check
    out["seal"] = ~(out["stamp"] + places.astype(np.uint32))
    return out


def flat(array: np.ndarray) -> memoryview:
    """The array's bytes."""
    return array.reshape(-1).view(np.uint8).data


def consecutive(places: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Stretches of consecutive places: from, to, and the first place."""
    known, first = places.tolist(), 0
    for k in range(1, len(known) + 1):
        if k == len(known) or known[k] != known[k - 1] + 1:
            yield first, k, known[first]
            first = k
