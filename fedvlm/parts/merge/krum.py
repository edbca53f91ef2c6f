"""Krum and multi-Krum (Blanchard et al., 2017): only replies with many near neighbours count.

A reply's score is the sum of squared distances to its n − f − 2 nearest neighbours, s_i = Σ ‖w_i − w_j‖²; the `best` ones
with the smallest score are averaged (1 is Krum). Reported sizes are not used: they are untrusted under Byzantine clients.
Running statistics are averaged with the chosen replies, but are no part of a distance: they have another scale than
parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Merge
from fedvlm.core.model import Model
from fedvlm.core.ranges import Count, Whole
from fedvlm.core.state import State, is_running_statistic


@dataclass(frozen=True)
class Krum(Merge):
    byzantine: Whole = 1  # f, how many clients may be Byzantine
    best: Count = 1  # how many replies are averaged

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        replies = self.gather(state, cohort)
        n = len(replies.ids)
        empty = replies.values["n"][:, None][:, :0]  # nothing is shared where all parameters are private
        compared = sorted(k for k in replies.shared if not is_running_statistic(k))
        flat = torch.cat([empty, *(replies.shared[k].flatten(1) for k in compared)], dim=1).double()
        distance = torch.cdist(flat, flat).square()
        neighbours = max(1, min(n - self.byzantine - 2, n - 1))
        score = distance.sort(1).values[:, 1 : neighbours + 1].sum(1)  # column 0 is the distance to itself
        best = score.argsort(stable=True)[: max(1, min(self.best, n))]
        weight = torch.zeros(n, dtype=torch.float64)
        weight[best] = 1 / len(best)
        return self.finish(state, cohort, replies, replies.sum(weight), weight, replies.median_loss())
