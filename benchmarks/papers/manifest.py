"""Manifests: the tables of papers with their data, settings and published numbers (tables/README.md).

Everything in a file is checked when it is read, so that a wrong key, method or measure is an error with a place and not a
missing column. Imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from fedvlm.config import recipe
from fedvlm.config.recipe import Settings
from fedvlm.core.records import Select
from fedvlm.errors import FedvlmError, nearest
from papers import published
from papers.published import PAPERS, ROW_KEYS

SEEDS = [50, 77, 98]  # where a paper names none
PERCENT = ("G", "P", "C", "local", "base", "novel", "hm", "acc", "cacc", "auroc", "fpr95", "worst", "best")
OTHER = {  # measure → the smallest and the largest number that it can be
    "variance": (0.0, 2500.0),
    "cosine": (-1.0, 1.0),
    "condition": (1.0, 1e6),
    "gap_variance": (0.0, 1e6),
    "mean_spread": (0.0, 1e6),
    "ga_spread": (0.0, 1e6),
    "faa_spread": (0.0, 1e6),
    "seconds": (0.0, 1e7),
    "mb": (0.0, 1e6),
    "parameters": (0.0, 1e12),
}
BY_PLACE = ("G", "P", "C", "acc", "cacc", "auroc", "fpr95", "base", "novel", "hm", "local")  # measures that take @PLACE
PART_KEYS = tuple(published.PublishedTable.__annotations__)
SET_KEYS = ("title", "layout", "domains", "more_domains", "classes", "get")
LAYOUTS = ("domain/class/image", "class/image", "site/image+mask", "text")
CURVES = "curves"  # a figure of measures by round
FIGURES = (CURVES, "similarity", "surface", "tsne", "weights")  # modules of this folder; all but the first draw models
AVERAGE = "average"  # the data of a part that is a mean over data sets


class Published(NamedTuple):
    mean: float
    std: float | None = None


@dataclass(frozen=True)
class DataSet:
    """What a user's folder must look like."""

    name: str
    title: str
    layout: str = LAYOUTS[0]
    domains: tuple[str, ...] = ()
    more_domains: bool = False  # there may be others
    classes: tuple[str, ...] | int = 0  # their names, or how many; 0: any
    get: str = ""  # how to come by it


@dataclass(frozen=True)
class Row:
    title: str
    method: str  # "": none in fedvlm
    on: str
    settings: Settings  # of the row, and of its method in this paper (`own`)
    why: str  # why it has settings that other rows do not have
    missing: str  # why it cannot be run; "": it can
    note: str
    numbers: dict[str, Published]


@dataclass(frozen=True)
class Part:
    """A table on one data set."""

    paper: str  # the file's name
    cited: str
    table: str
    caption: str
    name: str  # the word that chooses it among the parts of a table
    data: str
    backbone: str  # "": none is needed
    keys: Settings  # of its runs
    protocol: Settings  # the paper's, for runs whose parts have these keys
    grid: str
    measures: tuple[str, ...]
    note: str
    missing: str
    select: Select
    rows: tuple[Row, ...]
    figure: str = ""  # of FIGURES; "": none is drawn
    over: tuple[str, ...] = ()  # of a mean over data sets: the tables whose parts it is the mean of
    sets: tuple[str, ...] = ()  # the data sets of that mean; (): all that these tables have

    @property
    def title(self) -> str:
        return f"{self.cited} {self.table}"

    def places(self, *measures: str) -> list[str]:
        """What stands behind the @ of these measures."""
        found = [m.partition("@") for m in self.measures]
        return list(dict.fromkeys(place for name, _, place in found if place and name in measures))

    @property
    def able(self) -> list[Row]:
        """The rows that can be run."""
        return [] if self.missing or self.over else [r for r in self.rows if not r.missing]


@cache
def data_sets() -> dict[str, DataSet]:
    path = PAPERS / "data" / "sets.yaml"
    found = cast(dict[str, dict[str, Any]], recipe.parse(path, own=True))
    return {name: _data_set(path, name, entry) for name, entry in found.items()}


