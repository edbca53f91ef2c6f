"""Methods as lines of charts: their scores by round, their numbers, which are colours and marks, and their names.

The scores come from the same function as those of the tables (`by_seed`; last round, test split)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedvlm.config import catalogue
from fedvlm.config.families import FAMILIES, family
from fedvlm.core.records import MEASURES, RoundRecord, RunRecord
from fedvlm.evaluation.protocols import by_seed
from fedvlm.report.gains import FROZEN
from fedvlm.report.svg import PER_FAMILY
from fedvlm.report.tables import grouped
from fedvlm.training.folder import RunFolder

PLOTTED = ("G", "P", *MEASURES)
MARKS = 14  # seven shapes, filled and hollow


@dataclass(frozen=True)
class MethodLine:
    """One method: its scores, and the number that says how it is drawn."""

    label: str
    records: list[RunRecord]
    rounds: list[int]
    scores: dict[str, np.ndarray]  # metric → [rounds, seeds] in percent, NaN where there is no such model
    number: int = -1  # PER_FAMILY × its family + its mark; the frozen model's is negative

    @property
    def frozen(self) -> bool:
        return is_frozen(self.records)

    def over(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard error over seeds, by round."""
        values = self.scores[metric]
        seeds = values.shape[1]
        mean = values.mean(1) if seeds else np.full(len(values), np.nan)
        return mean, values.std(1, ddof=1) / seeds**0.5 if seeds > 1 else np.zeros(len(values))

    def last(self, metric: str) -> tuple[float, float]:
        """Mean and standard error over seeds in the last round."""
        mean, error = self.over(metric)
        return float(mean[-1]), float(error[-1])


def is_frozen(records: list[RunRecord]) -> bool:
    return records[0].method.name == FROZEN


def gather(runs: list[RunFolder]) -> list[MethodLine]:
    """One line per method, the frozen model first; every round is scored as the tables score the last."""
    scored = {r.record.identity: {x["round"]: x for x in r.rounds() if "personal" in x} for r in runs}
    groups, lines = grouped(runs), list[MethodLine]()
    numbers = numbers_of(groups)
    for label, records in sorted(groups.items(), key=lambda g: not is_frozen(g[1])):
        by_round = [scored[r.identity] or {r.finished.last["round"]: r.finished.last} for r in records]
        rounds = sorted(set.intersection(*map(set, by_round)))
        table = []
        for k in rounds:
            then = [ended_with(record, found[k]) for record, found in zip(records, by_round, strict=True)]
            table.append([[s.get(m) for m in PLOTTED] for s in by_seed(then).values()])
        values = 100 * np.array(table, float).reshape(len(rounds), -1, len(PLOTTED))
        scores = {m: values[..., j] for j, m in enumerate(PLOTTED)}
        lines.append(MethodLine(label, records, rounds, scores, numbers[label]))
    return lines


def numbers_of(groups: dict[str, list[RunRecord]]) -> dict[str, int]:
    """The number of each method, which is its colour and mark: the same everywhere, and the next one that is free where
    another row has it."""
    known = catalogue.load().methods
    families = {m.name: family(m.name, *m.parts.split(" × ")[::2]) for m in known}

    def place(label: str) -> int:
        """The place of the method among those of its family."""
        name, about = groups[label][0].method.name, family_of(groups[label][0])
        marks = [n for n, found in families.items() if found == about]
        return marks.index(name) if name in marks else len(marks)

    found: dict[str, int] = {}
    for label in sorted(groups, key=place):
        if is_frozen(groups[label]):
            found[label] = -1 - sum(k < 0 for k in found.values())
            continue
        home = PER_FAMILY * list(FAMILIES).index(family_of(groups[label][0]))
        tries = [home + (place(label) + k) % MARKS for k in range(MARKS)]
        found[label] = next((k for k in tries if k not in found.values()), tries[0])
    return found


def family_of(record: RunRecord) -> str:
    """That of the method in the catalogue; of other methods and networks, by what they train."""
    about = record.method
    built_in = {m.name: m.parts.split(" × ") for m in catalogue.load().methods} if not about.on + about.path else {}
    adapter, _, merge = built_in.get(about.name, [record.adapter.name, "", record.merge.name])
    return family(about.name, adapter, merge)


def ended_with(record: RunRecord, last: RoundRecord) -> RunRecord:
    """The record with this round as the last."""
    return replace(record, result=replace(record.finished, last=last))


def spaced(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Heights of labels: as close as possible to the wanted ones, at least `gap` apart and between `low` and `high`
    (isotonic regression of y − rank·gap)."""
    order = [int(k) for k in np.argsort(wanted, kind="stable")]
    blocks: list[tuple[float, int]] = []  # mean, number of members
    for rank, k in enumerate(order):
        mean, count = wanted[k] - rank * gap, 1
        while blocks and blocks[-1][0] > mean:
            other, members = blocks.pop()
            mean, count = (mean * count + other * members) / (count + members), count + members
        blocks.append((mean, count))
    flat = np.repeat([b[0] for b in blocks], [b[1] for b in blocks])
    inside = np.clip(flat, low, max(low, high - gap * (len(order) - 1))) + gap * np.arange(len(order))
    return [float(inside[order.index(k)]) for k in range(len(order))]


def shorten(label: str, most: int = 26) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
