"""CLIP's ResNet image tower (Radford et al., 2021): three convolutions at the start, average pools before strided
convolutions, and attention from the mean of the last feature map to all its positions in place of the last pool.

Parameters are named as in OpenAI's and open_clip's files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def norm_after(module: nn.Module, x: Tensor, number: int, relu: bool = True) -> Tensor:
    """Convolution and batch norm of this number, then ReLU."""
    x = getattr(module, f"bn{number}")(getattr(module, f"conv{number}")(x))
    return F.relu(x) if relu else x


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.stride, self.downsample = stride, None
        if stride > 1 or channels != 4 * width:
            shortcut = nn.Conv2d(channels, 4 * width, 1, bias=False)
            self.downsample = nn.ModuleList([shortcut, nn.BatchNorm2d(4 * width)])

    def forward(self, x: Tensor) -> Tensor:
        inner = F.avg_pool2d(norm_after(self, norm_after(self, x, 1), 2), self.stride)
        inner = norm_after(self, inner, 3, relu=False)
        if self.downsample is not None:
            convolve, norm = self.downsample
            x = norm(convolve(F.avg_pool2d(x, self.stride)))
        return F.relu(inner + x)


class GridPool(nn.Module):
    def __init__(self, positions: int, width: int, heads: int, dim: int):
        super().__init__()
        self.positional_embedding = nn.Parameter(torch.zeros(positions + 1, width))
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in "qkv")
        self.c_proj, self.heads = nn.Linear(width, dim), heads

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT
        tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], 1) + self.positional_embedding
        query, key, value = (
            torch.unflatten(p(t), -1, (self.heads, -1)).transpose(1, 2)
            for p, t in ((self.q_proj, tokens[:, :1]), (self.k_proj, tokens), (self.v_proj, tokens))
        )
        found: Tensor = self.c_proj(F.scaled_dot_product_attention(query, key, value).flatten(1))
        return found


class ModifiedResNet(nn.Module):
    """OpenAI's ResNet for CLIP: normalised pixels to embeddings that are not normalised."""

    def __init__(self, blocks: Sequence[int], width: int, heads: int, size: int, dim: int):
        super().__init__()
        half = width // 2
        self.conv1, self.bn1 = nn.Conv2d(3, half, 3, 2, 1, bias=False), nn.BatchNorm2d(half)
        self.conv2, self.bn2 = nn.Conv2d(half, half, 3, padding=1, bias=False), nn.BatchNorm2d(half)
        self.conv3, self.bn3 = nn.Conv2d(half, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        channels, self.stages = width, len(blocks)
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            first = Bottleneck(channels, inner, 2 if stage else 1)
            members = [first, *(Bottleneck(4 * inner, inner, 1) for _ in range(count - 1))]
            setattr(self, f"layer{stage + 1}", nn.Sequential(*members))
            channels = 4 * inner
        self.attnpool = GridPool((size // 32) ** 2, channels, heads, dim)

    def forward(self, x: Tensor) -> Tensor:
        for number in (1, 2, 3):
            x = norm_after(self, x, number)
        x = F.avg_pool2d(x, 2)
        for stage in range(1, self.stages + 1):
            x = getattr(self, f"layer{stage}")(x)
        found: Tensor = self.attnpool(x)
        return found
