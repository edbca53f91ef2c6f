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

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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
    """Of a Hugging Face CLIP encoder, sharing its weights but for the fused query, key and value and, with some
    activations (see `smooth`), fc₁ and fc₂."""
    return tuple(
        Layer(
            plain(block.layer_norm1),
            plain(block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj),
            plain(block.self_attn.out_proj),
            plain(block.layer_norm2),
            scaled(plain(block.mlp.fc1), factor, factor),
            scaled(plain(block.mlp.fc2), 1 / factor, 1),
        )
        for block, factor in ((b, smooth(b.mlp.activation_fn)[1]) for b in encoder.layers)
    )


def scaled(affine: Affine, weight: float, bias: float) -> Affine:
    return affine if weight == 1 else (weight * affine[0], bias * affine[1])


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
    """Attention. On a CPU its backward pass is four times as slow in bfloat16 as in float32 (measured), so it is float32."""
    if query.dtype != torch.bfloat16 or query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    wide = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=seen)
    return wide.to(query.dtype)


def settle(x: Tensor, more: Tensor | None, norm: Affine, eps: float) -> tuple[Tensor, Tensor]:
    """x + more, and its norm (statistics in float32 at least, whatever x is)."""
    if fast := kernels(x):
        return fast.settle(x, more, *norm, eps)  # type: ignore[no-any-return]
    x = x if more is None else x + more
    return x, F.layer_norm(x, x.shape[-1:], *norm, eps)


def kernels(x: Tensor) -> Any:
    """Steps of our own for a GPU, where they work and x is of their numbers."""
    found = in_triton() if x.is_cuda else None
    return found if found and x.dtype in found.NUMBERS else None


@cache
def in_triton() -> Any:
    """torch brings Triton along, but not everywhere, nor the C compiler it needs: without, torch's own steps serve."""
    try:
        from fedvlm.backbones import kernels

        kernels.probe()
    except Exception as error:
        warnings.warn(f"no GPU kernels of our own, so prompts and layers are slower: {error}", stacklevel=2)
        return None
    return kernels


def sent(x: Tensor, device: torch.device) -> Tensor:
    """To a device without waiting for what it is still at."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


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


def project(x: Tensor, affine: Affine, change: Change, *projections: str) -> Tensor:
    """These projections of x [clients, rows, places, width], one behind the other, with their changes."""
    mine = [change[p] for p in projections if p in change]
    if not mine:
        return F.linear(x, *affine)
    down = torch.cat([part for part, _ in mine], 1)
    if x.is_cuda:  # whose fast products come in eights
        down = F.pad(down, (0, 0, 0, -down.shape[1] % 8))
    rank, each, at, rows = down.shape[1], len(affine[0]) // len(projections), 0, []
    for p in projections:  # a row of blocks for each: its own up, between nothing
        up = change[p][1] if p in change else down.new_zeros(len(down), each, 0)
        rows.append(F.pad(up, (at, rank - at - up.shape[2])))
        at += up.shape[2]
    return LowRank.apply(x, *affine, down, torch.cat(rows, 1))  # type: ignore[no-any-return]


class LowRank(torch.autograd.Function):
    """x Wᵀ + b + (x Aᵀ) Bᵀ by client, W and b frozen. By hand, for what autograd would do in passes over all of x: the
    change is added where the product already lies, and of each slope there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor) -> Tensor:
        inner = x.flatten(1, 2) @ down.mT
        ctx.save_for_backward(x, weight, down, up, inner)
        out = added(F.linear(x, weight, bias).flatten(1, 2), inner, up.mT)
        return out.unflatten(1, x.shape[1:3])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor]:
        x, weight, down, up, inner = ctx.saved_tensors
        places = slope.shape[1:3]
        back = slope.flatten(1, 2) @ up
        of_down = across(back.unflatten(1, places), x).sum_to_size(down.shape)
        of_up = across(slope, inner.unflatten(1, places)).sum_to_size(up.shape)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = added((slope @ weight).flatten(1, 2), back, down).unflatten(1, places).sum_to_size(x.shape)
        return of_x, None, None, of_down, of_up


def added(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """out + x @ weight, client by client; in place where out is not common to clients."""
    clients = max(len(out), len(x), len(weight))
    x, weight = (part.expand(clients, -1, -1) for part in (x, weight))
    return out.baddbmm_(x, weight) if len(out) == clients else torch.baddbmm(out, x, weight)


def across(one: Tensor, other: Tensor) -> Tensor:
    """oneᵀ other over a client's rows and places. Such a product is narrow and deep: a GPU needs it in pieces, a row each,
    to be busy."""
    if one.is_cuda:
        return (one.mT @ other).sum(1)
    return one.flatten(1, 2).mT @ other.flatten(1, 2)


def smooth(activation: Any) -> tuple[Callable[[Tensor], Tensor], float]:
    """An activation f and a factor a, to be put into the weights before and taken out behind: the given one is f(a x)/a.
    CLIP's x σ(1.702 x) is three passes forward and five back; silu, x σ(x), is one each."""
    return (F.silu, 1.702) if type(activation).__name__ == "QuickGELUActivation" else (activation, 1.0)


def split(x: Tensor, parts: int, heads: int) -> Tensor:
    """[clients, rows, places, parts × width] as [clients, rows, parts, heads, places, size of a head]."""
    return x.unflatten(-1, (parts, heads, -1)).permute(0, 1, 3, 4, 2, 5)
