"""AFL (Mohri et al., 2019): weights approach the mixture of clients with the largest loss.

λ ← Proj(λ + γ L_i(w_g)), the projection onto the simplex;  w = Σ λ_i w_i.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.core.cohort import Cohort
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative
from fedvlm.core.state import State
from fedvlm.parts.merge.ga import Ga, normalised


@dataclass(frozen=True)
class Afl(Ga):
    weight_lr: NotNegative = 0.1  # γ, learning rate of the clients' weights

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        replies = self.gather(state, cohort)
        weight = normalised(state.server["weight"][torch.from_numpy(replies.ids)])
        weight = project_to_simplex(weight + self.weight_lr * replies.values["before"].double())
        return self.finish_weighted(state, cohort, replies, weight)


def project_to_simplex(point: Tensor) -> Tensor:
    """The nearest point with entries ≥ 0 that sum to 1 (Duchi et al., 2008)."""
    ordered = point.sort(descending=True).values
    level = (ordered.cumsum(0) - 1) / torch.arange(1, len(point) + 1, dtype=point.dtype)
    return (point - level[int((ordered > level).nonzero()[-1])]).clamp(min=0)
