"""q-FFL (Li et al., 2020), as q-FedAvg: clients with a larger loss get larger weights.

Δ_i = F_i^q · (w − w_i)/η,  h_i = q F_i^(q−1) ‖(w − w_i)/η‖² + F_i^q/η,  w ← w − ΣΔ_i/Σh_i.  F_i is the client's loss of
the model it was sent (on validation data, our reading). q = 0 is FedAvg with uniform weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedvlm.core import Cohort, State, with_client_axis
from fedvlm.keys import NotNegative, Positive
from fedvlm.local.model import Model
from fedvlm.merge.base import Merge, require_gaps


@dataclass(frozen=True)
class Qffl(Merge):
    gaps: bool = True  # always true: F_i is the loss `before` that comes with the gaps
    q: NotNegative = 1.0  # exponent of the loss; 0: FedAvg with uniform weights, larger: fairer
    step_size: Positive = 0.1  # η, the paper's 1/L: about the distance that a client's model moves in a round

    def __post_init__(self) -> None:
        require_gaps(self)

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        replies = self.gather(state, cohort)
        loss = replies.values["before"].double().clamp(min=1e-10)
        sent = with_client_axis(state.shared)
        delta = {k: (sent[k] - v).double() / self.step_size for k, v in replies.shared.items()}
        none = torch.zeros(len(replies.ids), dtype=torch.float64)
        length = sum((v.flatten(1).square().sum(1) for v in delta.values()), none)
        weight = loss**self.q
        total = (self.q * loss ** (self.q - 1) * length + weight / self.step_size).sum()
        step = {k: torch.tensordot(weight, v, dims=1) / total for k, v in delta.items()}
        shared = {k: (v - step[k]).to(v.dtype) for k, v in state.shared.items()}
        return self.finish(state, cohort, replies, shared, weight / weight.sum(), replies.mean_loss())
