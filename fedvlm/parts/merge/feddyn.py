"""FedDyn's server (Acar et al., ICLR 2021): w_g ← mean of w_i − h,  h ← h − (share that answered) · (mean of w_i − w_g).

The share is that of all clients; h stays on the server and starts at 0. The paper's h is α times this one, and it divides
it by α again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedvlm.core.cohort import Cohort
from fedvlm.core.model import Model
from fedvlm.core.ranges import default
from fedvlm.core.state import State, is_running_statistic
from fedvlm.parts.merge.mean import Mean

DRIFT = "drift."  # prefix of h in the server's state


@dataclass(frozen=True)
class FedDyn(Mean):
    weights: Literal["size", "uniform"] = default("uniform", "effort")  # by training examples, or the same for all

    partner: ClassVar[str] = "feddyn"

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        found = self.average(state, cohort, state.message())
        share = found.answered / max(cohort.population, found.answered)
        shared, server = dict(found.mean), dict(state.server)
        for k, old in state.shared.items():
            if not is_running_statistic(k):
                server[DRIFT + k] = server.get(DRIFT + k, torch.zeros_like(old)) - share * (found.mean[k] - old)
                shared[k] = found.mean[k] - server[DRIFT + k]
        return state._replace(shared=shared, server=server)
