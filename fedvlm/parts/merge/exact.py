"""The exact mean of low-rank changes: FedEx-LoRA (Singhal et al., 2025) and FLoRA (Wang et al., NeurIPS 2024).

FedLoRA averages A and B separately, but the mean of the clients' models has Σ aᵢ Bᵢ Aᵢ, which is not (Σ aᵢ Bᵢ)(Σ aᵢ Aᵢ).
With the frozen weight's change M of adapter=residual,

- **FedEx-LoRA**: A ← Σ aᵢ Aᵢ, B ← Σ aᵢ Bᵢ, and what averaging lost goes into M: M ← M + Σ aᵢ Bᵢ Aᵢ − B A;
- **FLoRA** (restart=true): the stacked factors [a₁B₁ a₂B₂ …][A₁; A₂; …] are all of Σ aᵢ Bᵢ Aᵢ, which goes into M; then A is
  drawn anew and B is 0.

Either way M + B A after the round is the mean of the clients' M + Bᵢ Aᵢ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter
from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Start
from fedvlm.core.model import Model
from fedvlm.core.seeds import key
from fedvlm.core.state import Params, Reply, State
from fedvlm.parts.adapters.residual import RESIDUAL, Residual
from fedvlm.parts.merge.mean import Mean

SEED = "seed"  # of the run, in the server's state


@dataclass(frozen=True)
class Exact(Mean):
    restart: bool = False  # FLoRA: A and B start anew in each round; false: FedEx-LoRA, they go on from their means

    effects: ClassVar[Mapping[str, str]] = {
        "lost": "length of what averaging A and B separately would lose, Σ aᵢBᵢAᵢ − B A, divided by that of Σ aᵢBᵢAᵢ"
    }

    def incompatible(self, adapter: Adapter) -> str:
        if not isinstance(adapter, Residual) or adapter.private:
            return "changes frozen weights by what all clients send; use adapter=residual without private="
        return ""

    def init(self, model: Model, clients: int, seed: int) -> Start:
        start = super().init(model, clients, seed)
        return start._replace(server=start.server | {SEED: torch.tensor(seed)})

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        names = [k.removesuffix(RESIDUAL) for k in state.shared if k.endswith(RESIDUAL)]
        products = {k: torch.zeros_like(state.shared[k + RESIDUAL], dtype=torch.float64) for k in names}
        total = torch.zeros((), dtype=torch.float64)

        def add(reply: Reply) -> None:
            n = reply.values["n"].double()
            weight = n if self.weights == "size" else torch.ones_like(n)
            total.add_(weight.sum())
            for k, v in products.items():
                v += torch.tensordot(weight, product(reply.shared, k), dims=1)

        found = self.average(state, cohort, state.message(), on_reply=add)
        mean = {k: v / total for k, v in products.items()}
        lost = {k: v - product(found.mean, k) for k, v in mean.items()}
        cohort.acted(lost=length(lost) / max(length(mean), 1e-300))
        shared, added = dict(found.mean), lost
        if self.restart:
            shared, added = model.adapter.init(model.task, key(int(state.server[SEED]), 79, cohort.round)), mean
        for k, v in added.items():
            before = state.shared[k + RESIDUAL]
            shared[k + RESIDUAL] = (before.double() + v).to(before.dtype)
        return state._replace(shared=shared)


def product(params: Params, name: str) -> Tensor:
    """B A, in float64."""
    return params[f"{name}.B"].double() @ params[f"{name}.A"].double()


def length(parts: Params) -> float:
    return float(sum(float(v.square().sum()) for v in parts.values()) ** 0.5)
