"""`fedvlm report`: tables and figures of a set of run folders as one self-contained HTML file."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedvlm import files
from fedvlm.errors import FedvlmError
from fedvlm.evaluate.protocols import is_base_to_novel, row, target
from fedvlm.folder import RunFolder
from fedvlm.records import MEASURES, DataRecord, RunRecord, value_of
from fedvlm.report import fairness
from fedvlm.report.blocks import blocks
from fedvlm.report.effects import effects
from fedvlm.report.figures import DARK, LIGHT, Picture, Theme, drawn, png
from fedvlm.report.gains import against
from fedvlm.report.sent import sent
from fedvlm.report.table import Table
from fedvlm.report.tables import (
    DASH,
    Groups,
    backbone_id,
    format_value,
    grouped,
    privacy_lines,
    settings,
    split_sizes,
    summarise,
)
from fedvlm.units import size

MOST_COLUMNS = 24  # of a matrix of accuracies; wider ones are unreadable and left out


class Cell(NamedTuple):
    text: str
    heat: float  # 0 to 1 on the colour scale
    held_out: bool


class Matrix(NamedTuple):
    """Test accuracy of one method: a row per held-out target, a column per domain (or client)."""

    label: str
    names: list[str]
    rows: dict[str, list[Cell]]


def page(runs: list[RunFolder], path: Path) -> None:
    try:
        import jinja2
    except ImportError:
        raise FedvlmError('the HTML page needs jinja2; install it with `pip install "fedvlm[report]"`') from None
    if not any(r.done for r in runs):
        grouped(runs)  # says which are not finished
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    # autoescape: names of domains, classes and folders are untrusted text
    engine = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    parts = [block(name, members) for name, members in blocks(runs).items() if any(r.done for r in members)]
    html = engine.get_template("page.html.j2").render(
        title=distinct(part.title for part in parts),
        blocks=parts,
        most_columns=MOST_COLUMNS,
        unfinished=[r.folder.name for r in runs if not r.done],
    )
    files.write(path, html)


class Block(NamedTuple):
    """What the page says of one data set with one backbone."""

    title: str
    facts: dict[str, str]
    table: Table
    any_base_to_novel: bool
    all_base_to_novel: bool
    verdicts: list[str]
    scores: dict[str, str]  # theme → picture
    fairness: dict[str, str]
    matrices: list[Matrix]
    traffic: list[dict[str, str]]
    acted: list[dict[str, str]]
    sent: list[dict[str, str]]
    runs: list[dict[str, str]]


def block(title: str, runs: list[RunFolder]) -> Block:
    groups, table = grouped(runs), summarise(runs)
    base_to_novel = [is_base_to_novel(r) for group in groups.values() for r in group]
    return Block(
        title=title,
        facts=facts(groups),
        table=table,
        any_base_to_novel=any(base_to_novel),
        all_base_to_novel=all(base_to_novel),
        verdicts=against(table),
        scores={"light": picture(drawn, runs, LIGHT), "dark": picture(drawn, runs, DARK)},
        fairness={"light": picture(fairness.drawn, runs, LIGHT), "dark": picture(fairness.drawn, runs, DARK)},
        matrices=matrices(groups),
        traffic=[traffic(label, records) for label, records in groups.items()],
        acted=[line for r in runs for line in acted(r)],
        sent=[line for r in runs for line in sent(r)],
        runs=listing(runs),
    )


def facts(groups: Groups) -> dict[str, str]:
    """What was run, by heading."""
    records = [r for group in groups.values() for r in group]
    data = [r.data for r in records]
    spent = {"privacy": "; ".join(f"{k}: {' / '.join(p)}" for k, v in groups.items() if (p := privacy_lines(v)))}
    return {
        "data": distinct(f"{d.name}: " + (f"{d.images:,} examples, " if d.images else "") + classes(d) for d in data),
        "domains": distinct(", ".join(d.domains) for d in data),
        "backbone": distinct(map(backbone_id, records)),
        "split": distinct("/".join(split_sizes(r)) + " % train/val/test" for r in records),
        "held out": distinct(map(target, records)),
        "seeds": distinct(r.seed for r in records),
        "rounds": "; ".join(f"{k}: {distinct(r.finished.last['round'] for r in v)}" for k, v in groups.items()),
        "versions": distinct(", ".join(f"{k} {v}" for k, v in r.versions.items() if k != "commit") for r in records),
        "commit": distinct(r.versions.get("commit") or "unknown" for r in records),
        **{k: v for k, v in spent.items() if v},
    }


def acted(run: RunFolder) -> list[dict[str, str]]:
    """What the mechanisms of a run's method did."""
    return [
        {"run": run.folder.name, "what": e.name, "first round": f"{e.first:.3g}", "last round": f"{e.last:.3g}"}
        | {"meaning": e.meaning or DASH}
        for e in effects(run)
    ]


