"""Fed-SB (Singhal et al., 2025): a small trained matrix R between a frozen A and a frozen B (LoRA-SB).

A projection W becomes W + scale · B R A, with R [rank, rank] = 0 at the start, so round 0 is zero-shot. The mean is exact,
Σ aᵢ B Rᵢ A = B (Σ aᵢ Rᵢ) A, and rank² numbers a projection travel however wide the layer is. Parameters, all shared:
`image.{i}.{projection}.R`, `text.{i}.{projection}.R`.

Our reading: B and A are the first `rank` left and right singular vectors of the frozen W (the subspaces of LoRA-XS, Bałazy
et al., 2024), which everybody computes alone from the backbone. LoRA-SB takes those of the first step of full fine-tuning,
for which somebody needs training data before the first round, and starts R at its singular values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from fedvlm.core.adapter import Task
from fedvlm.core.ranges import Count, default
from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.layered import towers_of
from fedvlm.parts.adapters.lora import Lora
from fedvlm.towers.layers import LowRankPair, TowerLayer
from fedvlm.towers.vision import Towers

QKV = ("q", "k", "v")


@dataclass(frozen=True)
class Small(Lora):
    rank: Count = default(16, "effort")  # of R; the paper's are larger than LoRA's, since only rank² numbers are sent

    trains_factors: ClassVar[bool] = False

    def init(self, task: Task, seed: int) -> Params:
        if narrow := [c for c in self.changed(task) if c.width < self.rank]:
            raise FedvlmError(
                f"rank={self.rank}: {narrow[0].name} is {narrow[0].width} wide; give a rank of at most that"
            )
        whole = super().init(task, seed)
        return {f"{k[:-2]}.R": v.new_zeros(self.rank, self.rank) for k, v in whole.items() if k.endswith(".A")}

    def factors(self, task: Task, params: Params) -> Params:
        found: Params = {}
        for name, _, _ in self.changed(task):
            inner = params[f"{name}.R"]
            down, up = singular_vectors(towers_of(task), name, self.layers, self.rank, inner.dtype, inner.device)
            found |= {f"{name}.A": inner @ down, f"{name}.B": up[None]}
        return found


@lru_cache(maxsize=512)
def singular_vectors(
    towers: Towers, name: str, layers: int, rank: int, dtype: torch.dtype, device: torch.device
) -> LowRankPair:
    """A [rank, width] and B [width, rank]: the singular vectors of this frozen projection. Their signs are free; with the
    largest entry of each column of B positive they are the same on every machine."""
    tower, i, projection = name.split(".")
    own: tuple[TowerLayer, ...] = (
        towers.image.last(layers).layers if tower == "image" else tuple(towers.text.last(layers))
    )
    layer, at = own[int(i)], QKV.index(projection) if projection in QKV else 0
    weight = (layer.qkv[0].chunk(3)[at] if projection in QKV else layer.out[0]).double()
    left, _, right = torch.linalg.svd(weight)
    up, down = left[:, :rank], right[:rank]
    sign = up.gather(0, up.abs().argmax(0, keepdim=True)).sign()
    return (sign.mT * down).to(dtype=dtype, device=device), (sign * up).to(dtype=dtype, device=device)
