"""What CLIP's two towers are made of, as plain tensors, and the small trained changes that fit into a frozen layer.

A layer is x ← x + out(attend(q, k, v of norm₁ x)), then x ← x + fc₂(act(fc₁(norm₂ x))). Two changes:

- **low-rank** (LoRA, Hu et al., 2022): a projection W becomes W + scale · B A. Its parameters are named
  `{tower}.{i}.{projection}.A` [clients, rank, width] and `….B` [clients, width, rank], with tower `image` or `text`,
  projection q, k, v or out, and i = 0, 1, … the trained layers from the lowest up; the last of them is the tower's last.
- **beside** (adapters): a function of (i, norm₁ x) whose result is added to what layer i gives, i counted from the lowest
  layer that runs.

Everything has a client axis first; where that is 1, it serves all clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core import FedvlmError, Params

Affine = tuple[Tensor, Tensor]  # weight, bias
Change = Mapping[str, tuple[Tensor, Tensor]]  # projection → A, scale · B
Beside = Callable[[int, Tensor], Tensor]


class Layer(NamedTuple):
    norm1: Affine
    qkv: Affine
    out: Affine
    norm2: Affine
    fc1: Affine
    fc2: Affine

    def to(self, dtype: torch.dtype | None, device: torch.device | str | None) -> Layer:
        return Layer(*(moved(affine, dtype, device) for affine in self))


def moved(affine: Affine, dtype: torch.dtype | None, device: torch.device | str | None) -> Affine:
    weight, bias = (part.to(dtype=dtype or part.dtype, device=device) for part in affine)
    return weight, bias


def plain(*modules: Any) -> Affine:
    """Weight and bias, of several modules one behind the other."""
    weight, bias = ([getattr(m, part).detach() for m in modules] for part in ("weight", "bias"))
    return (torch.cat(weight), torch.cat(bias)) if len(modules) > 1 else (weight[0], bias[0])


def layers_of(encoder: Any) -> tuple[Layer, ...]:
    """Of a Hugging Face CLIP encoder, sharing its weights (but for the fused query, key and value)."""
    return tuple(
        Layer(
            plain(block.layer_norm1),
            plain(block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj),
            plain(block.self_attn.out_proj),
            plain(block.layer_norm2),
            plain(block.mlp.fc1),
            plain(block.mlp.fc2),
        )
        for block in encoder.layers
    )


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
    """Attention. On a CPU its backward pass is four times as slow in bfloat16 as in float32 (measured), so it is float32."""
    if query.dtype != torch.bfloat16 or query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    wide = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=seen)
    return wide.to(query.dtype)


def how_many(layers: int, have: int, tower: str) -> int:
    """The last so many layers of a tower; 0 is all of them."""
    if not 0 <= layers <= have:
        raise FedvlmError(f"layers={layers}: the {tower} tower has {have} layers; use layers=1 to {have}, or 0 for all")
    return layers or have


def changes(lora: Params | None, tower: str, layers: int, scale: float, like: Tensor) -> list[Change]:
    """The low-rank changes of each of a tower's layers, on the device and in the numbers of `like`; parameters of other
    names are no concern of this."""
    named = {tuple(k.split(".")[1:3]): k[:-2] for k in lora or {} if k.startswith(f"{tower}.") and k.endswith(".A")}
    trained = how_many(1 + max((int(i) for i, _ in named), default=-1), layers, tower) if named else 0
    found: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in range(layers)]
    for (i, projection), name in named.items():
        assert lora is not None
        down, up = lora[f"{name}.A"].to(like), lora[f"{name}.B"].to(like)
        found[layers - trained + int(i)][projection] = (down, up if scale == 1 else scale * up)
    return list(found)


def shift(out: Tensor, x: Tensor, change: Change, *projections: str) -> Tensor:
    """What these projections of x [clients, rows, places, width] gave, one behind the other, with their changes."""
    if not any(p in change for p in projections):
        return out
    parts = [
        part + low_rank(x, *change[p]) if p in change else part
        for p, part in zip(projections, out.chunk(len(projections), -1), strict=True)
    ]
    clients = max(map(len, parts))
    return parts[0] if len(parts) == 1 else torch.cat([p.expand(clients, -1, -1, -1) for p in parts], -1)


def low_rank(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return (x.flatten(1, 2) @ down.mT @ up.mT).unflatten(1, x.shape[1:3])


def split(x: Tensor, parts: int, heads: int) -> Tensor:
    """[clients, rows, places, parts × width] as [clients, rows, parts, heads, places, size of a head]."""
    return x.unflatten(-1, (parts, heads, -1)).permute(0, 1, 3, 4, 2, 5)
