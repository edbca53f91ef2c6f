"""U-Net (Ronneberger et al., 2015) for masks: down through `levels` halvings, up again with what was seen on the way.

Trained from the start, all of it shared. Each image is normed by itself: with a few images and a few steps a round the
running statistics of batch norm lag behind (norm=batch has them; on retina its shared model was at Dice 0 after 12 rounds).
Its features are the deepest ones' means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.adapters.base import Limits, Task
from fedvlm.adapters.network import Network, Norm, scaled
from fedvlm.tasks import SEGMENTATION, TaskType


@dataclass(frozen=True)
class UNet(Network):
    width: int = 16  # channels at full resolution; doubled with each halving
    levels: int = 4
    norm: Literal["instance", "batch"] = "instance"

    task_type: ClassVar[TaskType] = SEGMENTATION
    view: ClassVar[str] = "pixels"
    limits: ClassVar[Limits] = Limits(examples=8, clients=1, gpu=True)

    def build(self, task: Task) -> nn.Module:
        return Halving(self.width, self.levels, Norm if self.norm == "batch" else Alone)


class Alone(nn.Module):
    """Instance norm with a scale and a shift."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return F.group_norm(x, x.shape[1], self.weight, self.bias)


class Halving(nn.Module):
    def __init__(self, width: int, levels: int, norm: type[nn.Module]):
        super().__init__()
        sizes = [width * 2**k for k in range(levels + 1)]
        self.down = nn.ModuleList(Pair(a, b, norm) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, 2) for a in reversed(sizes[:-1]))
        self.join = nn.ModuleList(Pair(2 * a, a, norm) for a in reversed(sizes[:-1]))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        x, seen = scaled(x), []
        for k, pair in enumerate(self.down):
            x = pair(F.max_pool2d(x, 2) if k else x, real)
            seen.append(x)
        features = seen.pop().mean((2, 3))
        for up, join in zip(self.up, self.join, strict=True):
            before = seen.pop()
            x = up(x)
            x = F.pad(x, (0, before.shape[-1] - x.shape[-1], 0, before.shape[-2] - x.shape[-2]))  # odd sizes
            x = join(torch.cat([before, x], dim=1), real)
        return self.last(x)[:, 0], features


class Pair(nn.Module):
    def __init__(self, before: int, after: int, norm: type[nn.Module]):
        super().__init__()
        self.first, self.second = (nn.Conv2d(a, after, 3, padding=1, bias=False) for a in (before, after))
        self.norm1, self.norm2 = norm(after), norm(after)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        x = torch.relu(self.norm1(self.first(x), real))
        return torch.relu(self.norm2(self.second(x), real))
