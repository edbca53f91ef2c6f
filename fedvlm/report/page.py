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
from fedvlm.report.figures import LIGHT, MethodLine, gather, scores_by_client
from fedvlm.report.gains import against_frozen
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
from fedvlm.system.table import Table
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
    any_base_to_novel: bool
    all_base_to_novel: bool
    verdicts: list[str]
    legend: list[charts.LegendEntry]
    charts: dict[str, list[Drawn]]  # by heading
    numbers: list[dict[str, str]]  # of the curves
    clients: list[dict[str, str]]
    matrices: list[Matrix]
    traffic: list[dict[str, str]]
    acted: list[dict[str, str]]
    sent: list[dict[str, str]]
    runs: list[dict[str, str]]
    look: Look | None


class Look(NamedTuple):
    """Predictions on test images."""

    details: Details | None
    examples: list[Shown]
    outsiders: list[Drawn]


def block(title: str, runs: Sequence[RunFolder], options: PageOptions = DEFAULT) -> PageBlock:
    runs = list(runs)
    groups, table, lines = grouped(runs), summarise(runs), gather(runs, LIGHT)
    base_to_novel = [is_base_to_novel(r) for group in groups.values() for r in group]
    return PageBlock(
        title=title,
        facts=run_facts(groups),
        table=table,
        notes=[note for note in table.notes if note != definitions(table.columns)],
        any_base_to_novel=any(base_to_novel),
        all_base_to_novel=all(base_to_novel),
        verdicts=against_frozen(table),
        legend=charts.legend(lines),
        charts=charts.comparison_charts(runs, lines),
        numbers=charts.curve_table(lines, charts.megabytes(runs, lines)),
        clients=table_of_clients(lines),
        matrices=matrices(groups),
        traffic=[bytes_sent(label, records) for label, records in groups.items()],
        acted=[line for r in runs for line in acted(r)],
        sent=[line for r in runs for line in sent(r)],
        runs=listed_runs(runs),
        look=look(runs, lines, options) if options.looks else None,
    )


def look(runs: list[RunFolder], lines: list[MethodLine], options: PageOptions) -> Look:
    folders = {r.record.identity: r for r in runs}
    said = {x.label: [a for r in x.records if (a := answers(folders[r.identity]))] for x in lines}
    methods = [(k, x.label, said[x.label]) for k, x in indexed(lines)]
    return Look(
        details(methods, options.tsne) if options.details else None,
        images_of_runs(methods, folders) if options.images else [],
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


def images_of_runs(methods: list[Method], folders: dict[str, RunFolder]) -> list[Shown]:
    """Example images of the first run of each method that trains."""
    from fedvlm.data.pool import Pools  # late: torch, and only --images needs it
    from fedvlm.report.examples import MOST_CLIENTS, MOST_IMAGES, PER_CLIENT, partner, shown, source_of

    frozen = [a for k, _, runs in methods if k < 0 for a in runs]
    trained = [(label, runs[0]) for k, label, runs in methods if k >= 0 and runs]
    chosen = trained or [(label, runs[0]) for _, label, runs in methods if runs]
    clients = sum(min(MOST_CLIENTS, len(set(a.client.tolist()))) for _, a in chosen)
    most, pools, out = max(1, min(PER_CLIENT, MOST_IMAGES // max(1, clients))), Pools(), []
    for label, own in chosen:
        run = folders[own.record.identity]
        out.append(shown(label, run, own, partner(own, frozen), source_of(run, own, pools), most))
    return out


def table_of_clients(lines: list[MethodLine]) -> list[dict[str, str]]:
    """Test score of each client by method, mean over runs: the shared model's where it was held out, else its own."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for name, value in (entry for r in line.records for entry in scores_by_client(r).items()):
            if value is not None:
                found[name][line.label].append(value)
    return [
        {"client": name} | {x.label: percent_cell(float(np.mean(v[x.label])) if v[x.label] else None) for x in lines}
        for name, v in sorted(found.items())
    ]


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


def acted(run: RunFolder) -> list[dict[str, str]]:
    """What the mechanisms of a run's method did."""

    def row(e: Effect) -> dict[str, str]:
        first = DASH if e.first is None else f"{e.first:.3g}"
        values = {"first round": first, "last round": f"{e.last:.3g}"}
        return {"run": run.folder.name, "what": e.name, **values, "meaning": e.meaning or DASH}

    return [row(e) for e in effects(run)]


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
