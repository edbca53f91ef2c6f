"""FAA, FFT-GP's server (Algorithm 1): solve for the weights that make every client's gap the same.

The gap is modelled as linear in a client's weight, with slope K_i = (a′_i − a_i)/(G_i − G′_i) measured by one
perturbation of the weights (GA's). Then a_i = a_i + K_i (G_i − G*) with G* = ΣK_iG_i/ΣK_i (Eqs. 9–11). Eq. 10 can leave
the simplex; our reading is a_i = max(0, a_i + K_i (G_i − g)) with g such that Σa = 1: the same where Eq. 10 is
feasible, and otherwise the weights that minimise the largest gap. A slope that is not positive or not finite is
replaced by the median of the others; without any usable slope GA's weights are used. Two more broadcasts than FedAvg,
answered with one number each. `every=k` does this each k-th round and GA in between (the paper's Table 15).

`compare` also asks for the gaps of the plain mean of the same replies, of FAA's own weights, and half-way between the
weights and the perturbed ones (Figures 6 and 2: three merges of one trajectory; how linear the gap is): three broadcasts
more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Replies
from fedvlm.core.model import Model
from fedvlm.core.ranges import Count
from fedvlm.core.state import State
from fedvlm.parts.merge.ga import Ga, normalised

SMALLEST_CHANGE = 1e-8  # of a gap: smaller changes make the slope unreliable


@dataclass(frozen=True)
class Faa(Ga):
    every: Count = 1  # FAA each k-th round, GA in between
    compare: bool = False  # record how the mean, GA and FAA spread the gaps of the same replies; three broadcasts more

    asks: ClassVar[tuple[str, ...]] = ("train", "validate", "validate")
    effects: ClassVar[Mapping[str, str]] = {
        **Ga.effects,
        "usable_slopes": "share of clients whose slope was positive and finite; 0: GA's weights were used",
        "mean_spread": "variance over clients of the gap with uniform weights (compare=true)",
        "ga_spread": "the same after GA's step from the weights of the round before",
        "faa_spread": "the same with FAA's weights",
        "curvature": "how far the gaps half-way to the perturbed weights are from the mean of both ends, over their change",
    }

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        if cohort.round % self.every:
            return super().round(model, state, cohort)
        replies = self.gather(state, cohort)
        weight = normalised(state.server["weight"][torch.from_numpy(replies.ids)])
        gap = self.gap(state, cohort, replies, weight)
        moved = self.adjusted(weight, gap, cohort.round, cohort.rounds)
        moved_gap = self.gap(state, cohort, replies, moved)
        slope, usable = slopes(weight, moved, gap, moved_gap)
        cohort.acted(usable_slopes=usable)
        chosen = moved if slope is None else equal_gaps(weight, slope, gap)
        if self.compare:
            mean, faa, half = (
                self.gap(state, cohort, replies, w) for w in (replies.uniform(), chosen, (weight + moved) / 2)
            )
            spreads = {"mean_spread": mean, "ga_spread": moved_gap, "faa_spread": faa}
            bend = (half - (gap + moved_gap) / 2).norm() / (moved_gap - gap).norm().clamp(min=1e-30)
            cohort.acted(curvature=float(bend), **{k: float(v.var(correction=0)) for k, v in spreads.items()})
        weight = chosen
        return self.finish_weighted(state, cohort, replies, weight)

    def gap(self, state: State, cohort: Cohort, replies: Replies, weight: Tensor) -> Tensor:
        """Each client's gap under these weights; a client that does not answer counts as the mean of the others."""
        message = replace(state.message(), shared=replies.sum(weight))
        answered = cohort.ask("validate", message)
        loss = dict(zip(answered.ids.tolist(), answered.values["val"].double().tolist(), strict=True))
        mixed = torch.tensor([loss.get(i, torch.nan) for i in replies.ids.tolist()], dtype=torch.float64)
        gap = mixed - replies.values["after"].double()
        return torch.where(gap.isnan(), gap.nanmean(), gap)


def slopes(weight: Tensor, moved: Tensor, gap: Tensor, moved_gap: Tensor) -> tuple[Tensor | None, float]:
    """K_i, with the median in place of unusable ones; None where none is usable. And the share of usable ones."""
    change = gap - moved_gap
    raw = (moved - weight) / change
    usable = (change.abs() >= SMALLEST_CHANGE) & raw.isfinite() & (raw > 0)
    if not usable.any():
        return None, 0.0
    return torch.where(usable, raw, raw[usable].median()), float(usable.double().mean())


def equal_gaps(weight: Tensor, slope: Tensor, gap: Tensor) -> Tensor:
    """a_i = max(0, a_i + K_i (G_i − g)) with Σa = 1, exactly: client i has a positive weight while g < G_i + a_i/K_i, so
    the clients are tried in that order."""
    threshold = gap + weight / slope
    order = threshold.argsort(descending=True)
    total = slope[order].cumsum(0)
    level = ((weight + slope * gap)[order].cumsum(0) - 1) / total
    positive = threshold[order] >= level  # the largest set whose members all keep a positive weight
    g = level[int(positive.nonzero()[-1])]
    return normalised((weight + slope * (gap - g)).clamp(min=0))
