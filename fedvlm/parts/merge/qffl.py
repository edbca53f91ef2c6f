"""q-FFL (Li et al., 2020), as q-FedAvg: clients with a larger loss get larger weights.

Δ_i = F_i^q · (w − w_i)/η,  h_i = q F_i^(q−1) ‖(w − w_i)/η‖² + F_i^q/η,  w ← w − ΣΔ_i/Σh_i.  F_i is the client's loss of
the model it was sent (on validation data, our reading). q = 0 is FedAvg with uniform weights. Running statistics are no
part of a gradient: they are averaged with the weights F_i^q, and are not in the norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Merge, require_gaps
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative, Positive
from fedvlm.core.state import Params, State, is_running_statistic, with_client_axis
from fedvlm.parts.merge.ga import FROM_UNIFORM, normalised, total_variation


@dataclass(frozen=True)
class Qffl(Merge):
    gaps: bool = True  # always true: F_i is the loss `before` that comes with the gaps
    q: NotNegative = 1.0  # exponent of the loss; 0: FedAvg with uniform weights, larger: fairer
    step_size: Positive = 0.1  # η, the paper's 1/L: about the distance that a client's model moves in a round

    effects: ClassVar[Mapping[str, str]] = FROM_UNIFORM | {
        "server_step": "length of the server's step, divided by that of the uniform mean; running statistics left out",
    }

    def __post_init__(self) -> None:
        require_gaps(self)

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        replies = self.gather(state, cohort)
        loss = replies.values["before"].double().clamp(min=1e-10)
        sent = {k: v for k, v in with_client_axis(state.shared).items() if not is_running_statistic(k)}
        delta = {k: (v - replies.shared[k]).double() / self.step_size for k, v in sent.items()}
        none = torch.zeros(len(replies.ids), dtype=torch.float64)
        length = sum((v.flatten(1).square().sum(1) for v in delta.values()), none)
        weight = loss**self.q
        total = (self.q * loss ** (self.q - 1) * length + weight / self.step_size).sum()
        step = {k: torch.tensordot(weight, v, dims=1) / total for k, v in delta.items()}
        share = normalised(weight)
        shared = replies.sum(share) | {k: (state.shared[k] - v).to(state.shared[k].dtype) for k, v in step.items()}
        mean = norm({k: v.mean(0) * self.step_size for k, v in delta.items()})
        cohort.acted(from_uniform=total_variation(share, replies.uniform()))
        cohort.acted(server_step=norm(step) / mean if mean else 1.0)
        return self.finish(state, cohort, replies, shared, share, replies.mean_loss())


def norm(params: Params) -> float:
    flat: list[Tensor] = [v.flatten() for v in params.values()]
    return float(torch.cat(flat).norm()) if flat else 0.0
