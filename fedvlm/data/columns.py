"""Columns of examples as numbers, so that partitions of millions of examples need no Python object for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

if TYPE_CHECKING:
    from fedvlm.data.source import Item


class Words(Sequence[str]):
    """Strings of which few differ: the different ones in order, and for each place the number of its string."""

    def __init__(self, names: Sequence[str], codes: np.ndarray):
        self.names, self.codes = tuple(names), codes

    @classmethod
    def of(cls, words: Iterable[str]) -> Words:
        if isinstance(words, Words):
            return words
        words = list(words)
        names = sorted(set(words))
        numbers = {name: k for k, name in enumerate(names)}
        return cls(names, np.fromiter(map(numbers.__getitem__, words), np.int64, len(words)))

    @classmethod
    def coded(cls, names: Sequence[str], codes: np.ndarray) -> Words:
        """Words of names in any order, also with repetitions or without a place."""
        if len(names) == 1:
            return cls(names, constant(len(codes)))
        used = np.flatnonzero(np.bincount(codes, minlength=len(names)))
        present = cls.of(names[k] for k in used.tolist())
        number = np.zeros(len(names), np.int64)
        number[used] = present.codes
        return cls(present.names, number[codes])

    def only(self, rows: np.ndarray) -> Words:
        if len(self.names) == 1:
            return Words(self.names, constant(len(rows)))
        return Words.coded(self.names, self.codes[rows])

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[str]:
        return map(self.names.__getitem__, self.codes.tolist())

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Words: ...
    def __getitem__(self, at: int | slice) -> str | Words:
        return Words(self.names, self.codes[at]) if isinstance(at, slice) else self.names[self.codes[at]]


class NumberedItems(Sequence["Item"]):
    """Examples without files of their own, whose paths are their numbers; an `Item` is made when it is asked for."""

    def __init__(self, domain: Words, label: Words, group: Words, number: np.ndarray | None = None):
        self.columns = {"domain": domain, "label": label, "group": group}
        self.number = number  # None: 0, 1, 2, …

    def only(self, rows: np.ndarray) -> NumberedItems:
        number = rows if self.number is None else self.number[rows]
        return NumberedItems(**{k: v.only(rows) for k, v in self.columns.items()}, number=number)

    def __len__(self) -> int:
        return len(self.columns["label"])

    @overload
    def __getitem__(self, at: int) -> Item: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Item]: ...
    def __getitem__(self, at: int | slice) -> Item | Sequence[Item]:
        from fedvlm.data.source import Item

        if isinstance(at, slice):
            return self.only(np.arange(len(self))[at])
        number = range(len(self))[at] if self.number is None else self.number[at]
        return Item(str(number), **{k: v[at] for k, v in self.columns.items()})


def constant(count: int) -> np.ndarray:
    """An array of zeros of this length that takes no memory."""
    return np.broadcast_to(np.zeros((), np.int64), count)


def column(items: Sequence[Item], name: str) -> Words:
    """One field of all items."""
    if isinstance(items, NumberedItems):
        return items.columns.get(name) or Words(("",), constant(len(items)))
    return Words.of(getattr(i, name) for i in items)
