"""From a table's manifest to runs and back: what is missing is run by the machinery of `bench`, ours stand beside theirs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, cast

from fedvlm import api
from fedvlm.api import Runs
from fedvlm.config import catalogue
from fedvlm.config.config import Setup, resolve
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError, nearest
from fedvlm.parts.registry import AXES
from fedvlm.predict import questions
from fedvlm.report.tables import DASH, check_one_rule, fair_keys, rule, scored_on
from fedvlm.system.formatting import counted
from fedvlm.system.table import Table, Value
from fedvlm.training import planning
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.planning import single_runs
from fedvlm.training.processes import RunsFailed
from papers import protocol
from papers.data import Found, other_backbone
from papers.manifest import CURVES, PERCENT, Part, Published, Row, data_sets, members
from papers.measures import half_width, seed_values

MEANT = set(protocol.MEANING)
COLUMNS = ["row", "measure", "ours", "95 %", "paper", "difference"]


@dataclass(frozen=True)
class Planned:
    """A row with its runs; `reason` says why there are none."""

    row: Row
    setup: Setup | None
    jobs: tuple[PlannedRun, ...] = ()
    reason: str = ""

    @property
    def waiting(self) -> list[PlannedRun]:
        return [j for j in self.jobs if not ((j.folder / "run.json").exists() and RunFolder(j.folder).done)]

    @property
    def finished(self) -> list[RunFolder]:
        waiting = [j.folder for j in self.waiting]
        return [RunFolder(j.folder) for j in self.jobs if j.folder not in waiting]


class RowCost(NamedTuple):
    row: Row
    runs: int  # that are missing
    of: int
    rounds: int  # of a run
    megabytes: float  # up and down, of the missing runs
    seconds: float  # one after the other


def plan(
    part: Part, found: Found, given: Mapping[str, object], pools: Pools, methods: Collection[str] = ()
) -> list[Planned]:
    """Every row with its runs; `given` are keys that replace the manifest's, `methods` the only rows that are run."""
    rows = [r for r in part.rows if not methods or r.method in methods]
    if not rows:
        known = dict.fromkeys(r.method for r in part.rows if r.method)
        raise FedvlmError(
            f"methods={','.join(methods)}: {part.title} has no such row; {nearest(next(iter(methods)), known)}"
        )
    out = [_planned(part, row, found, given, pools) for row in rows]
    rules = {
        p.row.title: [fair_keys(p.setup.settings()) | {"backbone": p.setup.config.backbone}] for p in out if p.setup
    }
    check_one_rule(rules, free_keys(part))
    return out


def _planned(part: Part, row: Row, found: Found, given: Mapping[str, object], pools: Pools) -> Planned:
    if reason := part.missing or row.missing:
        return Planned(row, None, reason=reason)
    setup = api.chosen(row.method, keys_of(part, row, found, given))
    try:
        pool = pools.encode(setup)
        jobs = [PlannedRun(one, pool) for one in single_runs(setup, pool)]
        _ = jobs[0].method
    except FedvlmError as error:  # this data or backbone does not suit the method; the other rows may go on
        return Planned(row, None, reason=f"cannot be run here: {error}")
    return Planned(row, setup, tuple(jobs))


def keys_of(part: Part, row: Row, found: Found, given: Mapping[str, object]) -> dict[str, object]:
    """The keys of a row's runs."""
    axes = {axis: row.settings[axis] for axis in AXES if axis in row.settings}
    made = resolve(row.method, {"on": row.on, **axes}).parts
    has = {k for axis in AXES for k in made[axis].settings}
    keys: dict[str, object] = {k: v for k, v in part.protocol.items() if k in has or k in catalogue.run_keys()}
    keys |= {**part.keys, **row.settings, **given, "data": found.path}
    keys |= {"on": row.on} if row.on else {}
    keys |= {k: v for k, v in found.smaller.items() if k in has}
    keys |= {"outsiders": found.outsiders} if found.outsiders else {}
    if isinstance(keys.get("unseen"), list):
        keys["unseen"] = [found.names.get(u, u) for u in cast(list[str], keys["unseen"])]
    if resolve(row.method, {k: v for k, v in keys.items() if k != "rounds"}).config.rounds == 0:
        keys.pop("rounds", None)  # a method that trains nothing
    return keys


def unlike_others(part: Part, setups: Mapping[str, Setup]) -> dict[str, dict[str, str]]:
    """Of each row, in which keys its numbers mean something else than those of most rows."""
    named = [set(r.settings) for r in part.rows if r.title in setups and setups[r.title].config.rounds]
    meant = {title: protocol.meaning(s) for title, s in setups.items()}
    return protocol.unlike(meant, set.intersection(*named, MEANT), [r.title for r in part.rows if r.why])


