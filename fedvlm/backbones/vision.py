"""The last layers of a CLIP's image tower as a function of small trained changes, from stored activations (`hidden@−n`).

What lies below the first trained layer is the same in every step of every round, so it is computed once and kept; here
runs the rest. Only the class token's state after the last layer is read, so in that layer only its query is asked, and
nothing changes but rounding. The weights get no gradient.

    top = VisionTop.of(model, layers)                 the last layers of a Hugging Face CLIPModel; 0: all
    z = top.features(hidden, lora, scale)             [clients, examples, dim], not yet normalised

Clients lie side by side along the first axis; a client's result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.backbones.layers import (
    Affine,
    Beside,
    Change,
    Layer,
    attend,
    changes,
    how_many,
    layers_of,
    moved,
    plain,
    project,
    settle,
    smooth,
)
from fedvlm.backbones.text import TextTower
from fedvlm.core import Params


@dataclass(frozen=True, eq=False)
class VisionTop:
    layers: tuple[Layer, ...]
    norm: Affine  # after the last layer, of the class token
    projection: Tensor  # [dim, width]
    heads: int
    eps: float
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, model: Any, layers: int = 0) -> VisionTop:
        """The last layers of a Hugging Face CLIPModel's image tower; 0: all."""
        vision = model.vision_model
        whole = cls(
            layers_of(vision.encoder),
            plain(vision.post_layernorm),
            model.visual_projection.weight.detach(),
            vision.config.num_attention_heads,
            vision.config.layer_norm_eps,
            smooth(vision.encoder.layers[0].mlp.activation_fn)[0],
        )
        return whole.last(layers)

    def last(self, layers: int) -> VisionTop:
        """Its last so many layers, for activations hidden@−layers; 0: all, for hidden@0."""
        return replace(self, layers=self.layers[-how_many(layers, len(self.layers), "image") :])

    @property
    def width(self) -> int:
        return int(self.projection.shape[1])

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> VisionTop:
        return replace(
            self,
            layers=tuple(layer.to(dtype, device) for layer in self.layers),
            norm=moved(self.norm, dtype, device),
            projection=self.projection.to(dtype=dtype or self.projection.dtype, device=device),
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
        """Embeddings [clients, examples, dim], not yet normalised, of activations [clients or 1, examples, 1 + patches,
        width] that enter the first of these layers. Computed in the weights' numbers, given in the activations'.

        lora: low-rank changes of the last layers, named as in `layers.py` (`image.0.q.A`, …); other names are ignored.
        tokens [clients or 1, depth, n, width]: n more tokens after the class token, new ones at each of the first `depth`
        layers; later layers go on with what became of the last. They have no place of their own, so their order is free.
        beside: something added to each layer's result (see `layers.py`).
        every: the embeddings of all tokens, [clients, examples, 1 + n + patches, dim].
        """
        x, last = hidden.to(self.projection), len(self.layers) - 1
        changed = changes(lora, "image", len(self.layers), scale, self.projection)
        for i, (layer, change) in enumerate(zip(self.layers, changed, strict=True)):
            if tokens is not None and i < tokens.shape[1]:
                x = insert(x, tokens[:, i].to(x), tokens.shape[2] if i else 0)
            x = self._layer(i, layer, x, change, beside, i == last and not every)
        state = x if every else x[:, :, 0]
        return F.linear(self._norm(state, self.norm), self.projection).to(hidden.dtype)

    def _norm(self, x: Tensor, affine: Affine) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *affine, self.eps)

    def _layer(self, i: int, layer: Layer, x: Tensor, change: Change, beside: Beside | None, one: bool) -> Tensor:
        """One layer, of the class token alone where that is all that is read."""
        (weight, bias), width = layer.qkv, x.shape[-1]
        x, normed = settle(x, None, layer.norm1, self.eps)
        asking = normed
        if one:
            x = x[:, :, :1]
            asking = self._norm(x, layer.norm1)  # again: less than a slope in all of `normed` that is zero but there
            asked = self._heads(project(asking, (weight[:width], bias[:width]), change, "q"), 1)
            parts = asked + self._heads(project(normed, (weight[width:], bias[width:]), change, "k", "v"), 2)
        else:
            parts = self._heads(project(normed, layer.qkv, change, "q", "k", "v"), 3)
        rows = (max(map(len, parts)), x.shape[1])
        query, key, value = (p.expand(rows[0], -1, -1, -1, -1).flatten(0, 1).transpose(1, 2) for p in parts)
        mixed = attend(query, key, value).transpose(1, 2).flatten(2).unflatten(0, rows)
        x, normed = settle(x, project(mixed, layer.out, change, "out"), layer.norm2, self.eps)
        x = x + F.linear(self.activation(F.linear(normed, *layer.fc1)), *layer.fc2)
        return x if beside is None else x + beside(i, asking)

    def _heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[clients, rows, places, parts × width] as so many [clients, rows, places, heads, size of a head]; taken apart
        here, before anything is turned, so that slopes come together in one pass."""
        return x.unflatten(-1, (parts, self.heads, -1)).unbind(-3)


def insert(x: Tensor, tokens: Tensor, instead: int = 0) -> Tensor:
    """x [clients, examples, places, width] with these tokens [clients, n, width] behind the first place, `instead` of so
    many that stand there."""
    clients = max(len(x), len(tokens))
    x = x.expand(clients, -1, -1, -1)
    new = tokens[:, None].expand(clients, x.shape[1], -1, -1)
    return torch.cat([x[:, :, :1], new, x[:, :, 1 + instead :]], 2)


class Both(NamedTuple):
    """A CLIP's two towers: what an adapter gets as `task.tower` where it `needs` "both towers"."""

    image: VisionTop  # all layers; image.last(n) for activations hidden@−n
    text: TextTower

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Both:
        return Both(self.image.to(dtype, device), self.text.to(dtype, device))
