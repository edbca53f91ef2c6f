"""q-FFL (Li et al., 2020), as q-FedAvg: clients with a larger loss pull harder.

Δ_i = F_i^q · (w − w_i)/η,  h_i = q F_i^(q−1) ‖(w − w_i)/η‖² + F_i^q/η,  w ← w − ΣΔ_i/Σh_i.  F_i is the client's loss of
what it was sent (on validation, our reading). q = 0 is FedAvg, uniform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fedvlm.core import Cohort, State, lift
from fedvlm.merge.mean import Mean, refuse_without_gaps


@dataclass(frozen=True)
class Qffl(Mean):
    weights: Literal["uniform"] = "uniform"  # the losses weigh
    gaps: bool = True  # F comes with them
    q: float = 1.0  # 0 is FedAvg; larger is fairer
    reach: float = 0.1  # η: the paper's 1/L; about what a round's steps add up to

    def __post_init__(self) -> None:
        refuse_without_gaps(self)

    def round(self, state: State, cohort: Cohort) -> State:
        ids, up = cohort.ask("train", state.shared)
        gaps = self.watch(state, cohort, ids, up)
        force = up["before"].double().clamp(min=1e-10)
        pull = {k: (lift(state.shared)[k] - up[k]).double() / self.reach for k in state.shared}
        length = sum((v.flatten(1).square().sum(1) for v in pull.values()), torch.zeros(len(ids), dtype=torch.float64))
        step = force**self.q
        total = (self.q * force ** (self.q - 1) * length + step / self.reach).sum()
        move = {k: torch.tensordot(step, v, dims=1) / total for k, v in pull.items()}
        weights = dict(zip(ids.tolist(), (step / step.sum()).tolist(), strict=True))
        cohort.notes |= {"weights": weights, "loss": float(up["loss"].mean())}
        shared = {k: (v - move[k]).to(v.dtype) for k, v in state.shared.items()}
        return state._replace(shared=shared, server=state.server | gaps.kept)
