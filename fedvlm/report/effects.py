"""What the mechanisms of a method did in a run: numbers that its local rule and its merge record in every round."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from fedvlm import parts
from fedvlm.folder import RunFolder
from fedvlm.records import RunRecord


class Effect(NamedTuple):
    name: str
    first: float  # of the first round that has it
    last: float
    meaning: str


def effects(run: RunFolder) -> list[Effect]:
    recorded = [r["effects"] for r in run.rounds() if r.get("effects")]
    if not recorded:  # finding the meanings imports torch
        return []
    known = meanings(run.record)
    names = dict.fromkeys(name for one in recorded for name in one)
    found = []
    for name in names:
        values = [one[name] for one in recorded if name in one]
        found.append(Effect(name, values[0], values[-1], known.get(name, "")))
    return found


def meanings(record: RunRecord) -> dict[str, str]:
    """In words, of parts that fedvlm has; a user's own code is not run for this."""
    found: dict[str, str] = {}
    for axis, part in (("local", record.local), ("merge", record.merge)):
        found |= {} if part.code else meanings_of(axis, part.name)
    return found


@cache
def meanings_of(axis: str, name: str) -> dict[str, str]:
    return getattr(parts.find(axis, name), "effects", {}) if name in parts.names(axis) else {}


def line(run: RunFolder) -> str:
    """One line, of the last round."""
    return ", ".join(f"{e.name} {e.last:.3g}" for e in effects(run))
