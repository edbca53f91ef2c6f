"""FedOT (Kong et al., 2025): a shared classifier, and a private orthogonal map of the image embedding per client.

R = (X − Xᵀ)/2,  W = (I + R)(I − R)⁻¹,  logits = scale · w_g W h.  X is private and starts at 0: a newcomer has W = I.
W = diag(W₁ … W_r) with `blocks` = r > 1 (FedOT+B). ‖W h‖ = ‖h‖ = 1, so the paper's normalisation has no effect.
Our reading: the paper's temperature is the backbone's scale; "block size" in its appendix is the number of blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter, Task, initial_classifier
from fedvlm.core.ranges import Count
from fedvlm.core.state import Params, linear
from fedvlm.errors import FedvlmError

MAP_DIAGNOSTICS = {
    "condition": "condition number of the private map; 1: orthogonal",
    "map_change": "distance of the private map from the identity, relative to the identity's norm",
}


@dataclass(frozen=True)
class Rotation(Adapter):
    private: tuple[str, ...] = ("skew",)
    init_from: Literal["text", "random"] = "text"  # initial classifier: embeddings of the class names, or random
    blocks: Count = 1  # diagonal blocks of the map; 1: a dense map

    diagnostics: ClassVar[Mapping[str, str]] = MAP_DIAGNOSTICS
    linear_head: ClassVar[bool] = True

    def init(self, task: Task, seed: int) -> Params:
        if self.blocks < 1 or task.dim % self.blocks:
            raise FedvlmError(
                f"blocks={self.blocks} does not divide the embedding ({task.dim}); try a power of two up to {task.dim}"
            )
        size = task.dim // self.blocks
        return {"head": initial_classifier(task, self.init_from, seed), "skew": torch.zeros(self.blocks, size, size)}

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return rotate(params["skew"], x)

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * linear(self.features(task, params, x), params["head"])

    def diagnose(self, task: Task, params: Params, x: Tensor) -> Params:
        return diagnose_map(cayley(params["skew"]))

    def to_linear(self, task: Task, params: Params) -> Tensor:
        head, maps = params["head"], cayley(params["skew"])
        by_block = torch.unflatten(head, -1, (maps.shape[-3], maps.shape[-1])).transpose(-3, -2)
        return task.scale * (by_block @ maps).transpose(-3, -2).flatten(-2)


def diagnose_map(blocks: Tensor) -> Params:
    """MAP_DIAGNOSTICS of maps with these diagonal blocks, [clients, blocks, size, size]."""
    eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    change = (blocks - eye).square().mean((-3, -2, -1)) * blocks.shape[-1]
    return {"condition": torch.linalg.cond(blocks).amax(-1), "map_change": change.sqrt()}


def cayley(x: Tensor) -> Tensor:
    """The orthogonal blocks W [..., size, size] from the private parameter X."""
    skew = (x - x.mT) / 2
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    inverse: Tensor = torch.linalg.solve(
        eye - skew, eye.expand_as(skew)
    )  # solve may take an unexpanded eye for vectors
    return 2 * inverse - eye


def rotate(x: Tensor, h: Tensor) -> Tensor:
    """W h for every example. W = 2(I − R)⁻¹ − I, so a batch smaller than a block does not need W itself: one
    factorisation, with the examples as right-hand sides, takes a third of the time (benchmarks/steps.py)."""
    size = x.shape[-1]
    by_block = torch.unflatten(h, -1, (x.shape[-3], size)).transpose(-3, -2)  # [clients, blocks, examples, size]
    if h.shape[-2] >= size:
        rotated = by_block @ cayley(x).mT
    else:
        skew = (x - x.mT) / 2
        eye = torch.eye(size, dtype=x.dtype, device=x.device)
        solved: Tensor = torch.linalg.solve(eye - skew, by_block.mT)
        rotated = 2 * solved.mT - by_block
    return rotated.transpose(-3, -2).flatten(-2)
