"""GA (Zhang et al., CVPR 2023): larger weights for the clients that averaging hurt most.

a_i += step_t · G_i / max|G|, clipped to [0, 1] and normalised; step_t = step/M · (1 − (t − 1)/T).
G_i = L_i(w_g) − L_i(w_i) on validation loss (our reading; the public code uses accuracy). If all gaps are zero the
weights stay as they are.
The gap of a round comes with the next round's reply (core/observers.py), when the next weights are needed: one exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Merge, Replies, Start, require_gaps
from fedvlm.core.model import Model
from fedvlm.core.observers import gaps_of
from fedvlm.core.ranges import NotNegative
from fedvlm.core.state import State

# For merges whose mechanism is their weights
FROM_UNIFORM = {"from_uniform": "total variation distance of the clients' weights from uniform ones; 0: the plain mean"}


@dataclass(frozen=True)
class Ga(Merge):
    gaps: bool = True  # always true: the weights are computed from the gaps
    step: NotNegative = 0.2  # largest change of a weight in round 1, times the number of clients; falls linearly

    effects: ClassVar[Mapping[str, str]] = FROM_UNIFORM | {
        "weights_moved": "total variation distance of the weights from those of the round before",
    }

    def __post_init__(self) -> None:
        require_gaps(self)

    def init(self, model: Model, clients: int, seed: int) -> Start:
        start = super().init(model, clients, seed)
        return start._replace(server=start.server | {"weight": torch.ones(clients)})

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        replies = self.gather(state, cohort)
        weight = normalised(state.server["weight"][torch.from_numpy(replies.ids)])
        gap = gaps_of(replies.ids, replies.values, state.server).double()
        gap = torch.where(gap.isnan(), 0.0, gap)  # of a client that trains for the first time
        weight = self.adjusted(weight, gap, cohort.round - 1, cohort.rounds)
        return self.finish_weighted(state, cohort, replies, weight)

    def adjusted(self, weight: Tensor, gap: Tensor, round: int, rounds: int) -> Tensor:
        """The weights after one step, relative to the largest gap."""
        largest = gap.abs().max()
        if largest == 0:
            return weight
        step = self.step / len(weight) * (1 - (max(round, 1) - 1) / max(rounds, 1))
        return normalised((weight + step * gap / largest).clamp(0, 1))

    def finish_weighted(self, state: State, cohort: Cohort, replies: Replies, weight: Tensor) -> State:
        """The weighted sum. The weights of clients that answered are kept; their share of the total does not change."""
        at = torch.from_numpy(replies.ids)
        before = normalised(state.server["weight"][at])
        cohort.acted(from_uniform=total_variation(weight, replies.uniform()))
        cohort.acted(weights_moved=total_variation(weight, before))
        kept = state.server["weight"].clone()
        kept[at] = (weight * kept[at].double().sum()).to(kept.dtype)
        return self.finish(state, cohort, replies, replies.sum(weight), weight, replies.mean_loss(), {"weight": kept})


def total_variation(weight: Tensor, other: Tensor) -> float:
    """Half the sum of the differences, 0 … 1: the share of the weight that is elsewhere."""
    return float((weight - other).abs().sum() / 2)


def normalised(weight: Tensor) -> Tensor:
    """The weights divided by their sum, in float64; uniform where the sum is 0."""
    weight = weight.double()
    total = weight.sum()
    return weight / total if total > 0 else torch.full_like(weight, 1 / len(weight))