def _data_set(path: Path, name: str, entry: dict[str, Any]) -> DataSet:
    _only(path, name, entry, SET_KEYS)
    if (layout := entry.get("layout", LAYOUTS[0])) not in LAYOUTS:
        raise FedvlmError(f"{path}: {name}: layout {layout}; {nearest(layout, LAYOUTS)}")
    lists = {k: tuple(entry[k]) for k in ("domains", "classes") if isinstance(entry.get(k), list)}
    return DataSet(name, **(entry | lists))


def parts(paper: str) -> list[Part]:
    """All tables of a paper, in order; a table on several data sets is several parts."""
    if paper not in published.paper_names():
        raise FedvlmError(f"no paper '{paper}'; {nearest(paper, published.paper_names())}")
    return _parts(paper)


@cache
def _parts(paper: str) -> list[Part]:
    main = published.paper(paper)
    more = PAPERS / "supplement" / f"{paper}.yaml"
    files = {PAPERS / f"{paper}.yaml": main["tables"]}
    if more.exists():
        files[more] = cast(published.Paper, recipe.parse(more, own=True))["tables"]
    return [_part(path, paper, main, cast(dict[str, Any], t)) for path, tables in files.items() for t in tables]


def find(paper: str, table: str, part: str = "") -> list[Part]:
    """The parts of the table with this number ("1", "S5", "fig-5"); with `part`, those of this name."""
    known = parts(paper)
    if not (wanted := numbers_of(table)):
        raise FedvlmError(f"'{table}' is no table; give its number, such as 1, S5 or fig-5 (`reproduce.py {paper}`)")
    found = [p for p in known if wanted & numbers_of(p.table)] or [
        p for p in known if wanted & figures_of(f"{p.caption}; {p.note}")
    ]
    if not found:
        raise FedvlmError(f"{paper} has no table '{table}'; `reproduce.py {paper}` lists them")
    names = list(dict.fromkeys(p.name for p in found))
    if part and part not in names:
        raise FedvlmError(f"part={part}: {found[0].table} of {paper} has none of this name; {nearest(part, names)}")
    return [p for p in found if part in ("", p.name)]


def numbers_of(table: str) -> set[str]:
    """What stands for a table on the command line: "Tables 2 and 3" is 2 or 3, "Figure 3a" is fig3a."""
    text = table.lower()
    figure = "fig" if text.startswith("fig") else ""
    return {
        figure + number for number in re.findall(r"(?:\bs)?\d+[a-z]?", text.removeprefix("figure").removeprefix("fig"))
    }


def figures_of(text: str) -> set[str]:
    """The figures that a caption or note names, whose numbers are those of the table: "(Figures 4, 8 and 9)"."""
    return {n for match in re.findall(r"Figures? [\d\w]+(?:(?:, | and | to )\d\w*)*", text) for n in numbers_of(match)}


def _part(path: Path, paper: str, main: published.Paper, table: dict[str, Any]) -> Part:
    where = f"{table.get('table', '?')} ({table.get('part') or table.get('data', '?')})"
    _only(path, where, table, PART_KEYS)
    for key in ("table", "caption", "data", "measures", "rows"):
        if key not in table:
            raise FedvlmError(f"{path}: {where}: {key}: is missing")
    if table["data"] not in (*data_sets(), AVERAGE):
        raise FedvlmError(f"{path}: {where}: data: {table['data']}; {nearest(table['data'], data_sets())}")
    if (figure := table.get("figure", "")) not in ("", *FIGURES):
        raise FedvlmError(f"{path}: {where}: figure: {figure}; {nearest(figure, FIGURES)}")
    for measure in table["measures"]:
        _check_measure(path, where, measure)
    keys: Settings = table.get("run", {}) | table.get("settings", {}) | {"seeds": table.get("seeds", SEEDS)}
    keys |= {"rounds": table["rounds"]} if "rounds" in table else {}
    over = tuple(map(str, table.get("over", ())))
    own, cited = main.get("own", {}), main["paper"]
    rows = tuple(_row(path, where, r, own, tuple(table["measures"]), bool(over)) for r in table["rows"])
    text = {k: str(table.get(k, "")) for k in ("table", "caption", "data", "backbone", "note", "missing")}
    name = table.get("part", table["data"])
    return Part(
        **text, paper=paper, cited=cited, name=name, keys=keys, measures=tuple(table["measures"]), rows=rows,
        protocol=main.get("protocol", {}), grid=main.get("grid", ""), select=table.get("select", main.get("select", "last")),
        figure=figure, over=over, sets=tuple(table.get("sets", ())),
    )  # fmt: skip


