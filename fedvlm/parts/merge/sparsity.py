"""HetLoRA's server (Cho et al., EMNLP 2024): clients count by the length of their low-rank change.

A ← Σ aᵢ Aᵢ and B ← Σ aᵢ Bᵢ with aᵢ = ‖Bᵢ Aᵢ‖ / Σⱼ ‖Bⱼ Aⱼ‖ (Frobenius, over all projections). Clients of a small rank send
zeros for the rest (local=truncated), and would otherwise dilute what the others learned there. Where all lengths are 0,
clients count the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter
from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Merge
from fedvlm.core.model import Model
from fedvlm.core.state import Params, State
from fedvlm.parts.adapters.lora import trains_factors


@dataclass(frozen=True)
class Sparsity(Merge):
    effects: ClassVar[Mapping[str, str]] = {
        "largest": "the largest weight of a client times their number; 1: all equal"
    }

    def incompatible(self, adapter: Adapter) -> str:
        if trains_factors(adapter) and not adapter.private:
            return ""
        return "weights clients by their low-rank changes; use adapter=lora without private="

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        replies = self.gather(state, cohort)
        lengths = change_lengths(replies.shared)
        total = lengths.sum()
        weight = lengths / total if total > 0 else replies.uniform()
        cohort.acted(largest=float(weight.max()) * len(weight))
        shared = {k: v.to(state.shared[k].dtype) for k, v in replies.sum(weight).items()}
        return self.finish(state, cohort, replies, shared, weight, replies.mean_loss())


def change_lengths(params: Params) -> Tensor:
    """‖B A‖ of each client, from ‖B A‖² = tr((BᵀB)(A Aᵀ)), without a product as large as the frozen weight."""
    squares = []
    for k in (k for k in params if k.endswith(".A")):
        down, up = params[k].double(), params[k[:-1] + "B"].double()
        squares.append(((up.mT @ up) * (down @ down.mT)).sum((1, 2)))
    return torch.stack(squares).sum(0).clamp(min=0).sqrt()
