"""The papers' tables as files: tables/NAME.yaml, and the numbers of them that fedvlm shows beside its own."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, cast

from fedvlm.config.recipe import PUBLISHED, PublishedEntry, Settings, parse

PAPERS = Path(__file__).parent / "tables"
ROW_KEYS = (
    "title",
    "method",
    "on",
    "also",
    "settings",
    "why",
    "missing",
    "note",
)  # of a row of a table, beside its measures
BESIDE = ("G", "P", "C", "local", "base", "novel", "hm")  # measures that tables of runs show beside their own


class PublishedTable(TypedDict, total=False):
    """A table of a paper on one data set (tables/README.md)."""

    table: str
    caption: str
    part: str
    data: str
    backbone: str
    settings: Settings  # the numbers hold under these settings only
    run: Settings
    rounds: int
    seeds: list[int]
    measures: list[str]
    note: str
    missing: str  # why no row can be run
    select: str  # the round that is reported: last, or selected (on validation)
    over: list[int | str]  # of a mean over data sets: the tables whose parts it is the mean of
    sets: list[str]  # the data sets of that mean; left out: all of these tables
    figure: str  # a picture of the rows' records or models (fedvlm/report/NAME.py)
    rows: list[dict[str, Any]]  # ROW_KEYS, and the measures: a number, or [mean, std]


class Paper(TypedDict):
    """PAPERS/NAME.yaml; supplement/NAME.yaml has further tables of the same form, which only `reproduce` reads."""

    paper: str
    title: str
    protocol: Settings  # keys of all runs of the paper's tables, of those parts that have them
    grid: str  # in words: which learning rates the paper tried, and by what it chose
    own: dict[str, dict[str, Any]]  # by method: `settings` that its rows have instead, and `why`
    tables: list[PublishedTable]


def paper_names() -> list[str]:
    return sorted(p.stem for p in PAPERS.glob("*.yaml"))


@cache
def paper(name: str) -> Paper:
    return cast(Paper, parse(PAPERS / f"{name}.yaml", own=True))


def entries() -> list[PublishedEntry]:
    """The rows that a run can have beside it; a method with several rows in one table is left out: a sweep of settings."""
    out: list[PublishedEntry] = []
    for known in map(paper, paper_names()):
        for table in known["tables"]:
            about = [f"{known['paper']} {table['table']}", table.get("backbone", ""), table.get("note", "")]
            source = ", ".join(filter(None, about))
            methods = Counter((row.get("method"), row.get("on")) for row in table["rows"])
            for row in table["rows"]:
                numbers = {m: row[m][0] if isinstance(row[m], list) else row[m] for m in BESIDE if m in row}
                if not numbers or "method" not in row or methods[row["method"], row.get("on")] > 1:
                    continue
                own = f"{row['method']} on={row['on']}" if "on" in row else row["method"]
                for label in (own, *row.get("also", [])):
                    method, _, on = label.partition(" on=")
                    out.append(
                        PublishedEntry(
                            method, on, table["data"], table.get("settings", {}), numbers | {"source": source}
                        )
                    )
    return out


def write() -> None:
    """Write the numbers into the package: YAML of this size takes longer to read than a command may that trains nothing."""
    PUBLISHED.write_text(json.dumps(entries(), separators=(",", ":")) + "\n", encoding="utf-8")