def members(part: Part) -> list[Part]:
    """Of a mean over data sets, the parts that it is the mean of: "average-iid" is that of "cifar10-iid", …"""
    setting = part.name.removeprefix(AVERAGE).lstrip("-")
    tables = [p for p in parts(part.paper) if p.data != AVERAGE and numbers_of(p.table) & set(part.over)]
    wanted = [p for p in tables if p.name == "-".join(filter(None, (p.data, setting)))]
    return [p for p in wanted if p.data in (part.sets or (p.data,))]


def runnable(part: Part) -> int:
    """How many rows can be run, of a mean those of its members."""
    known = {r.title for p in members(part) for r in p.able} if part.over else {r.title for r in part.able}
    return sum(r.title in known for r in part.rows)


def _row(
    path: Path, where: str, row: dict[str, Any], own: Mapping[str, Any], measures: tuple[str, ...], is_mean: bool
) -> Row:
    where = f"{where}: {row.get('title') or row.get('method', '?')}"
    _only(path, where, row, (*ROW_KEYS, *measures))
    method, missing = row.get("method", ""), row.get("missing", "")
    if not (missing or is_mean):
        try:
            _load(method, row.get("on", ""))
        except FedvlmError as error:
            raise FedvlmError(f"{path}: {where}: {error}; or say why it is missing:") from None
    numbers = {m: _number(path, where, m, row[m]) for m in measures if m in row}
    label = " ".join(filter(None, (method, f"on={row['on']}" if "on" in row else "")))
    usual = own.get(label, own.get(method, {}))
    texts = {"title": row.get("title", label), "method": method, "on": row.get("on", ""), "note": row.get("note", "")}
    why = "; ".join(filter(None, (usual.get("why", ""), row.get("why", ""))))
    settings = usual.get("settings", {}) | row.get("settings", {})
    return Row(**texts, settings=settings, why=why, missing=missing, numbers=numbers)


@cache
def _load(method: str, on: str) -> recipe.Recipe:
    return recipe.load(method, on)


def _number(path: Path, where: str, measure: str, value: object) -> Published:
    given = value if isinstance(value, list) else [value]
    found = [float(x) for x in given if isinstance(x, int | float) and not isinstance(x, bool)]
    if len(found) not in (1, 2) or len(found) < len(given):
        raise FedvlmError(f"{path}: {where}: {measure}: {value}; a number, or [mean, std]")
    low, high = limits(measure)
    if not low <= found[0] <= high or (len(found) == 2 and not 0 <= found[1] <= high - low):
        raise FedvlmError(f"{path}: {where}: {measure}: {value} is not between {low:g} and {high:g}")
    return Published(*found)


def limits(measure: str) -> tuple[float, float]:
    """The smallest and the largest number that a measure can be."""
    return OTHER.get(measure.partition("@")[0], (0.0, 100.0))


def _check_measure(path: Path, where: str, measure: str) -> None:
    name, at, place = measure.partition("@")
    if name not in (*PERCENT, *OTHER) or (at and (name not in BY_PLACE or not place)):
        raise FedvlmError(f"{path}: {where}: measures: {measure}; {nearest(name, (*PERCENT, *OTHER))}")


def _only(path: Path, where: str, entry: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in entry:
        if key not in keys:
            raise FedvlmError(f"{path}: {where}: {key}: no such key; {nearest(key, keys)}")
