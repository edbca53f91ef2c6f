"""The last layers of an image tower as a function of small trained changes, from stored activations (hidden@−n).

The layers below the first trained one give the same output in every step of every round, so it is computed once and
stored; the rest runs here. Of a CLIP only the class token's state after the last layer is read, so that layer computes no
other query, which changes results by rounding only; SigLIP reads all tokens. The weights get no gradient.

    top = ImageLayers.of(model).last(layers)          the last layers of a `modules.TwoTowers`; 0: all
    z = top.features(hidden, lora, scale)             [clients, examples, dim], not normalised

Clients are stacked along the first axis; a client's result does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.core.state import Params
from fedvlm.towers.layers import (
    Affine,
    Beside,
    Change,
    TowerLayer,
    add_and_norm,
    affine_of,
    affine_to,
    attend,
    fast_activation,
    layer_count,
    layers_of,
    low_rank_changes,
    moved,
    project,
)
from fedvlm.towers.modules import Pool, TwoTowers
from fedvlm.towers.products import plain_linear
from fedvlm.towers.text import TextTower


class AttentionPool(NamedTuple):
    """SigLIP's readout: attention from one learned query to all tokens, then an MLP beside it. It is frozen."""

    query: Tensor  # [heads, head size], projected
    key_value: Affine
    out: Affine
    norm: Affine
    fc1: Affine
    fc2: Affine
    eps: float
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, head: Pool, heads: int, eps: float) -> AttentionPool:
        attention, width = head.attention, head.probe.shape[-1]
        weight, bias = attention.in_proj_weight.detach(), attention.in_proj_bias.detach()
        query = F.linear(head.probe.detach().flatten(), weight[:width], bias[:width]).view(heads, -1)
        inner, outer = affine_of(head.mlp.fc1), affine_of(head.mlp.fc2)
        key_value = (weight[width:], bias[width:])
        out, norm = affine_of(attention.out_proj), affine_of(head.layernorm)
        return cls(query, key_value, out, norm, inner, outer, eps, head.mlp.activation_fn)

    def __call__(self, x: Tensor) -> Tensor:
        """[clients, examples, width] of [clients, examples, tokens, width]."""
        heads, rows = len(self.query), x.shape[:2]
        key, value = torch.unflatten(plain_linear(x, *self.key_value), -1, (2, heads, -1)).permute(3, 0, 1, 4, 2, 5)
        key, value = key.flatten(0, 1), value.flatten(0, 1)
        query = self.query[None, :, None].expand(len(key), -1, -1, -1)
        mixed = plain_linear(torch.unflatten(attend(query, key, value).flatten(1), 0, rows), *self.out)
        normed = F.layer_norm(mixed, mixed.shape[-1:], *self.norm, self.eps)
        return mixed + plain_linear(self.activation(plain_linear(normed, *self.fc1)), *self.fc2)

    def to(self, dtype: torch.dtype | None, device: torch.device | str | None) -> AttentionPool:
        return self._replace(
            query=moved(self.query, dtype, device),
            key_value=affine_to(self.key_value, dtype, device),
            out=affine_to(self.out, dtype, device),
            norm=affine_to(self.norm, dtype, device),
            fc1=affine_to(self.fc1, dtype, device),
            fc2=affine_to(self.fc2, dtype, device),
        )


