"""Differences between the rows of a table, by seed: which row is the best, and whether it beats the frozen model.

Differences are taken seed by seed, because all rows see the same splits; what counts is more than two standard errors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedvlm.system.table import SeedScores, Table

ENOUGH = 2  # standard errors


class Gain(NamedTuple):
    """The gain of one row over another, in percent."""

    mean: float
    error: float  # standard error; NaN for one seed
    seeds: int

    @property
    def clear(self) -> bool:
        return self.mean > ENOUGH * self.error  # never with NaN


def gain(ours: dict[int, float], theirs: dict[int, float]) -> Gain | None:
    """The gain over the seeds that both have; None where there are none."""
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return None
    each = np.array([ours[s] - theirs[s] for s in common])
    error = float(each.std(ddof=1) / len(common) ** 0.5) if len(common) > 1 else float("nan")
    return Gain(float(each.mean()), error, len(common))


def best_row(rows: dict[str, SeedScores], metric: str) -> str:
    """The row that is better than every other row with this metric; "" where none is."""
    found = {name: scores[metric] for name, scores in rows.items() if scores.get(metric)}
    for name, own in found.items():
        gains = [gain(own, other) for label, other in found.items() if label != name]
        if gains and all(g is not None and g.clear for g in gains):
            return name
    return ""


def compared_metrics(rows: dict[str, SeedScores]) -> list[str]:
    """The metrics by which methods are compared: the first of these that rows have."""
    known = {m for scores in rows.values() for m, by_seed in scores.items() if by_seed}
    return next((list(metrics) for metrics in (("hm",), ("C",), ("S", "P")) if known & set(metrics)), [])


def against_frozen(table: Table, base: str = "zero-shot") -> list[str]:
    """Whether each method beats the frozen model on C (base-to-novel: on hm; nobody held out: on S and P), in words."""
    frozen, out = table.by_seed.get(base, {}), list[str]()
    for name, own in table.by_seed.items():
        for metric in compared_metrics(table.by_seed):
            found = gain(own.get(metric, {}), frozen.get(metric, {})) if name != base else None
            if found is None:
                continue
            if found.seeds == 1:
                out.append(f"{name} against {base}: {metric} {found.mean:+.1f} (one seed, so the error is unknown)")
                continue
            verdict = "beats" if found.clear else "does NOT beat"
            out.append(
                f"{name} {verdict} {base} by more than two standard errors ({metric} {found.mean:+.1f} ± "
                f"{found.error:.1f}, {found.seeds} seeds)"
            )
    return out
