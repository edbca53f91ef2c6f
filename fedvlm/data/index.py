"""The rows that a view of the feature store holds: the keys of its segments, sorted, in a few arrays of 24 bytes a row.

A Python dictionary of 1.3 million keys takes 10 s and 400 MB in every process that opens the view. Segments that are added
later are tables of their own, which are merged once they are half as long as the one before: a key is looked up in a few
tables, and a row is moved a few times (a log-structured merge tree; O'Neil et al., 1996).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

KEY = 16  # bytes
ROW_BITS = 32  # of a place, for the row; the bits above are the segment's number
Place = tuple[Path, int]  # a segment, and the row in it


class SortedKeys(NamedTuple):
    """Keys in ascending order; of equal ones the oldest is first."""

    high: np.ndarray  # the first half of each key, as a number
    low: np.ndarray  # the second half
    place: np.ndarray  # the segment's number and the row


class Index:
    def __init__(self) -> None:
        self.segments: list[Path] = []
        self.tables: list[SortedKeys] = []  # oldest first
        self.damaged: set[int] = set()  # places that are passed over

    def add(self, segments: Sequence[tuple[Path, bytes]]) -> None:
        """Segments with the keys of their rows, in the order in which copies are used."""
        first = len(self.segments)
        self.segments += [path for path, _ in segments]
        numbers = np.frombuffer(b"".join(keys for _, keys in segments), ">u8").reshape(-1, 2).astype("=u8")
        places = [np.arange(len(keys) // KEY) + (k << ROW_BITS) for k, (_, keys) in enumerate(segments, first)]
        if len(numbers):
            self.tables.append(_sorted(SortedKeys(numbers[:, 0], numbers[:, 1], np.concatenate(places))))
        while len(self.tables) > 1 and 2 * len(self.tables[-1].high) >= len(self.tables[-2].high):
            newer, older = self.tables.pop(), self.tables.pop()
            self.tables.append(_sorted(SortedKeys(*map(np.concatenate, zip(older, newer, strict=True)))))

    def oldest(self, key: bytes) -> Place | None:
        """The oldest copy that is not known to be damaged."""
        place = next((p for p in self._places(key) if p not in self.damaged), None)
        return None if place is None else (self.segments[place >> ROW_BITS], place & ((1 << ROW_BITS) - 1))

    def drop_oldest(self, key: bytes) -> None:
        """Pass over the oldest copy from now on, because it is damaged."""
        self.damaged.add(next(p for p in self._places(key) if p not in self.damaged))

    def _places(self, key: bytes) -> Iterator[int]:
        high, low = map(np.uint64, struct.unpack(">QQ", key))
        for table in self.tables:
            at = int(table.high.searchsorted(high))
            while at < len(table.high) and table.high[at] == high:
                if table.low[at] == low:
                    yield int(table.place[at])
                at += 1

    def __contains__(self, key: bytes) -> bool:
        return next(self._places(key), None) is not None

    def __bool__(self) -> bool:
        return bool(self.tables)

    def __len__(self) -> int:
        """How many different keys there are."""
        return len(set(self))

    def __iter__(self) -> Iterator[bytes]:
        """Every key, once for each copy."""
        for table in self.tables:
            for key in np.stack([table.high, table.low], axis=1).astype(">u8"):
                yield key.tobytes()


def _sorted(table: SortedKeys) -> SortedKeys:
    order = np.argsort(table.high, kind="stable")
    return SortedKeys(*(column[order] for column in table))
