"""FedAvgM (Hsu et al., 2019) and FedOpt (Reddi et al., ICLR 2021): the server's step is that of an optimiser.

The mean update Δ = Σ a_i w_i − w_g takes the place of a negative gradient, for each number by itself:

    momentum (FedAvgM):  m ← β₁ m + Δ,              w_g ← w_g + η m
    FedAdagrad:          m ← β₁ m + (1 − β₁) Δ,     v ← v + Δ²
    FedYogi:             m as FedAdagrad's,         v ← v − (1 − β₂) Δ² sign(v − Δ²)
    FedAdam:             m as FedAdagrad's,         v ← β₂ v + (1 − β₂) Δ²,     all three: w_g ← w_g + η m / (√v + τ)

m starts at 0 and v at τ². As in the paper, there is no correction of the first steps. Running statistics are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import any_device
from fedvlm.core.model import Model
from fedvlm.core.ranges import Positive, Share
from fedvlm.core.state import State, is_running_statistic
from fedvlm.parts.merge.mean import Mean
from fedvlm.privacy.secure.sums import sums_only

FIRST, SECOND = "first.", "second."  # prefixes of m and v in the server's state


@dataclass(frozen=True)
class Adaptive(Mean):
    server_rule: Literal["momentum", "adagrad", "yogi", "adam"] = (
        "adam"  # how the mean update becomes the server's step
    )
    server_lr: Positive = 0.01  # η, the server's learning rate; with server_rule=momentum, 1 is FedAvg's step
    server_momentum: Share = 0.9  # β₁; 0: none
    server_memory: Share = 0.99  # β₂ of adam and yogi
    adaptivity: Positive = 1e-3  # τ: updates far below it are not scaled up

    effects: ClassVar[Mapping[str, str]] = {"step": "length of the server's step, divided by the mean update's"}

    @any_device
    @sums_only
    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        after = super().round(model, state, cohort)
        shared, server, taken, given = dict(after.shared), dict(after.server), 0.0, 0.0
        for k, old in state.shared.items():
            if is_running_statistic(k):
                continue
            update = after.shared[k] - old
            first = self.server_momentum * server.get(FIRST + k, torch.zeros_like(old))
            if self.server_rule == "momentum":
                server[FIRST + k] = first + update
                step = self.server_lr * server[FIRST + k]
            else:
                server[FIRST + k] = first + (1 - self.server_momentum) * update
                server[SECOND + k] = self.square(
                    server.get(SECOND + k, torch.full_like(old, self.adaptivity**2)), update.square()
                )
                step = self.server_lr * server[FIRST + k] / (server[SECOND + k].sqrt() + self.adaptivity)
            shared[k] = old + step
            taken, given = taken + float(step.square().sum()), given + float(update.square().sum())
        cohort.acted(step=(taken / given) ** 0.5 if given else 0.0)
        return after._replace(shared=shared, server=server)

    def square(self, old: torch.Tensor, squared: torch.Tensor) -> torch.Tensor:
        """v of this round, from that of the last and Δ²."""
        if self.server_rule == "adagrad":
            return old + squared
        if self.server_rule == "yogi":
            return old - (1 - self.server_memory) * squared * torch.sign(old - squared)
        return self.server_memory * old + (1 - self.server_memory) * squared
