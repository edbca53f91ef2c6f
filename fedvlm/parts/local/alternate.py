"""RoLoRA (Chen et al., 2024): LoRA's two factors in alternate rounds, B in the odd ones and A in the even ones.

In a round one factor is fixed and the same for all, so the mean is exact: Σ aᵢ Bᵢ A = (Σ aᵢ Bᵢ) A, and likewise for A.
Unlike FFA-LoRA both are trained in the end. B is first: at the start it is 0, and A has no gradient. Other parameters of
the adapter are trained in every round. The fixed factor travels here with the trained one; the paper sends one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedvlm.core.adapter import Adapter
from fedvlm.core.data import Data
from fedvlm.core.descent import optimise
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.state import Message, Params, select
from fedvlm.parts.adapters.lora import trains_factors


@dataclass(frozen=True)
class Alternate(Local):
    effects: ClassVar[Mapping[str, str]] = {
        "in_B": "share of the update's squared length that is in B: 1 in odd rounds, 0 in even ones"
    }

    def incompatible(self, adapter: Adapter) -> str:
        return "" if trains_factors(adapter) else "trains two factors in turn; use adapter=lora"

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        fixed = ".A" if data.round % 2 else ".B"
        held = {k: v for k, v in params.items() if k.endswith(fixed)}
        trained = {k: v for k, v in params.items() if k not in held}
        before = {k: v.clone() for k, v in params.items()}
        loss = optimise(self, trained, data, model.gradients(self.objective, held=held))
        moved = {k: (v - before[k]).flatten(1).square().sum(1) for k, v in params.items()}
        total = torch.stack(list(moved.values())).sum(0)
        in_b = torch.stack(list(select(moved, [k for k in moved if k.endswith(".B")]).values())).sum(0)
        return {"loss": loss, "in_B": in_b / total.clamp(min=torch.finfo(total.dtype).tiny)}