def classes(data: DataRecord) -> str:
    novel = len(data.novel)
    return f"{len(data.classes)} classes" + (f" trained on and {novel} kept from everybody" if novel else "")


def distinct(values: Iterable[object]) -> str:
    """Each distinct value once, in order of appearance."""
    return ", ".join(dict.fromkeys(map(str, values)))


def percent(value: float | None) -> str:
    return DASH if value is None or np.isnan(value) else f"{100 * value:.1f}"


def picture(draw: Callable[[list[RunFolder], Theme], Picture], runs: list[RunFolder], theme: Theme) -> str:
    """The figure as a PNG in base64."""
    return base64.b64encode(png(draw(runs, theme), theme)).decode()


def matrices(groups: Groups) -> list[Matrix]:
    """One matrix per method, all on one colour scale."""
    by_method = {label: accuracies(records) for label, records in groups.items()}
    known = [v for cells in by_method.values() for v, _ in cells.values() if not np.isnan(v)]
    low, span = (min(known), max(known) - min(known) or 1.0) if known else (0.0, 1.0)
    out = []
    for label, cells in by_method.items():
        names = sorted({name for _, name in cells})
        rows: dict[str, list[Cell]] = {held: [] for held in sorted({held for held, _ in cells})}
        for held, name in ((held, name) for held in rows for name in names):
            value, held_out = cells.get((held, name), (np.nan, False))
            heat = round(float(np.nan_to_num((value - low) / span)), 3)
            rows[held].append(Cell(percent(value), heat, held_out))
        if 0 < len(names) <= MOST_COLUMNS:
            out.append(Matrix(label, names, rows))
    return out


def accuracies(records: list[RunRecord]) -> dict[tuple[str, str], tuple[float, bool]]:
    """(held-out target, tested domain) → test accuracy as mean over seeds, and whether that domain was held out."""
    cells: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
    for record in records:
        for name, entry in row(record).items():
            cells[target(record), name].append(entry)
    return {key: (float(np.mean([v for v, _ in found])), found[0][1]) for key, found in cells.items()}


def traffic(label: str, records: list[RunRecord]) -> dict[str, str]:
    """Bytes sent in training, all clients together; evaluation is not counted."""
    results = [r.finished for r in records]
    line = {"method": label, "clients per round": distinct(r.last.get("asked", DASH) for r in results)}
    for way, counts in {"up": [r.bytes_up for r in results], "down": [r.bytes_down for r in results]}.items():
        total = float(np.mean(counts))
        line[f"{way} per round"] = size(total / max(1, results[0].last["round"]))
        line[f"{way} in total"] = size(total)
    return line


def listing(runs: list[RunFolder]) -> list[dict[str, str]]:
    """The finished runs, each with the settings that are not the same for all of them."""
    finished = [(r.folder.name, record) for r in runs if (record := r.record).result is not None]
    by_run = [settings(record) for _, record in finished]
    values = {k: {format_value(s[k]) for s in by_run if k in s} for s in by_run for k in s}
    base_to_novel = [is_base_to_novel(record) for _, record in finished]
    metrics = [*(() if all(base_to_novel) else ("G", "S", "P")), *(MEASURES if any(base_to_novel) else ())]
    out = []
    for (name, record), own in zip(finished, by_run, strict=True):
        differing = ", ".join(f"{k}={format_value(v) or 'none'}" for k, v in own.items() if len(values[k]) > 1)
        method, held = record.method.label, target(record)
        line = {"folder": name, "method": method, "held out": held, "seed": str(record.seed)}
        last = record.finished.last
        found = {m: value_of(last, m) for m in metrics} | {"S": last.get("shared", {}).get("test")}
        line |= {m: percent(found[m]) for m in metrics}
        out.append(line | {"settings that differ": differing or DASH})
    return out
