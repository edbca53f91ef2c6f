"""CLIP, SigLIP, ViT and DINOv2 as torch modules, with the names, and in the order, that Hugging Face's weights have.

    model = TwoTowers(vision, text, "clip", dim)          or "siglip"
    model = OneTower(vision, "vit")                       or "dinov2"

They are made on the meta device and filled with the weights of a file, so that nothing is allocated twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Architecture = Literal["clip", "siglip", "vit", "dinov2"]
OLD_END = 2  # the end token that old files of CLIP name wrongly: there it is the highest id


class QuickGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, nn.Module] = {
    "quick_gelu": QuickGelu(),
    "gelu": nn.GELU(),
    "gelu_pytorch_tanh": nn.GELU("tanh"),
}


@dataclass(frozen=True)
class Sizes:
    """The settings that both towers have, under the names of config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str
    layer_norm_eps: float


@dataclass(frozen=True)
class VisionSizes(Sizes):
    image_size: int
    patch_size: int


@dataclass(frozen=True)
class TextSizes(Sizes):
    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int = 0  # clip: the token whose position is read
    projection_size: int = 0  # siglip


class Output(NamedTuple):
    last_hidden_state: Tensor  # [rows, positions, width]
    pooler_output: Tensor  # [rows, width]


class Table(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing is drawn on the meta device, where that imports a second's worth of torch."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        found: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return found


class Mlp(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.activation_fn = ACTIVATIONS[sizes.hidden_act]
        self.fc1 = nn.Linear(sizes.hidden_size, sizes.intermediate_size)
        self.fc2 = nn.Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc2(self.activation_fn(self.fc1(x)))
        return found


class Layer(nn.Module):
    """Attention and an MLP; what they add is multiplied per channel where `scaled`, as in DINOv2."""

    def __init__(self, sizes: Sizes, causal: bool, scaled: bool):
        super().__init__()
        self.causal, width = causal, sizes.hidden_size
        self.self_attn = Attention(width, sizes.num_attention_heads)
        self.layer_norm1 = nn.LayerNorm(width, sizes.layer_norm_eps)
        self.mlp = Mlp(sizes)
        self.layer_norm2 = nn.LayerNorm(width, sizes.layer_norm_eps)
        self.scale1, self.scale2 = (nn.Parameter(torch.ones(width)) if scaled else None for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.self_attn(self.layer_norm1(x), self.causal)
        x = x + (mixed if self.scale1 is None else mixed * self.scale1)
        inner = self.mlp(self.layer_norm2(x))
        found: Tensor = x + (inner if self.scale2 is None else inner * self.scale2)
        return found


class Encoder(nn.Module):
    layers: nn.ModuleList

    def __init__(self, sizes: Sizes, causal: bool = False, scaled: bool = False):
        super().__init__()
        self.layers = nn.ModuleList([Layer(sizes, causal, scaled) for _ in range(sizes.num_hidden_layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Patches(nn.Module):
    """The input of the first layer, [images, positions, width], of pixels [images, 3, height, width]."""

    def __init__(self, sizes: VisionSizes, family: Architecture):
        super().__init__()
        self.grid, width = sizes.image_size // sizes.patch_size, sizes.hidden_size
        first = family != "siglip"  # there is a class token before the patches
        self.class_embedding = nn.Parameter(torch.zeros(width)) if first else None
        self.patch_embedding = nn.Conv2d(3, width, sizes.patch_size, sizes.patch_size, bias=family != "clip")
        self.position_embedding = Table(self.grid**2 + first, width)

    def forward(self, pixels: Tensor) -> Tensor:
        tiles: Tensor = self.patch_embedding(pixels)
        x, positions = tiles.flatten(2).transpose(1, 2), self.position_embedding.weight
        if self.class_embedding is not None:
            x = torch.cat([self.class_embedding.expand(x.shape[0], 1, -1), x], 1)
        if x.shape[1] != len(positions):
            positions = self.resized(positions, tiles.shape[2:])
        return x + positions

    def resized(self, positions: Tensor, grid: torch.Size) -> Tensor:
        """The position embeddings for images of another size: DINOv2 is trained at 518 pixels and used at 224."""
        if self.class_embedding is None:
            raise ValueError(f"patches in a grid of {tuple(grid)}, where the model has {self.grid} by {self.grid}")
        square = positions[None, 1:].unflatten(1, (self.grid, self.grid)).permute(0, 3, 1, 2)
        new = F.interpolate(square, tuple(grid), mode="bicubic", align_corners=False)
        return torch.cat([positions[:1], new.permute(0, 2, 3, 1).reshape(-1, positions.shape[1])])


class Pool(nn.Module):
    """SigLIP's readout: attention from one learned query to all tokens, then an MLP beside it."""

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        width = sizes.hidden_size
        self.probe = nn.Parameter(torch.zeros(1, 1, width))
        self.attention = nn.MultiheadAttention(width, sizes.num_attention_heads, batch_first=True)
        self.layernorm, self.mlp = nn.LayerNorm(width, sizes.layer_norm_eps), Mlp(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.probe.repeat(x.shape[0], 1, 1), x, x)[0]
        x = x + self.mlp(self.layernorm(x))
        return x[:, 0]


class VisionTower(nn.Module):
    def __init__(self, sizes: VisionSizes, family: Architecture):
        super().__init__()
        width, eps = sizes.hidden_size, sizes.layer_norm_eps
        self.config, self.embeddings = sizes, Patches(sizes, family)
        # Hugging Face spells it so
        self.pre_layrnorm = nn.LayerNorm(width, eps) if family == "clip" else None
        self.encoder, self.post_layernorm = Encoder(sizes, scaled=family == "dinov2"), nn.LayerNorm(width, eps)
        self.head = Pool(sizes) if family == "siglip" else None

    def first_layer_input(self, pixels: Tensor) -> Tensor:
        x: Tensor = self.embeddings(pixels)
        return x if self.pre_layrnorm is None else self.pre_layrnorm(x)

    def forward(self, pixel_values: Tensor) -> Output:
        x = self.encoder(self.first_layer_input(pixel_values))
        pooled = self.post_layernorm(x[:, 0]) if self.head is None else self.head(self.post_layernorm(x))
        return Output(x, pooled)


class Words(nn.Module):
    def __init__(self, sizes: TextSizes):
        super().__init__()
        self.token_embedding = Table(sizes.vocab_size, sizes.hidden_size)
        self.position_embedding = Table(sizes.max_position_embeddings, sizes.hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        return found


class TextModule(nn.Module):
    """CLIP's tower is causal and read at the first end token, so that what follows it does not matter; SigLIP's is not,
    and read at the last position."""

    def __init__(self, sizes: TextSizes, family: Architecture):
        super().__init__()
        self.config, self.embeddings = sizes, Words(sizes)
        self.encoder = Encoder(sizes, causal=family == "clip")
        self.final_layer_norm = nn.LayerNorm(sizes.hidden_size, sizes.layer_norm_eps)
        self.head = nn.Linear(sizes.hidden_size, sizes.projection_size) if family == "siglip" else None

    def forward(self, input_ids: Tensor) -> Output:
        x = self.final_layer_norm(self.encoder(self.embeddings(input_ids)))
        if self.head is not None:
            return Output(x, self.head(x[:, -1]))
        end = self.config.eos_token_id
        at = input_ids if end == OLD_END else (input_ids == end).int()
        return Output(x, x[torch.arange(len(x), device=x.device), at.argmax(-1)])


class OneTower(nn.Module):
    """An image encoder without texts."""

    def __init__(self, vision: VisionSizes, family: Architecture):
        super().__init__()
        self.vision_model = VisionTower(vision, family)

    def forward(self, pixel_values: Tensor) -> Output:
        found: Output = self.vision_model(pixel_values)
        return found


class TextWithProjection(nn.Module):
    """CLIP's text tower beside another image tower."""

    def __init__(self, text: TextSizes, dim: int):
        super().__init__()
        self.text_model = TextModule(text, "clip")
        self.text_projection = nn.Linear(text.hidden_size, dim, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.text_projection(self.text_model(input_ids).pooler_output)
        return found


class TwoTowers(nn.Module):
    """A CLIP or a SigLIP; SigLIP's embeddings are what its towers pool, without a projection."""

    visual_projection: nn.Linear
    text_projection: nn.Linear

    def __init__(self, vision: VisionSizes, text: TextSizes, family: Architecture, dim: int = 0):
        super().__init__()
        self.text_model, self.vision_model = TextModule(text, family), VisionTower(vision, family)
        if family == "siglip":
            self.logit_scale, self.logit_bias = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        else:
            self.visual_projection = nn.Linear(vision.hidden_size, dim, bias=False)
            self.text_projection = nn.Linear(text.hidden_size, dim, bias=False)
            self.logit_scale = nn.Parameter(torch.zeros(()))
