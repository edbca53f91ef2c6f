"""Runs on several data sets, or with several backbones: a block for each, with its own table and its own baseline."""

from __future__ import annotations

from collections import Counter

from fedvlm.core.records import RunRecord, Select
from fedvlm.report.tables import summarise
from fedvlm.system.table import Table
from fedvlm.training.folder import RunFolder


def blocks(runs: list[RunFolder]) -> dict[str, list[RunFolder]]:
    """Group runs by the names of data and backbone, in order of appearance; by what differs of their fingerprints too
    where names are the same."""
    records = {id(run): run.record for run in runs}
    whose = {block_key(r): title(r) for r in records.values()}
    names = Counter(whose.values())
    out: dict[str, list[RunFolder]] = {}
    for run in runs:
        own = block_key(records[id(run)])
        name = whose[own]
        out.setdefault(name if names[name] == 1 else f"{name} ({version(own, name, whose)})", []).append(run)
    return out


def version(own: tuple[str, str], name: str, whose: dict[tuple[str, str], str]) -> str:
    """What distinguishes these data and this backbone from others with the same names: data 1f2e3d4c."""
    others = [other for other, called in whose.items() if called == name]
    parts = zip(("data", "backbone"), own, zip(*others, strict=True), strict=True)
    return ", ".join(f"{what} {mark[:8]}" for what, mark, found in parts if len(set(found)) > 1)


def block_key(record: RunRecord) -> tuple[str, str]:
    return record.data.fingerprint, record.backbone.fingerprint


def title(record: RunRecord) -> str:
    return f"{record.data.name} with {record.backbone.name}"


def tables(runs: list[RunFolder], select: Select = "last", fair: bool = False) -> dict[str, Table]:
    """The table of each block; blocks without a finished run are left out where another has one. fair: as in summarise."""
    found = blocks(runs)
    ready = {name: members for name, members in found.items() if any(r.done for r in members)} or found
    return {name: summarise(members, select, fair=fair) for name, members in ready.items()}
