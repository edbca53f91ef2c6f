"""How records name and measure many clients: numbered names as ranges, and numbers by client as a summary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from statistics import median
from typing import TypeVar

MANY = 1000  # clients up to which records list each
MOST = 2_000_000  # names in all that ranges may stand for: a damaged or foreign file must not fill the memory
NUMBERED = re.compile(r"(.*?)(\d+)\Z", re.ASCII | re.DOTALL)
RANGE = re.compile(r"(.*?)(\d{1,9}) … \1(\d{1,9})\Z", re.ASCII | re.DOTALL)
Record = TypeVar("Record", bound=Mapping[str, object])


def compact(names: list[str]) -> list[str]:
    """Write more than MANY names as ranges: neighbours whose numbers follow each other (client-007, client-008, …)
    become one. The names stay as they are where one of them reads like a range, or more than MANY ranges were left."""
    if len(names) <= MANY or any(map(RANGE.match, names)):
        return names
    found: list[str] = []
    for _, group in groupby(enumerate(names), _series):
        members = [name for _, name in group]
        found.append(members[0] if len(members) == 1 else f"{members[0]} … {members[-1]}")
    return found if len(found) <= MANY else names


def _series(place: tuple[int, str]) -> tuple[str, int, int]:
    """The same for neighbours whose numbers follow each other, and different for all others."""
    at, name = place
    match = NUMBERED.match(name)
    return (match[1], len(match[2]), int(match[2]) - at) if match else (name, 0, at)


def expanded(names: Iterable[str]) -> list[str]:
    """The names of `compact`. A list of more than MANY, or one that stands for at most MANY, holds clients' own names."""
    names = list(names)
    if count_of(names) == len(names):
        return names
    found: list[str] = []
    for name in names:
        prefix, digits, low, high = _bounds(name)
        if 0 < high - low < MOST - len(found):
            found += [f"{prefix}{k:0{digits}d}" for k in range(low, high + 1)]
        else:
            found.append(name)
    return found


def count_of(names: Iterable[str]) -> int:
    """How many names `compact` was given."""
    names = list(names)
    found = sum(high - low + 1 for _, _, low, high in map(_bounds, names))
    return found if len(names) <= MANY < found else len(names)


def _bounds(name: str) -> tuple[str, int, int, int]:
    """The parts of a range: what stands before the numbers, their digits, the first and the last; the last is the first
    if it is no range."""
    match = RANGE.match(name)
    if not match or len(match[2]) != len(match[3]) or int(match[3]) < int(match[2]):
        return name, 0, 0, 0
    return match[1], len(match[2]), int(match[2]), int(match[3])


def summarised(record: Record) -> dict[str, object]:
    """A round's record in which lists of more than MANY clients are ranges, and more than MANY numbers by client are
    summarised under `summaries`."""
    found: dict[str, object] = {}
    summaries: dict[str, object] = {}
    for key, value in record.items():
        if isinstance(value, list) and len(value) > MANY:
            found[key] = compact(value)
        elif isinstance(value, dict) and len(value) > MANY and all(isinstance(v, int | float) for v in value.values()):
            summaries[key] = summary(list(value.values()))
        else:
            found[key] = value
    return found | ({"summaries": summaries} if summaries else {})


def summary(values: list[float]) -> dict[str, float]:
    mean = sum(values) / len(values)
    return {"clients": len(values), "least": min(values), "median": median(values), "mean": mean, "most": max(values)}
