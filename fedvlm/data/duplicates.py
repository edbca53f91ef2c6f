"""The same image more than once: in a class, in several classes, at several clients. Copies on both sides of the split make
test scores too good, so that by default (duplicates=group) all copies of an image get the same part of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedvlm.data.source import Item
from fedvlm.system.formatting import counted

MOST_NAMED = 3  # copies in a note


def twins_of(keys: Sequence[bytes]) -> np.ndarray | None:
    """The first item with the same content, for each item; None where every content is there once."""
    first: dict[bytes, int] = {}
    found = np.array([first.setdefault(key, k) for k, key in enumerate(keys)], dtype=np.int64)
    return found if len(first) < len(keys) else None


def copies_of(items: Sequence[Item], twins: np.ndarray) -> dict[str, str]:
    """File → the same image that stands before it."""
    return {items[k].path: items[first].path for k, first in enumerate(twins.tolist()) if first != k}


def together(part: np.ndarray, twins: np.ndarray | None) -> np.ndarray:
    """The split in which all copies of an image are where one of them is: in train if any is."""
    if twins is None:
        return part
    lowest = part.copy()
    np.minimum.at(lowest, twins, part)
    found: np.ndarray = lowest[twins]
    return found


def told(items: Sequence[Item], twins: np.ndarray, what: str) -> str:
    """How many images there are more than once, and where."""
    copies = copies_of(items, twins)
    places: dict[int, list[Item]] = {}
    for k, first in enumerate(twins.tolist()):
        places.setdefault(first, []).append(items[k])
    several = [found for found in places.values() if len(found) > 1]
    classes = sum(len({i.label for i in found}) > 1 for found in several)
    clients = sum(len({(i.domain, i.client) for i in found}) > 1 for found in several)
    counts = f"{counted(len(several), 'image')} more than once ({counted(len(copies), 'further file')}"
    counts += f"; {classes} in several classes" * bool(classes) + f"; {clients} at several clients" * bool(clients)
    named = ", ".join(f"{copy} is {first}" for copy, first in list(copies.items())[:MOST_NAMED])
    done = {
        "group": "all copies of an image get the same part of the split (duplicates=drop leaves copies out)",
        "drop": "copies are left out",
        "keep": "test scores may be too good (duplicates=group keeps copies on one side of the split)",
    }
    more = ", …" if len(copies) > MOST_NAMED else ""
    return f"{counts}): {done[what]}; such as {named}{more}"
