"""timm's image transformers as open_clip uses them: ViT (BiomedCLIP) and EVA-02 (EVA-CLIP; Sun et al., 2023).

Both are pre-norm transformers with a class token, which is read after the last norm and projected. EVA-02 rotates queries
and keys by their position in the image, gates its MLP, and has a norm more inside attention and MLP. Parameters are named
as in timm; sizes are taken from the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.core.state import Params

EPS = 1e-6
REFERENCE = 16  # patches along a side at which EVA-02 was pre-trained; other grids are scaled to it
# timm's models whose heads are not 64 wide, by the model's width
HEADS = {1152: 16, 1280: 16, 1408: 16, 1536: 16, 1664: 16}


def heads_of(width: int) -> int:
    return HEADS.get(width, max(1, width // 64))


class SelfAttention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads_of(width)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        query, key, value = torch.unflatten(self.qkv(x), -1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found: Tensor = self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return found


class VitMlp(nn.Module):
    def __init__(self, width: int, hidden: int, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.fc1, self.fc2, self.activation = nn.Linear(width, hidden), nn.Linear(hidden, width), activation

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc2(self.activation(self.fc1(x)))
        return found


class EvaAttention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=b) for b in (True, False, True))
        self.norm, self.proj, self.heads = nn.LayerNorm(width, EPS), nn.Linear(width, width), heads_of(width)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        parts = (p(x) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (torch.unflatten(p, -1, (self.heads, -1)).transpose(1, 2) for p in parts)
        assert rotation is not None
        mixed = F.scaled_dot_product_attention(rotated(query, rotation), rotated(key, rotation), value)
        found: Tensor = self.proj(self.norm(mixed.transpose(1, 2).flatten(2)))
        return found


class EvaMlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1_g, self.fc1_x, self.fc2 = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(hidden, EPS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc2(self.norm(F.silu(self.fc1_g(x)) * self.fc1_x(x)))
        return found


class VitBlock(nn.Module):
    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, EPS), nn.LayerNorm(width, EPS)
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm1(x), rotation)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Patches(nn.Module):
    def __init__(self, width: int, size: int, bias: bool):
        super().__init__()
        self.proj = nn.Conv2d(3, width, size, size, bias=bias)


class Trunk(nn.Module):
    """A vision transformer: normalised pixels to the class token's state; `rotates` makes it an EVA-02."""

    def __init__(self, weights: Params, rotates: bool, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        patch, positions = weights["patch_embed.proj.weight"], weights["pos_embed"].shape[1]
        width, depth = len(patch), 1 + max(int(k.split(".")[1]) for k in weights if k.startswith("blocks."))
        hidden = len(weights["blocks.0.mlp.fc1_g.weight" if rotates else "blocks.0.mlp.fc1.weight"])
        self.patch_embed = Patches(width, patch.shape[-1], "patch_embed.proj.bias" in weights)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, width))
        self.norm_pre = nn.LayerNorm(width, EPS) if "norm_pre.weight" in weights else nn.Identity()
        self.blocks = nn.ModuleList(
            VitBlock(width, EvaAttention(width), EvaMlp(width, hidden))
            if rotates
            else VitBlock(width, SelfAttention(width), VitMlp(width, hidden, activation))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width, EPS)
        if "head.weight" in weights:
            self.head: nn.Module = nn.Linear(width, len(weights["head.weight"]), "head.bias" in weights)
        else:
            self.head = nn.Identity()
        self.rotates = rotates

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed.proj(x)
        rotation = rotation_of(x.shape[-1], len(self.norm.weight) // heads_of(len(self.norm.weight))).to(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x.flatten(2).mT], 1) + self.pos_embed
        x = self.norm_pre(x)
        for block in self.blocks:
            x = block(x, rotation if self.rotates else None)
        found: Tensor = self.head(self.norm(x[:, 0]))
        return found


class ImageEncoder(nn.Module):
    """open_clip's `visual` around a timm model: the trunk and a projection."""

    def __init__(self, weights: Params, rotates: bool, activation: Callable[[Tensor], Tensor] = F.gelu):
        super().__init__()
        inside = {k.removeprefix("trunk."): v for k, v in weights.items() if k.startswith("trunk.")}
        self.trunk = Trunk(inside, rotates, activation)
        self.head = nn.ModuleDict()
        if "head.proj.weight" in weights:
            dim, width = weights["head.proj.weight"].shape
            self.head["proj"] = nn.Linear(width, dim, "head.proj.bias" in weights)
        elif "head.mlp.fc1.weight" in weights:
            hidden, width = weights["head.mlp.fc1.weight"].shape
            self.head["mlp"] = ProjectionMlp(width, hidden, len(weights["head.mlp.fc2.weight"]), weights)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        for module in self.head.values():
            x = module(x)
        return x


class ProjectionMlp(nn.Module):
    def __init__(self, width: int, hidden: int, dim: int, weights: Params):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, dim, "head.mlp.fc2.bias" in weights)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return found


def rotation_of(grid: int, width: int) -> Tensor:
    """The angles [grid², width] of EVA-02's rotations: a quarter of the frequencies for rows, a quarter for columns, each
    for two neighbouring coordinates."""
    frequencies = 10000.0 ** -(torch.arange(width // 4) / (width // 4))
    along = torch.arange(grid) / grid * REFERENCE
    rows, columns = torch.meshgrid(along, along, indexing="ij")
    angles = torch.stack([rows, columns], -1)[..., None] * frequencies
    return angles.flatten(0, 1).flatten(1).repeat_interleave(2, -1)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x [examples, heads, 1 + patches, width] with neighbouring coordinates rotated; the class token stays."""
    patches = x[:, :, 1:]
    turned = torch.stack([-patches[..., 1::2], patches[..., ::2]], -1).flatten(-2)
    return torch.cat([x[:, :, :1], patches * angles.cos() + turned * angles.sin()], 2)