def free_keys(part: Part) -> set[str]:
    """Keys in which rows differ by design: those that a row's settings name."""
    free = {key for row in part.rows for key in row.settings}
    return free | ({"data"} if "domains" in free else set())


def costs(planned: list[Planned]) -> list[RowCost]:
    """What the missing runs of each row will send and take; a few batches are timed."""
    out = []
    for p in planned:
        if p.setup is None:
            continue
        config, waiting = p.setup.config, p.waiting
        if not waiting:
            out.append(RowCost(p.row, 0, len(p.jobs), config.rounds, 0.0, 0.0))
            continue
        cost = planning.estimate(waiting[0])
        times = len(waiting) * config.rounds
        out.append(
            RowCost(
                p.row,
                len(waiting),
                len(p.jobs),
                config.rounds,
                times * (cost.up + cost.down) / 1e6,
                times * cost.seconds,
            )
        )
    return out


def execute(planned: list[Planned], at_once: int) -> str:
    """Runs what is missing; what went wrong, in words, or ""."""
    jobs = {j.folder: j for p in planned for j in p.jobs}
    try:
        api.execute(list(jobs.values()), at_once)
    except RunsFailed as error:
        return str(error)
    return ""


def ask(part: Part, planned: list[Planned], found: Found) -> None:
    """Asks the finished runs what the table's measures@PLACE need and nobody asked before; nothing is trained for it."""
    for run in (run for p in planned for run in p.finished):
        known = {e.asked for e in questions.read_answers(run.folder)}
        kinds = [k for k in part.places("cacc") if k not in known]
        sets = [path for path in found.outsider_sets.values() if path not in known]
        if kinds or sets:
            api.Run(run).evaluate(outsiders=sets, corrupt=kinds)


def draw(part: Part, planned: list[Planned], place: str) -> None:
    """Writes the picture as a PNG file: measures by round, or the models of the first seed of each row."""
    from fedvlm.predict.finished import Finished
    from fedvlm.report import figures
    from papers import models

    if part.figure == CURVES:
        return draw_curves(part, [planned], place)
    panel = import_module(f"papers.{part.figure}").panel
    found = []
    for p in planned:
        done = {run.folder for run in p.finished}
        jobs = [j for j in p.jobs if j.folder in done and j.setup.config.seed == p.jobs[0].setup.config.seed]
        for job in jobs:
            model = Finished.of(RunFolder(job.folder), job.setup, job.pool)
            held_out = f", {', '.join(job.setup.config.unseen)}" if len(jobs) > 1 else ""
            found.append(models.Named(p.row.title + held_out, model))
    if found:
        figures.write_picture(models.draw(panel, found), Path(place))


def draw_curves(part: Part, members: Sequence[list[Planned]], place: str) -> None:
    """The part's measures by round; of a mean over data sets, `members` are their rows."""
    from fedvlm.report import figures
    from papers import curves

    rows = {
        row.title: [p.finished for planned in members for p in planned if p.row.title == row.title] for row in part.rows
    }
    measures = {m: 100.0 if m in PERCENT else 1.0 for m in part.measures}
    figures.write_picture(curves.draw(rows, measures), Path(place))


def runs_of(planned: list[Planned]) -> Runs:
    return Runs([api.Run(run) for p in planned for run in p.finished])


def compared(part: Part, planned: list[Planned], found: Found) -> Table:
    """Ours beside the paper's, a line for each row and measure."""
    done = {p.row.title: p.finished for p in planned}
    rules = {title: [rule(run.record, part.select) for run in runs] for title, runs in done.items() if runs}
    check_one_rule(rules, free_keys(part))
    table = Table(COLUMNS, [], notes(part, planned, found))
    table.dim = ["paper"] if backbone_note(part, planned) else []
    for p in planned:
        title = p.row.title
        for measure in part.measures:
            paper = p.row.numbers.get(measure)
            ours = seed_values(measure, done[p.row.title], found.names, part.select)
            if ours or paper:
                table.values.append(_values(p.row.title, measure, ours, paper))
                table.rows.append(_cells(table.values[-1], title, measure))
                title = ""  # once for each row
    return table


