"""PLOT (Chen et al., ICLR 2023): several prompts per class; optimal transport assigns an image's patches to them.

Per image and class, the plan T moves mass 1/P from each of the P patches and 1/N to each of the N prompts: min ⟨1 − cos, T⟩
− ε H(T), ε = 0.1, no gradient through T.  logits = scale · Σ T·cos, which is scale · (1 − transport cost). N = 4 prompts
from different draws, all shared; equal ones would stay equal. With mass < 1 the transport is FedOTP's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.adapter import Limits, Task
from fedvlm.core.ranges import Count, PositiveShare
from fedvlm.core.state import Params
from fedvlm.parts.adapters.several import draw_contexts, encode_contexts, mean_cosine
from fedvlm.parts.adapters.transported import Transported


@dataclass(frozen=True)
class Plot(Transported):
    private: tuple[str, ...] = ()
    mass: PositiveShare = 1.0  # share of the image that is matched with prompts; 1: all of it
    global_prompts: Count = 4  # N, prompts of each class; 1: the mean over the patches

    limits: ClassVar[Limits] = Limits(examples=512, clients=4, gpu=True)
    diagnostics: ClassVar[Mapping[str, str]] = {
        "prompt_cosine": "mean cosine between a class's prompts; 1: they have become the same"
    }

    def init(self, task: Task, seed: int) -> Params:
        return {"context": draw_contexts(self, task, seed, self.global_prompts)}

    def shared_only(self, params: Params) -> Params:
        return params

    def prompts(self, task: Task, params: Params) -> Tensor:
        return encode_contexts(self, task, params["context"])

    def plan(self, cost: Tensor) -> Tensor:
        return balanced(cost, self.entropy, self.iterations) if self.mass == 1 else super().plan(cost)

    def diagnose(self, task: Task, params: Params, x: Tensor) -> Params:
        return {"prompt_cosine": mean_cosine(self.prompts(task, params))}


@torch.no_grad()
def balanced(cost: Tensor, epsilon: float, iterations: int, tolerance: float = 1e-4) -> Tensor:
    """Sinkhorn's plan [..., P, N] with column sums 1/N and, to a relative `tolerance`, row sums 1/P."""
    patches, prompts = cost.shape[-2:]
    steep = cost - cost.amin(-1, keepdim=True)  # constants per row and column change the scalings only
    kernel = (-(steep - steep.amin(-2, keepdim=True)) / epsilon).exp()
    u, v = torch.ones_like(kernel[..., :1]), torch.ones_like(kernel[..., :1, :].mT)
    active = torch.ones_like(v[..., :1, :], dtype=torch.bool)  # a problem that has stopped no longer changes
    for _ in range(iterations):
        u = torch.where(active, 1 / patches / (kernel @ v), u)
        updated = torch.where(active, 1 / prompts / (kernel.mT @ u), v)
        active, v = ((updated / v - 1).abs() >= tolerance).any(-2, keepdim=True), updated
        if not active.any():
            break
    return u * kernel * v.mT
