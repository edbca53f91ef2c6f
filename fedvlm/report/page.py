"""`fedvlm report`: tables and charts of a set of run folders as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedvlm.config import catalogue
from fedvlm.core.records import MEASURES, DataRecord, RunRecord, Value, value_of
from fedvlm.errors import FedvlmError
from fedvlm.evaluation.protocols import is_base_to_novel, target
from fedvlm.report import charts
from fedvlm.report.answers import answers
from fedvlm.report.axes import Drawn, indexed
from fedvlm.report.blocks import blocks
from fedvlm.report.columns import meanings
from fedvlm.report.details import Details, Method, details
from fedvlm.report.effects import Effect, effects
from fedvlm.report.first_screen import First, first_screen, leader
from fedvlm.report.gains import FROZEN, against_frozen, verdicts
from fedvlm.report.lines import MethodLine, gather
from fedvlm.report.matrices import MOST_COLUMNS, Matrix, matrices, percent_cell
from fedvlm.report.sent import sent
from fedvlm.report.snapshot import Snapshot
from fedvlm.report.tables import (
    DASH,
    Groups,
    backbone_id,
    definitions,
    fair_keys,
    format_value,
    grouped,
    privacy_lines,
    settings,
    split_sizes,
    summarise,
)
from fedvlm.system import files
from fedvlm.system.formatting import size
from fedvlm.system.table import ClientScores, Table
from fedvlm.training.folder import RunFolder

if TYPE_CHECKING:
    from markupsafe import Markup

    from fedvlm.report.examples import Shown


@dataclass(frozen=True)
class PageOptions:
    """What a page shows beside what the records hold."""

    details: bool = False  # predictions on test images (details.py)
    images: bool = False  # thumbnails of them, which are the user's private data (examples.py)
    tsne: bool = False  # image features by t-SNE beside the principal components; needs scikit-learn

    @property
    def looks(self) -> bool:
        return self.details or self.images


DEFAULT = PageOptions()
MOST_RUNS = 60  # listed one by one
TINT = 10  # points of gain or loss from one tint to the next


def page(runs: list[RunFolder], path: Path, options: PageOptions = DEFAULT) -> None:
    files.write(path, html(runs, options))


def html(runs: list[RunFolder], options: PageOptions = DEFAULT) -> str:
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise FedvlmError('the HTML page needs jinja2; install it with `pip install "fedvlm[report]"`') from None
    here = [Snapshot(r) for r in runs]
    if not any(r.done for r in here):
        grouped([*here])  # says which are not finished
    members = {name: [r for r in found if r.done] for name, found in blocks([*here]).items()}
    # autoescape: names of domains, classes and folders are untrusted text
    home = Path(__file__).parent
    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader(home), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    engine.globals |= {"meanings": meanings, "svg": Markup}
    engine.filters["code"] = code
    style, script = ((home / f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    parts = [block(name, found, options) for name, found in members.items() if found]
    return engine.get_template("page.html.j2").render(
        title=distinct(part.title for part in parts) or "no scores yet",
        blocks=parts,
        options=options,
        policy=policy(style, script),
        style=Markup(style),
        script=Markup(script),
        most_columns=MOST_COLUMNS,
        unfinished=[r.progress for r in here if not r.done],
    )


def code(text: str) -> Markup:
    """The text, escaped, with what stands between backticks as code."""
    from markupsafe import Markup

    parts = (Markup("<code>{}</code>" if k % 2 else "{}").format(part) for k, part in enumerate(text.split("`")))
    return Markup("").join(parts)


def policy(style: str, script: str) -> str:
    """Nothing but this style, this script and images that are inside the page."""
    allowed = {"default-src": "'none'", "style-src": sealed(style), "script-src": sealed(script), "img-src": "data:"}
    allowed |= {"base-uri": "'none'", "form-action": "'none'"}
    return "; ".join(f"{name} {value}" for name, value in allowed.items())


def sealed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class PageBlock(NamedTuple):
    """What the page says of one data set with one backbone."""

    title: str
    facts: dict[str, str]
    table: Table
    notes: list[str]  # of the table, without those that explain its columns
    headline: str
    first: First
    warnings: list[str]  # what to know before relying on the answer
    charts: charts.Comparison
    numbers: list[dict[str, str]]  # of the curves
    clients: dict[str, ClientTable]  # by heading
    matrices: list[Matrix]
    traffic: list[dict[str, str]]
    acted: list[dict[str, str]]
    sent: list[dict[str, str]]
    runs: list[dict[str, str]]  # of many, none
    number: int  # of runs
    look: Look | None


class Look(NamedTuple):
    """Predictions on test images."""

    details: Details | None
    examples: list[Shown]
    outsiders: list[Drawn]


def block(title: str, runs: Sequence[RunFolder], options: PageOptions = DEFAULT) -> PageBlock:
    runs = list(runs)
    groups, table, lines = grouped(runs), summarise(runs), gather(runs)
    first, folders = first_screen(table, groups, lines), {r.record.identity: r for r in runs}
    lead = leader(table, verdicts(table))
    warnings = [*table.warnings, *against_frozen(table)[: 0 if table.unlike else None]]
    return PageBlock(
        title=title,
        facts=run_facts(groups),
        table=table,
        notes=[note for note in table.notes if note not in (definitions(table.columns), *table.warnings)],
        headline=table.head[0],
        first=first,
        warnings=warnings,
        charts=charts.comparison(runs, lines, lead, table.by_client),
        numbers=charts.curve_table(lines, charts.megabytes(runs, lines)),
        clients=client_tables(table),
        matrices=matrices(groups),
        traffic=[bytes_sent(label, records) for label, records in groups.items()],
        acted=[line for x in lines for line in acted(x.label, [folders[r.identity] for r in x.records])],
        sent=[line for r in runs for line in sent(r)],
        runs=listed_runs(runs) if len(runs) <= MOST_RUNS else [],
        number=len(runs),
        look=look(runs, lines, lead, options) if options.looks else None,
    )


def look(runs: list[RunFolder], lines: list[MethodLine], lead: str, options: PageOptions) -> Look:
    folders = {r.record.identity: r for r in runs}
    said = {x.label: [a for r in x.records if (a := answers(folders[r.identity]))] for x in lines}
    methods = [(k, x.label, said[x.label]) for k, x in indexed(lines)]
    return Look(
        details(methods, lead, options.tsne) if options.details else None,
        images_of_runs(methods, lead, folders) if options.images else [],
        outsider_charts(lines, folders) if options.details else [],
    )


def outsider_charts(lines: list[MethodLine], folders: dict[str, RunFolder]) -> list[Drawn]:
    """The confidence on outsiders in the first run of each method."""
    asked = [(x.label, folders[x.records[0].identity]) for x in lines if x.records[0].config.get("outsiders")]
    if not asked:
        return []
    from fedvlm.data.pool import Pools  # late: torch
    from fedvlm.report.outsiders import histogram

    pools = Pools()
    return [found for label, run in asked if (found := histogram(label, run, pools))]


def images_of_runs(methods: list[Method], lead: str, folders: dict[str, RunFolder]) -> list[Shown]:
    """Example images of the first run of the method that the page is about."""
    from fedvlm.data.pool import Pools  # late: torch, and only --images needs it
    from fedvlm.report.examples import MOST_CLIENTS, MOST_IMAGES, PER_CLIENT, partner, shown, source_of

    frozen = [a for k, _, runs in methods if k < 0 for a in runs]
    known = [(label, runs[0]) for _, label, runs in methods if runs]
    chosen = [found for found in known if found[0] == lead] or known[-1:]
    clients = sum(min(MOST_CLIENTS, len(set(a.client.tolist()))) for _, a in chosen)
    most, pools, out = max(1, min(PER_CLIENT, MOST_IMAGES // max(1, clients))), Pools(), []
    for label, own in chosen:
        run = folders[own.record.identity]
        out.append(shown(label, run, own, partner(own, frozen), source_of(run, own, pools), most))
    return out


class TintedCell(NamedTuple):
    text: str
    tint: str  # g1 to g3: gain over zero-shot, l1 to l3: loss
    bold: bool


class ClientTable(NamedTuple):
    names: list[str]  # methods
    rows: dict[str, list[TintedCell]]


def client_tables(table: Table) -> dict[str, ClientTable]:
    """Each client by method, as a new client and with its own model; the weakest with the first method on top."""
    out = {}
    for measure, title in (("G", "As a new client"), ("P", "With its own model")):
        methods = [m for m in (str(v["method"]) for v in table.values) if table.by_client.get(m, {}).get(measure)]
        clients = {c for m in methods for c in table.by_client[m][measure]}
        if not methods or len(clients) < 2:
            continue
        first = table.by_client[methods[0]][measure]
        names = sorted(clients, key=lambda c: first.get(c, 0.0))
        if len(names) > charts.MANY:
            names, title = names[: charts.MOST_ROWS], f"{title}, the {charts.MOST_ROWS} weakest of {len(clients)}"
        rows = {c: [tinted(table.by_client, m, measure, c, methods) for m in methods] for c in names}
        out[title] = ClientTable(methods, rows)
    return out


def tinted(known: dict[str, ClientScores], method: str, measure: str, client: str, methods: list[str]) -> TintedCell:
    value = known[method][measure].get(client)
    if value is None:
        return TintedCell(DASH, "", False)
    base = known.get(FROZEN, {}).get(measure, {}).get(client, value)
    gained = 0.0 if method == FROZEN else value - base
    step = min(3, 1 + int(abs(gained) // TINT)) if abs(gained) >= 0.5 else 0
    highest = max(known[m][measure].get(client, -1.0) for m in methods)
    return TintedCell(f"{value:.1f}", f"{'g' if gained > 0 else 'l'}{step}" if step else "", value == highest)


def run_facts(groups: Groups) -> dict[str, str]:
    """What was run, by heading, and the keys of the protocol that do not have their defaults."""
    records = [r for group in groups.values() for r in group]
    data = [r.data for r in records]
    spent = {"privacy": "; ".join(f"{k}: {' / '.join(p)}" for k, v in groups.items() if (p := privacy_lines(v)))}
    protocol: dict[str, list[Value]] = defaultdict(list)
    for key, value in (item for r in records for item in fair_keys(r.config, "last").items()):
        protocol[key].append(value)
    usual = {k.name: [k.default] for k in catalogue.run_keys().values() if "varies" not in k.traits}
    chosen = {k: distinct(map(format_value, v)) for k, v in protocol.items() if k in usual and v != len(v) * usual[k]}
    return chosen | {
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


def acted(label: str, runs: Sequence[RunFolder]) -> list[dict[str, str]]:
    """What the mechanisms of a method did: means over its runs."""
    found: dict[str, list[Effect]] = defaultdict(list)
    for run in runs:
        for effect in effects(run):
            found[effect.name].append(effect)
    rows = []
    for name, each in found.items():
        firsts = [e.first for e in each if e.first is not None]
        first = f"{np.mean(firsts):.3g}" if firsts else DASH
        values = {"first round": first, "last round": f"{np.mean([e.last for e in each]):.3g}"}
        rows.append({"method": label, "what": name, **values, "meaning": each[0].meaning or DASH})
    return rows


def classes(data: DataRecord) -> str:
    novel = len(data.novel)
    return f"{len(data.classes)} classes" + (f" trained on and {novel} kept from everybody" if novel else "")


def distinct(values: Iterable[object]) -> str:
    """Each distinct value once, in order of appearance."""
    return ", ".join(dict.fromkeys(map(str, values)))


def bytes_sent(label: str, records: list[RunRecord]) -> dict[str, str]:
    """Bytes sent in training, all clients together; evaluation is not counted."""
    results = [r.finished for r in records]
    line = {"method": label, "clients per round": distinct(r.last.get("asked", DASH) for r in results)}
    for way, counts in {"up": [r.bytes_up for r in results], "down": [r.bytes_down for r in results]}.items():
        total = float(np.mean(counts))
        line[f"{way} per round"] = size(total / max(1, results[0].last["round"]))
        line[f"{way} in total"] = size(total)
    return line


def listed_runs(runs: list[RunFolder]) -> list[dict[str, str]]:
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
        line |= {m: percent_cell(found[m]) for m in metrics}
        out.append(line | {"settings that differ": differing or DASH})
    return out