def mean_over(part: Part, results: list[tuple[Part, list[Planned], Found]]) -> Table:
    """A mean over data sets beside the paper's: of each row, over the members that have it and whose runs are finished."""
    table = Table(COLUMNS, [], [f"mean over {', '.join(member.name for member, *_ in results)}"])
    asked = len(members(part))
    if len(results) < asked:
        table.notes.append(f"{len(results)} of {asked} data sets are there: the paper's column is no target")
        table.dim = ["paper"]
    for row in part.rows:
        title = row.title
        for measure in part.measures:
            each = [
                values
                for member, planned, found in results
                for p in planned
                if p.row.title == row.title and (values := seed_values(measure, p.finished, found.names, member.select))
            ]
            alike = len({len(values) for values in each}) == 1
            ours = [fmean(seed) for seed in zip(*each, strict=True)] if alike else []
            if ours or measure in row.numbers:
                table.values.append(_values(row.title, measure, ours, row.numbers.get(measure)))
                table.rows.append(_cells(table.values[-1], title, measure))
                title = ""
    return table


def _values(title: str, measure: str, ours: list[float], paper: Published | None) -> dict[str, Value]:
    mean = fmean(ours) if ours else None
    return {
        "row": title,
        "measure": measure,
        "ours": mean,
        "half_width": half_width(ours),
        "seeds": len(ours),
        "paper": paper.mean if paper else None,
        "paper_std": paper.std if paper else None,
        "difference": None if mean is None or paper is None else mean - paper.mean,
    }


def _cells(value: dict[str, Value], title: str, measure: str) -> dict[str, str]:
    def shown(key: str, sign: str = "") -> str:
        number = value[key]
        if not isinstance(number, int | float):
            return DASH
        return format(number, f"{sign}.2f") if measure.partition("@")[0] in PERCENT else format(number, f"{sign}.3g")

    paper = shown("paper") + (f" ± {shown('paper_std')}" if value["paper_std"] is not None else "")
    half = shown("half_width")
    return {
        "row": title,
        "measure": measure,
        "ours": shown("ours"),
        "95 %": half if half == DASH else f"± {half}",
        "paper": paper,
        "difference": shown("difference", "+"),
    }


def title(part: Part, planned: list[Planned], found: Found, given: Mapping[str, object]) -> list[str]:
    """What the table is, and in what it is not the paper's."""
    out = [f"{part.title}, {data_sets()[part.data].title}: {part.caption}"]
    if other := backbone_note(part, planned):
        out.append(f"with {other}, not the paper's {part.backbone}: the paper's column is no target")
    elsewhere = {"backbone", *catalogue.for_purpose("engine", "output")}  # the first has a line of its own
    changed = [f"{k}={v}" for k, v in given.items() if k not in elsewhere]
    if changed:
        out.append(f"not as published: {' '.join(changed)}")
    if found.differs:
        out.append(f"the data has {found.differs}")
    return out


def backbone_note(part: Part, planned: list[Planned]) -> str:
    used = [other for p in planned if p.setup and (other := other_backbone(part, p.setup))]
    return used[0] if used else ""


def notes(part: Part, planned: list[Planned], found: Found) -> list[str]:
    setup = next((p.setup for p in planned if p.setup), None)
    out = [f"{p.row.title}: {p.reason}" for p in planned if p.reason]
    lost = [name for name in part.places("auroc", "fpr95") if name not in found.outsider_sets]
    out += [f"no folder {name} in or beside the data: its columns are empty" for name in lost]
    if setup:
        config = setup.config
        seeds, split = ", ".join(map(str, config.seeds or (config.seed,))), "/".join(f"{s:g}" for s in config.split)
        rounds = config.rounds or next((p.setup.config.rounds for p in planned if p.setup and p.setup.config.rounds), 0)
        scored = "last round" if part.select == "last" else "round chosen on validation"
        done = [run.record for p in planned for run in p.finished]
        more = [f"scored on: {scored_on(done[0])}"] if done else []
        budget = f"{counted(rounds, 'round')}, split {split}, seeds {seeds}"
        out.append(
            f"same protocol for all rows: {', '.join([budget, *more, scored])}; "
            "ours: mean over seeds, and the half width of its 95 % interval"
        )
    why = {p.row.title: p.row.why for p in planned}
    for title, keys in unlike_others(part, {p.row.title: p.setup for p in planned if p.setup}).items():
        out.append(
            f"{title} differs: {' '.join(f'{k}={v}' for k, v in keys.items())} ({why[title] or 'no reason is given'})"
        )
    out += [f"learning rates of the paper: {part.grid}"] if part.grid else []
    return out + ([f"paper: {part.note}"] if part.note else [])
