"""U-Net (Ronneberger et al., 2015) for segmentation: `levels` halvings of the resolution, then upsampling with skips.

Trained from random weights, all of it shared. Instance norm by default: with a few images and a few steps per round the
running statistics of batch norm (norm=batch) lag behind; on retina its shared model was at Dice 0 after 12 rounds. The
features are the means of the deepest activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.core.adapter import Limits, Task
from fedvlm.core.ranges import Count, Whole
from fedvlm.core.tasks import SEGMENTATION, TaskType
from fedvlm.parts.adapters.network import Network, Norm, channels_last, pixels_to_float


@dataclass(frozen=True)
class UNet(Network):
    width: Count = 16  # channels at full resolution; doubled at each halving
    levels: Whole = 4  # halvings of the resolution
    norm: Literal["instance", "batch"] = "instance"  # instance: statistics of each image; batch: of the batch

    task_type: ClassVar[TaskType] = SEGMENTATION
    view: ClassVar[str] = "pixels"
    limits: ClassVar[Limits] = Limits(examples=8, clients=1, gpu=True)

    def incompatible(self, shape: Sequence[int]) -> str:
        least = 2 if self.norm == "instance" else 1  # one pixel alone has no variance
        size = min(shape[-2:])
        if size >> self.levels >= least:
            return ""
        return f"levels={self.levels} halvings of {size} pixels leave less than {least}; lower levels=, or use larger images"

    def build(self, task: Task) -> nn.Module:
        return EncoderDecoder(self.width, self.levels, Norm if self.norm == "batch" else InstanceNorm)


class InstanceNorm(nn.Module):
    """Instance norm with a learned scale and shift; called as `Norm` is."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        if x.dtype == torch.bfloat16:  # its sums are float32 inside; autocast would write float32 activations
            with torch.autocast(x.device.type, enabled=False):
                return F.group_norm(x, x.shape[1], self.weight.to(x.dtype), self.bias.to(x.dtype))
        return F.group_norm(x, x.shape[1], self.weight, self.bias)


class EncoderDecoder(nn.Module):
    def __init__(self, width: int, levels: int, norm: type[nn.Module]):
        super().__init__()
        self.batch_norm = norm is Norm
        sizes = [width * 2**k for k in range(levels + 1)]
        self.down = nn.ModuleList(DoubleConvolution(a, b, norm) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, 2) for a in reversed(sizes[:-1]))
        self.join = nn.ModuleList(DoubleConvolution(2 * a, a, norm) for a in reversed(sizes[:-1]))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        x, skips = pixels_to_float(x), []
        if self.batch_norm:  # torch's instance norm wants its channels first
            x = channels_last(x)
        for k, convolve in enumerate(self.down):
            x = convolve(F.max_pool2d(x, 2) if k else x, real)
            skips.append(x)
        features = skips.pop().mean((2, 3))
        for up, join in zip(self.up, self.join, strict=True):
            skip = skips.pop()
            x = up(x)
            x = F.pad(x, (0, skip.shape[-1] - x.shape[-1], 0, skip.shape[-2] - x.shape[-2]))  # odd sizes
            x = join(torch.cat([skip, x], dim=1), real)
        return self.last(x)[:, 0], features


class DoubleConvolution(nn.Module):
    def __init__(self, inputs: int, outputs: int, norm: type[nn.Module]):
        super().__init__()
        self.first, self.second = (nn.Conv2d(a, outputs, 3, padding=1, bias=False) for a in (inputs, outputs))
        self.norm1, self.norm2 = norm(outputs), norm(outputs)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        x = torch.relu(self.norm1(self.first(x), real))
        return torch.relu(self.norm2(self.second(x), real))
