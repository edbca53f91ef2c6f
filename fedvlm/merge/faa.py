"""FAA, FFT-GP's server (Algorithm 1): solve for the weights that make every client's gap the same.

The gap is taken as linear in a client's weight, with slope K_i = (a′_i − a_i)/(G_i − G′_i) from one perturbation (GA's).
Then a_i = a_i + K_i (G_i − G*) with G* = ΣK_iG_i/ΣK_i (Eqs. 9–11). Eq. 10 can leave the simplex; our reading is
a_i = max(0, a_i + K_i (G_i − g)) with g such that Σa = 1: the same where Eq. 10 is feasible, and elsewhere the weights
that make the largest gap smallest. A slope that is not positive, not finite, or from gaps that did not move takes the
median of the others; without any, GA's weights stand. Two more broadcasts than FedAvg, none of them answered but with a
number. `every=k` does this each k-th round and GA in between (the paper's Table 15).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedvlm.core import Cohort, Params, State
from fedvlm.merge.ga import Ga, share
from fedvlm.merge.mean import combine

STILL = 1e-8  # a gap that moved less tells no slope


@dataclass(frozen=True)
class Faa(Ga):
    every: int = 1  # FAA each k-th round, GA in between

    def round(self, state: State, cohort: Cohort) -> State:
        if cohort.round % self.every:
            return super().round(state, cohort)
        ids, up = cohort.ask("train", state.shared)
        gaps = self.watch(state, cohort, ids, up)
        weight = share(state.server["weight"][torch.from_numpy(ids)])
        gap = self.gap(state, cohort, ids, up, weight)
        moved = self.adjust(weight, gap, cohort.round, cohort.rounds)
        slope = slopes(weight, moved, gap, self.gap(state, cohort, ids, up, moved))
        weight = moved if slope is None else fair(weight, slope, gap)
        return self.finish(state, cohort, ids, up, weight, gaps)

    def gap(self, state: State, cohort: Cohort, ids: np.ndarray, up: Params, weight: Tensor) -> Tensor:
        """What averaging with these weights costs each client; who does not answer counts as the mean of the rest."""
        answered, told = cohort.ask("gauge", combine(up, state.shared, weight))
        loss = dict(zip(answered.tolist(), told["val"].double().tolist(), strict=True))
        found = torch.tensor([loss.get(i, torch.nan) for i in ids.tolist()], dtype=torch.float64) - up["after"].double()
        return torch.where(found.isnan(), found.nanmean(), found)


def slopes(weight: Tensor, moved: Tensor, gap: Tensor, then: Tensor) -> Tensor | None:
    """K_i, the median of the usable ones where one is not; None where none is."""
    change = gap - then
    raw = (moved - weight) / change
    usable = (change.abs() >= STILL) & raw.isfinite() & (raw > 0)
    if not usable.any():
        return None
    return torch.where(usable, raw, raw[usable].median())


def fair(weight: Tensor, slope: Tensor, gap: Tensor) -> Tensor:
    """a_i = max(0, a_i + K_i (G_i − g)), Σa = 1, exactly: client i is in while g < G_i + a_i/K_i, so try the sorted ones."""
    leaves = gap + weight / slope
    order = leaves.argsort(descending=True)
    kept = slope[order].cumsum(0)
    level = ((weight + slope * gap)[order].cumsum(0) - 1) / kept
    stays = leaves[order] >= level  # the largest set whose members all stay in
    g = level[int(stays.nonzero()[-1])]
    return share((weight + slope * (gap - g)).clamp(min=0))
