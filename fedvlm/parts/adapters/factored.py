"""DP-FPL's prompts (Tran et al., ICLR 2025): a shared context plus a private one, kept as low-rank factors and a residual.

p = p_G + U V + R with U [vectors, k], V [k, width] and R [vectors, width] private, rank k = 8; otherwise as PromptFL.
U V + R starts as a draw like PromptFL's, factored by `factors`: U has orthonormal columns, V = Uᵀ(U V + R). local=factored
factors again in every round and trains p_G, U and V; a newcomer has p_G alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.ranges import Count, default
from fedvlm.core.seeds import generator, key
from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.prompt import Prompt


@dataclass(frozen=True)
class Factored(Prompt):
    private: tuple[str, ...] = ("left", "right", "rest")
    rank: Count = default(8, "effort")  # k, of the private context's trained part; at most the number of vectors

    def init(self, task: Task, seed: int) -> Params:
        shared, own = (super(Factored, self).init(task, s)["context"] for s in (seed, key(seed, 103)))
        contexts, vectors, width = own.shape
        if self.rank > vectors:
            raise FedvlmError(f"rank={self.rank}: the context has {vectors} vectors, and its rank is at most that")
        start = torch.randn(contexts, self.rank, width, generator=generator(seed, 107), dtype=torch.float64).to(own)
        return {"context": shared} | factors(own, start)

    def shared_only(self, params: Params) -> Params:
        return params | {k: torch.zeros_like(params[k]) for k in ("right", "rest")}

    def own_context(self, params: Params) -> Tensor:
        return params["left"] @ params["right"] + params["rest"]

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        return super().class_vectors(task, {"context": params["context"] + self.own_context(params)})


def factors(context: Tensor, right: Tensor) -> Params:
    """One step of subspace iteration from V: U = orthonormal basis of P Vᵀ, V = Uᵀ P, R = P − U V."""
    left: Tensor = torch.linalg.qr(context @ right.mT)[0]
    right = left.mT @ context
    return {"left": left, "right": right, "rest": context - left @ right}
