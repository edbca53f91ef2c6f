"""FedPGP's prompts (Cui et al., ICML 2024): a shared context σ, plus a private change of low rank per client.

p = σ + U V with U [vectors, b] and V [b, width] private, b = 4, V = 0 at the start; class features as in PromptFL.
FedPGP's contrastive loss is local=contrast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.ranges import Count
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params
from fedvlm.parts.adapters.prompt import Prompt


@dataclass(frozen=True)
class LowRank(Prompt):
    private: tuple[str, ...] = ("left", "right")
    bottleneck: Count = 4  # b, rank of the private change

    def init(self, task: Task, seed: int) -> Params:
        shared = super().init(task, seed)["context"]
        contexts, vectors, width = shared.shape
        left = 0.02 * torch.randn(
            contexts, vectors, self.bottleneck, generator=generator(seed, 53), dtype=torch.float64
        )
        return {"context": shared, "left": left.to(shared), "right": shared.new_zeros(contexts, self.bottleneck, width)}

    def shared_only(self, params: Params) -> Params:
        return params | {"right": torch.zeros_like(params["right"])}

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        return super().class_vectors(task, {"context": params["context"] + params["left"] @ params["right"]})
