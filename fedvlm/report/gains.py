"""The one rule by which a method is called best, level with the best, or above the frozen model.

Differences between two rows are taken seed by seed, because all rows see the same splits. Their interval is
mean ± t(97.5 %, n − 1) · s/√n over n seeds. A row is *best* with a measure if its interval against every other row is above
0 (no correction is needed: all must hold); otherwise the rows whose interval against the highest contains 0 are *level*
with it. Below three seeds nobody is best. Which of k methods are above the frozen model is decided with Holm's
correction. Seeds split the same images anew, so even this is optimistic: on how many clients the highest row is above the
next stands beside it. `benchmarks/best.py` checks the rule by simulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np

from fedvlm.report.columns import DEFINED
from fedvlm.system.table import SeedScores, Table

ENOUGH = 3  # seeds; with fewer nothing is called best
LEVEL = 0.05  # probability that a difference is named where there is none
FROZEN = "zero-shot"  # the method that is the frozen model
GOALS = (("novel", "base"), ("G", "P"))  # the measures by which methods are compared, of base-to-novel and else


class Gain(NamedTuple):
    """The gain of one row over another, in percent."""

    mean: float
    error: float  # standard error; NaN for one seed
    seeds: int

    @property
    def interval(self) -> tuple[float, float]:
        """Holds the true gain with probability 95 %, over seeds; unlimited for one seed."""
        half = quantile(self.seeds - 1) * self.error if self.seeds > 1 else math.inf
        return self.mean - half, self.mean + half

    @property
    def above(self) -> bool:
        return self.seeds >= ENOUGH and self.interval[0] > 0

    @property
    def below(self) -> bool:
        return self.seeds >= ENOUGH and self.interval[1] < 0

    @property
    def chance(self) -> float:
        """How probable a mean at least as far from 0 is where there is no difference; 1 with too few seeds."""
        if self.seeds < ENOUGH:
            return 1.0
        return outside(self.mean / self.error, self.seeds - 1) if self.error else float(self.mean == 0)

    def __str__(self) -> str:
        if self.seeds == 1:
            return f"{self.mean:+.1f}, one seed"
        low, high = self.interval
        return f"{self.mean:+.1f}, {low:.1f} to {high:.1f}"


class Verdict(NamedTuple):
    """How the rows of a table compare with one measure."""

    measure: str
    highest: str  # the row with the highest mean
    best: bool  # whether it is above every other row
    level: list[str]  # otherwise the rows that are level with it, the highest first; empty with fewer than three seeds
    rival: str  # the row with the next mean; "" where there is no other
    gain: Gain | None  # of the highest over the rival
    clients: tuple[int, int]  # on how many clients the highest is above the rival, of how many; (0, 0): not known
    seeds: int


def gain(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Gain | None:
    """The gain over the seeds that both have; None where there are none."""
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return None
    each = np.array([ours[s] - theirs[s] for s in common])
    error = float(each.std(ddof=1) / len(common) ** 0.5) if len(common) > 1 else float("nan")
    return Gain(float(each.mean()), error, len(common))


def verdict(
    rows: Mapping[str, SeedScores], measure: str, by_client: Mapping[str, Mapping[str, Mapping[str, float]]] = {}
) -> Verdict | None:
    """The rows with this measure compared; None where none has it. by_client: row → measure → client → percent."""
    found = {name: scores[measure] for name, scores in rows.items() if scores.get(measure)}
    if not found:
        return None
    highest, *others = sorted(found, key=lambda name: -float(np.mean([*found[name].values()])))
    gains = {name: gain(found[highest], found[name]) for name in others}
    best = bool(others) and all(g is not None and g.above for g in gains.values())
    level = [highest, *(name for name, g in gains.items() if g is None or not g.above)]
    rival, seeds = others[0] if others else "", len(found[highest])
    ours, theirs = (by_client.get(name, {}).get(measure, {}) for name in (highest, rival))
    common = ours.keys() & theirs.keys()
    clients = sum(ours[c] > theirs[c] for c in common), len(common)
    enough = seeds >= ENOUGH and len(level) > 1
    return Verdict(measure, highest, best, level if enough else [], rival, gains.get(rival), clients, seeds)


def compared_measures(rows: Mapping[str, SeedScores]) -> list[str]:
    """The goals that any of these rows has, of the first protocol that fits."""
    known = {m for scores in rows.values() for m, by_seed in scores.items() if by_seed}
    return next((found for goals in GOALS if (found := [m for m in goals if m in known])), [])


def verdicts(table: Table) -> list[Verdict]:
    """The comparison of a table's rows by each goal; nothing where its rows may not be compared, or there is one."""
    if table.unlike:
        return []
    found = [verdict(table.by_seed, m, table.by_client) for m in compared_measures(table.by_seed)]
    return [v for v in found if v and v.rival]


def above_frozen(rows: Mapping[str, SeedScores], measure: str, base: str = FROZEN) -> dict[str, tuple[Gain, bool]]:
    """The gain of each row over the frozen model, and whether it is above it (Holm over the rows)."""
    theirs = rows.get(base, {}).get(measure, {})
    gains = {n: g for n, scores in rows.items() if n != base and (g := gain(scores.get(measure, {}), theirs))}
    out, rejected = dict[str, tuple[Gain, bool]](), True
    for k, name in enumerate(sorted(gains, key=lambda n: gains[n].chance)):
        rejected = rejected and gains[name].chance <= LEVEL / (len(gains) - k)
        out[name] = gains[name], rejected and gains[name].mean > 0
    return {name: out[name] for name in gains}


def against_frozen(table: Table, base: str = FROZEN) -> list[str]:
    """Which methods are above the frozen model with each goal, in words; nothing where the table has none."""
    lines = []
    for measure in compared_measures(table.by_seed):
        found = above_frozen(table.by_seed, measure, base)
        above = ", ".join(name for name, (_, yes) in found.items() if yes)
        rest = ", ".join(f"{name} ({g})" for name, (g, yes) in found.items() if not yes)
        parts = [f"above {base}: {above}"] * bool(above) + [f"not shown to be above {base}: {rest}"] * bool(rest)
        lines += [f"{DEFINED[measure].word}: {'; '.join(parts)}"] * bool(parts)
    return lines


def outside(t: float, freedom: int) -> float:
    """The probability that |T| ≥ |t| of Student's distribution (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(abs(t), math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return max(0.0, 1 - inside)


@cache
def quantile(freedom: int, tail: float = LEVEL) -> float:
    """The t that |T| exceeds with probability `tail`."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if outside(middle, freedom) > tail else (low, middle)
    return high
