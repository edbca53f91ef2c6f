"""CLIP's and SigLIP's frozen towers on a CPU, where each image and each text is computed by itself.

A library may round a row of a product otherwise where other rows are beside it, and an activation may round the last
values of a tensor otherwise than those before. So each image, and each text, is a tensor of its own through the whole
tower: the shapes of all operations are always the same, and its result depends on it and on the weights alone. Several
images go through one weight after the other together, so that the weight stays in the cache.

    images = FrozenImages(vision_model, layers)        images.embeddings(pixels), images.hidden(pixels, 4), …
    texts = FrozenTexts(text_tower)                    texts.embeddings(["a photo of a cat", …])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.towers.layers import Affine, TowerLayer, affine_of
from fedvlm.towers.modules import VisionTower
from fedvlm.towers.products import frozen_product
from fedvlm.towers.text import TextTower
from fedvlm.towers.vision import ImageLayers

FIRST, LAST = slice(0, 1), slice(-1, None)


class FrozenLayer:
    """One layer for one image or text, [positions, width]. With `read` its output at these positions only."""

    def __init__(
        self,
        layer: TowerLayer,
        heads: int,
        eps: float,
        activation: Callable[[Tensor], Tensor],
        positions: int,
        causal: bool = False,
        read: slice | None = None,
    ):
        self.norm1, self.norm2, self.heads, self.eps, self.activation = layer.norm1, layer.norm2, heads, eps, activation
        self.read, self.causal, width = read, causal and read is None, len(layer.norm1[0])
        (weight, bias), few = layer.qkv, 1 if read else positions
        if read is None:
            self.qkv = frozen_product(weight, bias, positions)
        else:
            self.query = frozen_product(weight[:width], bias[:width], few)
            self.key_value = frozen_product(weight[width:], bias[width:], positions)
        self.out, self.fc1, self.fc2 = (frozen_product(*affine, few) for affine in (layer.out, layer.fc1, layer.fc2))

    def __call__(self, each: list[Tensor]) -> list[Tensor]:
        """Each image or text by itself; a weight is used for all before the next one, so that it stays in the cache."""
        normed = [self._norm(x, self.norm1) for x in each]
        if self.read is None:
            heads = [self._heads(self.qkv(n)) for n in normed]
        else:
            each, read = [x[self.read] for x in each], [self.query(n[self.read]) for n in normed]
            both = [self.key_value(n) for n in normed]
            heads = [self._heads(q) + self._heads(kv) for q, kv in zip(read, both, strict=True)]
        mixed = [F.scaled_dot_product_attention(q, k, v, is_causal=self.causal) for q, k, v in heads]
        each = [x + self.out(m[0].transpose(0, 1).flatten(1)) for x, m in zip(each, mixed, strict=True)]
        inner = [self.activation(self.fc1(self._norm(x, self.norm2))) for x in each]
        return [x + self.fc2(h) for x, h in zip(each, inner, strict=True)]

    def _norm(self, x: Tensor, affine: Affine) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *affine, self.eps)

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """[positions, parts × width] as parts of [1, heads, positions, head size]."""
        return x.view(len(x), -1, self.heads, len(self.norm1[0]) // self.heads).permute(1, 2, 0, 3)[:, None].unbind(0)


def through(layers: Iterable[FrozenLayer], each: list[Tensor]) -> list[Tensor]:
    """Each tensor through all layers."""
    for layer in layers:
        each = layer(each)
    return each


class FrozenImages:
    """The image tower of a CLIP or a SigLIP: pixels [images, channels, height, width] → [images, …]."""

    def __init__(self, vision: VisionTower, tower: ImageLayers):
        patch, self.position = vision.embeddings.patch_embedding, vision.embeddings.position_embedding.weight.detach()
        self.tower, self.patch = tower, patch.kernel_size[0]
        bias = None if patch.bias is None else patch.bias.detach()
        self.embed = frozen_product(patch.weight.detach().flatten(1), bias, len(self.position))
        first, before = vision.embeddings.class_embedding, vision.pre_layrnorm
        self.class_token = None if first is None else first.detach()[None]
        self.before: Affine | None = None if before is None else affine_of(before)

    @cached_property
    def layers(self) -> list[FrozenLayer]:
        return [self._layer(layer) for layer in self.tower.layers]

    @cached_property
    def last(self) -> FrozenLayer:
        """The last layer where its class token alone is read."""
        return self._layer(self.tower.layers[-1], FIRST)

    @cached_property
    def project(self) -> Callable[[Tensor], Tensor]:
        assert self.tower.projection is not None
        return frozen_product(self.tower.projection, None, 1)

    def _layer(self, layer: TowerLayer, read: slice | None = None) -> FrozenLayer:
        tower = self.tower
        return FrozenLayer(layer, tower.heads, tower.eps, tower.activation, len(self.position), read=read)

    def start(self, pixels: Tensor) -> Tensor:
        """The input of the first layer, [positions, width], of one image."""
        size = self.patch
        tiles = pixels.unfold(1, size, size).unfold(2, size, size)  # [channels, rows, columns, size, size]
        x = self.embed(tiles.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1))
        x = (x if self.class_token is None else torch.cat([self.class_token, x])) + self.position
        return x if self.before is None else F.layer_norm(x, x.shape[-1:], *self.before, self.tower.eps)

    def starts(self, pixels: Tensor) -> list[Tensor]:
        return [self.start(one) for one in pixels]

    def norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *self.tower.norm, self.tower.eps)

    def embeddings(self, pixels: Tensor) -> Tensor:
        """[images, dim], not normalised."""
        each = self.starts(pixels)
        if self.tower.pool:
            pool = self.tower.pool
            return torch.cat([pool(self.norm(x)[None, None])[0] for x in through(self.layers, each)])
        each = through([*self.layers[:-1], self.last], each)
        return torch.cat([self.project(self.norm(x)) for x in each])

    def hidden(self, pixels: Tensor, layers: int) -> Tensor:
        """[images, positions, width] after the first `layers` layers; 0: the input of the first."""
        return torch.stack(through(self.layers[:layers], self.starts(pixels)))

    def patches(self, pixels: Tensor) -> Tensor:
        """[images, positions, dim]: the last layer's output, normed and projected, not normalised."""
        return torch.stack([self.project(self.norm(x)) for x in through(self.layers, self.starts(pixels))])


class FrozenTexts:
    """The text tower of a CLIP or a SigLIP: phrases → embeddings [phrases, dim], not normalised."""

    def __init__(self, tower: TextTower):
        self.tower = tower
        self.layers = [self._layer(layer) for layer in tower.layers[:-1]] + [self._layer(tower.layers[-1], LAST)]
        self.project = frozen_product(tower.projection, tower.bias, 1)

    def _layer(self, layer: TowerLayer, read: slice | None = None) -> FrozenLayer:
        tower = self.tower
        return FrozenLayer(layer, tower.heads, tower.eps, tower.activation, len(tower.position), tower.causal, read)

    def embeddings(self, phrases: Sequence[str]) -> Tensor:
        tower = self.tower
        ids = [tower.phrases([phrase]).ids[0] for phrase in phrases]
        each = [tower.token[one] + tower.position[: len(one)] for one in ids]
        each = [F.layer_norm(x, x.shape[-1:], *tower.norm, tower.eps) for x in through(self.layers, each)]
        return torch.cat([self.project(x) for x in each])
