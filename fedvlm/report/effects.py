"""What the mechanisms of a method did in a run: numbers that its local rule and its merge record in every round, and what
its adapter records of every client's model at the end."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from fedvlm.config import catalogue
from fedvlm.core.records import UPDATE, UPDATE_MEANING, PartRecord, RoundRecord, RunRecord
from fedvlm.training.folder import RunFolder


class Effect(NamedTuple):
    name: str
    first: float | None  # of the first round that has it; None: recorded at the end only
    last: float
    meaning: str


def effects(run: RunFolder) -> list[Effect]:
    rounds = run.rounds()
    recorded = [r["effects"] for r in rounds if r.get("effects")]
    known = effect_meanings(run.record)
    names = dict.fromkeys(name for one in recorded for name in one)
    found = []
    for name in names:
        values = [one[name] for one in recorded if name in one]
        found.append(Effect(name, values[0], values[-1], known.get(name, "")))
    for name, meaning in recorded_by("adapter", run.record.adapter).items():
        if rounds and (value := median_of(rounds[-1], name)) is not None:
            found.append(Effect(name, None, value, f"{meaning} (median over clients)"))
    return found


def median_of(record: RoundRecord, name: str) -> float | None:
    """The median over clients; of many clients a record has the median alone."""
    entries: Mapping[str, object] = record
    by_client, summary = entries.get(name), record.get("summaries", {}).get(name)
    if isinstance(by_client, dict) and by_client:
        return float(median(by_client.values()))
    return summary["median"] if summary else None


def effect_meanings(record: RunRecord) -> dict[str, str]:
    """The meanings in words, of parts that fedvlm has; a user's own code is not run for this."""
    return {UPDATE: UPDATE_MEANING} | recorded_by("local", record.local) | recorded_by("merge", record.merge)


def recorded_by(kind: str, part: PartRecord) -> dict[str, str]:
    return {} if part.code else catalogue.records(kind, part.name)


def effects_line(run: RunFolder) -> str:
    """One line, of the last round."""
    return ", ".join(f"{e.name} {e.last:.3g}" for e in effects(run))