@dataclass(frozen=True, eq=False)
class ImageLayers:
    layers: tuple[TowerLayer, ...]
    norm: Affine  # after the last layer
    projection: Tensor | None  # [dim, width]; None: of a pool
    heads: int
    eps: float
    activation: Callable[[Tensor], Tensor]
    pool: AttentionPool | None = None  # SigLIP's: what is read of the tokens; None: the class token

    @classmethod
    def of(cls, model: TwoTowers) -> ImageLayers:
        """All layers of a CLIP's or a SigLIP's image tower."""
        vision = model.vision_model
        heads, eps = vision.config.num_attention_heads, vision.config.layer_norm_eps
        pool = None if vision.head is None else AttentionPool.of(vision.head, heads, eps)
        projection = None if pool else model.visual_projection.weight.detach()
        activation = fast_activation(vision.config.hidden_act)[0]
        norm = affine_of(vision.post_layernorm)
        return cls(layers_of(vision.encoder, vision.config), norm, projection, heads, eps, activation, pool)

    def last(self, layers: int) -> ImageLayers:
        """The last `layers` layers, for activations hidden@−layers; 0: all, for hidden@0."""
        return replace(self, layers=self.layers[-layer_count(layers, len(self.layers), "image") :])

    @property
    def width(self) -> int:
        return len(self.norm[0])

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> ImageLayers:
        return replace(
            self,
            layers=tuple(layer.to(dtype, device) for layer in self.layers),
            norm=affine_to(self.norm, dtype, device),
            projection=None if self.projection is None else moved(self.projection, dtype, device),
            pool=None if self.pool is None else self.pool.to(dtype, device),
        )

    def features(
        self,
        hidden: Tensor,
        lora: Params | None = None,
        scale: float = 1.0,
        tokens: Tensor | None = None,
        beside: Beside | None = None,
        every: bool = False,
    ) -> Tensor:
        """Embeddings [clients, examples, dim], not normalised, from the activations [clients or 1, examples, 1 +
        patches, width] that enter the first of these layers. Computed in the weights' dtype, returned in the
        activations'.

        lora: low-rank changes of the last layers, named as in `layers.py` (`image.0.q.A`, …); other names are ignored.
        tokens [clients or 1, depth, n, width]: n more tokens after the first one, replaced by new ones at each of the
        first `depth` layers; later layers use the output for the last ones. They have no position embedding, so their
        order does not matter.
        beside: a function whose result is added to each layer's output (see `layers.py`).
        every: the embeddings of all tokens, [clients, examples, 1 + n + patches, dim]; not with a pool.
        """
        x, last = hidden.to(self.norm[0]), len(self.layers) - 1
        changes = low_rank_changes(lora, "image", len(self.layers), scale, x)
        for i, (layer, change) in enumerate(zip(self.layers, changes, strict=True)):
            if tokens is not None and i < tokens.shape[1]:
                x = insert_tokens(x, tokens[:, i].to(x), tokens.shape[2] if i else 0)
            x = self._layer(i, layer, x, change, beside, i == last and not every and not self.pool)
        if self.pool:
            return self.pool(self._norm(x, self.norm)).to(hidden.dtype)
        assert self.projection is not None
        state = x if every else x[:, :, 0]
        return plain_linear(self._norm(state, self.norm), self.projection).to(hidden.dtype)

    def _norm(self, x: Tensor, affine: Affine) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *affine, self.eps)

    def _layer(
        self, i: int, layer: TowerLayer, x: Tensor, change: Change, beside: Beside | None, class_token: bool
    ) -> Tensor:
        """The output of one layer; with class_token=True of the class token only."""
        (weight, bias), width = layer.qkv, x.shape[-1]
        x, normed = add_and_norm(x, None, layer.norm1, self.eps)
        queried = normed
        if class_token:
            x = x[:, :, :1]
            # recomputing the norm is cheaper than a mostly-zero gradient for all of `normed`
            queried = self._norm(x, layer.norm1)
            query = self._heads(project(queried, (weight[:width], bias[:width]), change, "q"), 1)
            parts = query + self._heads(project(normed, (weight[width:], bias[width:]), change, "k", "v"), 2)
        else:
            parts = self._heads(project(normed, layer.qkv, change, "q", "k", "v"), 3)
        rows = (max(map(len, parts)), x.shape[1])
        q, k, v = (p.expand(rows[0], -1, -1, -1, -1).flatten(0, 1).transpose(1, 2) for p in parts)
        mixed = torch.unflatten(attend(q, k, v).transpose(1, 2).flatten(2), 0, rows)
        x, normed = add_and_norm(x, project(mixed, layer.out, change, "out"), layer.norm2, self.eps)
        x = x + plain_linear(self.activation(plain_linear(normed, *layer.fc1)), *layer.fc2)
        return x if beside is None else x + beside(i, queried)

    def _heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[clients, rows, positions, parts × width] as a tuple of [clients, rows, positions, heads, head size]. Split
        before any transposition, so that the backward pass joins the gradients in one pass."""
        return torch.unflatten(x, -1, (parts, self.heads, -1)).unbind(-3)


def insert_tokens(x: Tensor, tokens: Tensor, replaced: int = 0) -> Tensor:
    """x [clients, examples, positions, width] with the tokens [clients, n, width] after its first position, where they
    replace the next `replaced` positions; 0: none."""
    clients = max(len(x), len(tokens))
    x = x.expand(clients, -1, -1, -1)
    new = tokens[:, None].expand(clients, x.shape[1], -1, -1)
    return torch.cat([x[:, :, :1], new, x[:, :, 1 + replaced :]], 2)


class Towers(NamedTuple):
    """A CLIP's two towers: `task.tower` of an adapter that asks for "both towers"."""

    image: ImageLayers  # all layers; image.last(n) for activations hidden@−n
    text: TextTower

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Towers:
        return Towers(self.image.to(dtype, device), self.text.to(dtype, device))


Tower = nn.Module | TextTower | Towers  # the module is hf.ImageTower, CLIP's image tower from raw pixels
