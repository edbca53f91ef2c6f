"""FedOT (Kong et al., 2025): a classifier for all, an orthogonal map of the embedding for each.

R = (X − Xᵀ)/2,  W = (I + R)(I − R)⁻¹,  logits = scale · w_g W h.  X is private and starts at 0, so a newcomer has W = I.
W = diag(W₁ … W_r) with `blocks` = r > 1 (FedOT+B). ‖W h‖ = ‖h‖ = 1, so the paper's normalisation is already there.
Our reading: the paper's temperature is the backbone's own scale; "block size" in its appendix is the number of blocks.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvlm.adapters.base import Adapter, Task, initial_classifier
from fedvlm.core import FedvlmError, Params, linear


@dataclass(frozen=True)
class Rotation(Adapter):
    private: tuple[str, ...] = ("skew",)
    init_from: Literal["text", "random"] = "text"  # initial classifier: embeddings of the class names, or random
    blocks: int = 1  # block-diagonal with this many blocks; 1 is the dense map

    diagnostics: ClassVar[tuple[str, ...]] = ("condition",)

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

    def diagnose(self, task: Task, params: Params) -> Params:
        return {"condition": torch.linalg.cond(cayley(params["skew"])).amax(-1)}

    def to_linear(self, task: Task, params: Params) -> Tensor:
        head, maps = params["head"], cayley(params["skew"])
        parts = head.unflatten(-1, (maps.shape[-3], maps.shape[-1])).transpose(-3, -2)
        return task.scale * (parts @ maps).transpose(-3, -2).flatten(-2)


def cayley(x: Tensor) -> Tensor:
    """The orthogonal maps themselves, [..., size, size]."""
    skew = (x - x.mT) / 2
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return 2 * torch.linalg.solve(eye - skew, eye.expand_as(skew)) - eye  # expanded: a bare eye may be read as vectors


def rotate(x: Tensor, h: Tensor) -> Tensor:
    """W h for every example. W = 2(I − R)⁻¹ − I, so a batch smaller than the embedding needs no W at all: one
    factorisation and as many right-hand sides as examples, a third of the time (benchmarks/steps.py)."""
    size = x.shape[-1]
    parts = h.unflatten(-1, (x.shape[-3], size)).transpose(-3, -2)  # [clients, blocks, examples, size]
    if h.shape[-2] >= size:
        turned = parts @ cayley(x).mT
    else:
        skew = (x - x.mT) / 2
        eye = torch.eye(size, dtype=x.dtype, device=x.device)
        turned = 2 * torch.linalg.solve(eye - skew, parts.mT).mT - parts
    return turned.transpose(-3, -2).flatten(-2)
