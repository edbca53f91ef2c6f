"""What benchmarks/claims.py measured, kept in benchmarks/claims/measured.json: an entry for each claim, by paper and id.

An entry has a digest of the claim's definition (data, keys, comparisons, mechanism), so that figures of another definition
are not taken for this one's. A later measurement replaces an entry unless it has fewer comparisons, seeds or rounds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEFINING = ("data", "keys", "compare", "mechanism")
OPTIONAL = ("needs",)  # part of the definition where a claim has it
FIGURES = ("left", "right", "difference", "half")


@dataclass(frozen=True)
class Entry:
    definition: str  # digest of the claim
    date: str
    commit: str
    seeds: tuple[int, ...]
    rounds: int  # that the runs were cut to; 0: as the claim says
    backbone: str
    split: str
    outcomes: tuple[dict[str, float], ...]  # FIGURES of each comparison that was run; half: of the 95 % interval
    seen: tuple[tuple[str, float | None], ...]  # records of the mechanism and their values; none: not recorded
    acted: bool
    reason: str = ""  # why comparisons are missing
    lacking: str = ""  # what had to learn, and did not
    bound: float = 5.0  # updates longer than so many medians were cut to it; 0: none
    factors: str = ""  # chosen for the lr of each method, from a grid that goes on where the best is at its end

    def yields_to(self, other: Entry) -> bool:
        """Whether the other, which was measured later, takes its place."""
        if self.definition != other.definition:
            return True
        least = (len(self.outcomes), len(self.seeds), self.rounds or float("inf"))
        given = (len(other.outcomes), len(other.seeds), other.rounds or float("inf"))
        return all(new >= old for new, old in zip(given, least, strict=True))


def digest(claim: Mapping[str, Any]) -> str:
    given = {k: claim.get(k) for k in DEFINING} | {k: claim[k] for k in OPTIONAL if k in claim}
    text = json.dumps(given, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def load(path: Path) -> dict[str, Entry]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: entry(one) for name, one in found.items()}


def entry(one: Mapping[str, Any]) -> Entry:
    lists = {k: tuple(one[k]) for k in ("seeds", "outcomes")} | {"seen": tuple((k, v) for k, v in one["seen"])}
    return Entry(**{**one, **lists})


def save(path: Path, entries: Mapping[str, Entry]) -> None:
    text = json.dumps({k: asdict(v) for k, v in sorted(entries.items())}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def merged(kept: Mapping[str, Entry], now: Mapping[str, Entry]) -> dict[str, Entry]:
    taken = {name: one for name, one in now.items() if name not in kept or kept[name].yields_to(one)}
    return {**kept, **taken}
