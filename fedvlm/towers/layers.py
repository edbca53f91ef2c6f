"""The layers of CLIP's two towers as plain tensors, and the small trained changes that can be made to a frozen layer.

A layer is x ← x + out(attention(q, k, v of norm₁ x)), then x ← x + fc₂(act(fc₁(norm₂ x))). Two kinds of change:

- **low-rank** (LoRA, Hu et al., 2022): a projection W becomes W + scale · B A. The parameters are named
  `{tower}.{i}.{projection}.A` [clients, rank, width] and `….B` [clients, width, rank], with tower `image` or `text`,
  projection q, k, v or out, and i = 0, 1, … the trained layers in order; the highest i is the tower's last layer.
- **beside** (adapters): a function of (i, norm₁ x) whose result is added to the output of layer i, where layer 0 is the
  lowest that is run.

All tensors have a leading client axis; where its length is 1, the values are common to all clients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError
from fedvlm.towers.modules import ACTIVATIONS, Encoder, Layer, Sizes
from fedvlm.towers.products import plain_linear

Affine = tuple[Tensor, Tensor]  # weight, bias
LowRankPair = tuple[Tensor, Tensor]  # A [clients, rank, width], scale · B [clients, width, rank]
Change = Mapping[str, LowRankPair]  # low-rank changes of one layer, by projection
Beside = Callable[[int, Tensor], Tensor]


class TowerLayer(NamedTuple):
    norm1: Affine
    qkv: Affine
    out: Affine
    norm2: Affine
    fc1: Affine
    fc2: Affine

    def to(self, dtype: torch.dtype | None, device: torch.device | str | None) -> TowerLayer:
        return TowerLayer(*(affine_to(affine, dtype, device) for affine in self))


def affine_to(affine: Affine, dtype: torch.dtype | None, device: torch.device | str | None) -> Affine:
    weight, bias = (moved(part, dtype, device) for part in affine)
    return weight, bias


def moved(weight: Tensor, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
    """None leaves dtype or device as it is."""
    return weight.to(dtype=dtype or weight.dtype, device=device)


def affine_of(*modules: nn.Linear | nn.LayerNorm) -> Affine:
    """Weight and bias; those of several modules are concatenated."""
    weights, biases = ([getattr(m, part).detach() for m in modules] for part in ("weight", "bias"))
    return (torch.cat(weights), torch.cat(biases)) if len(modules) > 1 else (weights[0], biases[0])


def layers_of(encoder: Encoder, sizes: Sizes) -> tuple[TowerLayer, ...]:
    """The layers of an encoder. Weights are shared with it, except that query, key and value are concatenated and, with
    some activations (see `fast_activation`), fc₁ and fc₂ are rescaled."""
    factor = fast_activation(sizes.hidden_act)[1]
    return tuple(_layer_of(cast(Layer, layer), factor) for layer in encoder.layers)


def _layer_of(layer: Layer, factor: float) -> TowerLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return TowerLayer(
        affine_of(layer.layer_norm1),
        affine_of(attention.q_proj, attention.k_proj, attention.v_proj),
        affine_of(attention.out_proj),
        affine_of(layer.layer_norm2),
        rescaled(affine_of(mlp.fc1), factor, factor),
        rescaled(affine_of(mlp.fc2), 1 / factor, 1),
    )


def rescaled(affine: Affine, weight: float, bias: float) -> Affine:
    return affine if weight == 1 else (weight * affine[0], bias * affine[1])


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention. On a CPU the backward pass in bfloat16 takes four times as long as in float32
    (measured), so there float32 is used."""
    if query.dtype != torch.bfloat16 or query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    wide = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=mask)
    return wide.to(query.dtype)


def add_and_norm(x: Tensor, update: Tensor | None, norm: Affine, eps: float) -> tuple[Tensor, Tensor]:
    """x + update (None: x alone), and its layer norm, whose statistics have at least float32 precision."""
    if fast := kernels(x):
        return fast.fused_add_and_norm(x, update, *norm, eps)
    x = x if update is None else x + update
    return x, F.layer_norm(x, x.shape[-1:], *norm, eps)


class Kernels(Protocol):
    """The interface of the module `kernels`, which can only be imported where Triton is installed."""

    DTYPES: tuple[torch.dtype, ...]

    def probe(self, device: str = "cuda") -> None: ...

    def supports(self, x: Tensor, past: Tensor) -> bool: ...

    def fused_attend(self, qkv: Tensor, past: Tensor) -> Tensor: ...

    def fused_add_and_norm(
        self, x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...


def kernels(x: Tensor) -> Kernels | None:
    """The Triton kernels where x is on a GPU on which they work and has a dtype they support; else None."""
    found = triton_kernels() if x.is_cuda else None
    return found if found and x.dtype in found.DTYPES else None


@cache
def triton_kernels() -> Kernels | None:
    """None, with a warning, where Triton or the C compiler it needs is missing; PyTorch's operations are used then."""
    try:
        from fedvlm.towers import kernels

        kernels.probe()
    except Exception as error:
        warnings.warn(f"the Triton kernels do not work here, so prompts and layers are slower: {error}", stacklevel=2)
        return None
    return kernels


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy from the CPU that does not wait for the work queued on a GPU."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def layer_count(layers: int, available: int, tower: str) -> int:
    """`layers`, or all of the tower's where it is 0; an error where the tower has fewer."""
    if not 0 <= layers <= available:
        raise FedvlmError(
            f"layers={layers}: the {tower} tower has {available} layers; use layers=1 to {available}, or 0 for all"
        )
    return layers or available


def low_rank_changes(lora: Params | None, tower: str, layers: int, scale: float, like: Tensor) -> list[Change]:
    """The low-rank changes of each of a tower's layers, with the device and dtype of `like`. Parameters that are not
    named as above are ignored."""
    named = {tuple(k.split(".")[1:3]): k[:-2] for k in lora or {} if k.startswith(f"{tower}.") and k.endswith(".A")}
    trained = layer_count(1 + max((int(i) for i, _ in named), default=-1), layers, tower) if named else 0
    found: list[dict[str, LowRankPair]] = [{} for _ in range(layers)]
    for (i, projection), name in named.items():
        assert lora is not None
        down, up = lora[f"{name}.A"].to(like), lora[f"{name}.B"].to(like)
        found[layers - trained + int(i)][projection] = (down, up if scale == 1 else scale * up)
    return list(found)


def project(x: Tensor, affine: Affine, change: Change, *projections: str) -> Tensor:
    """The concatenated projections of x [clients, rows, positions, width], with their low-rank changes. `affine` holds
    the frozen weights of these projections, concatenated."""
    pairs = [change[p] for p in projections if p in change]
    if not pairs:
        return plain_linear(x, *affine)
    down = torch.cat([a for a, _ in pairs], 1)
    if x.is_cuda:  # pad the rank to a multiple of 8 for tensor cores
        down = F.pad(down, (0, 0, 0, -down.shape[1] % 8))
    rank, width, at, rows = down.shape[1], len(affine[0]) // len(projections), 0, []
    for p in projections:  # block-diagonal B, zero elsewhere
        up = change[p][1] if p in change else down.new_zeros(len(down), width, 0)
        rows.append(F.pad(up, (at, rank - at - up.shape[2])))
        at += up.shape[2]
    return low_rank(x, *affine, down, torch.cat(rows, 1))


class LowRankContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class LowRankProduct(torch.autograd.Function):
    """x Wᵀ + b + (x Aᵀ) Bᵀ per client, W and b frozen. Written by hand to save passes over tensors of the size of x:
    the low-rank term is added in place to the output, and to the gradient of x."""

    @staticmethod
    def forward(ctx: LowRankContext, x: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor) -> Tensor:
        inner = x.flatten(1, 2) @ down.mT
        ctx.save_for_backward(x, weight, down, up, inner)
        out = add_product(plain_linear(x, weight, bias).flatten(1, 2), inner, up.mT)
        return torch.unflatten(out, 1, x.shape[1:3])

    @staticmethod
    @once_differentiable
    def backward(ctx: LowRankContext, grad_out: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor]:
        x, weight, down, up, inner = ctx.saved_tensors
        rows = grad_out.shape[1:3]
        grad_inner = grad_out.flatten(1, 2) @ up
        grad_down = transposed_product(torch.unflatten(grad_inner, 1, rows), x).sum_to_size(down.shape)
        grad_up = transposed_product(grad_out, torch.unflatten(inner, 1, rows)).sum_to_size(up.shape)
        grad_x = None
        if ctx.needs_input_grad[0]:
            flat = add_product(plain_linear(grad_out, weight.mT).flatten(1, 2), grad_inner, down)
            grad_x = torch.unflatten(flat, 1, rows).sum_to_size(x.shape)
        return grad_x, None, None, grad_down, grad_up


low_rank: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = LowRankProduct.apply


def add_product(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """out + x @ weight per client; in place, unless `out` is common to several clients."""
    clients = max(len(out), len(x), len(weight))
    x, weight = (part.expand(clients, -1, -1) for part in (x, weight))
    return out.baddbmm_(x, weight) if len(out) == clients else torch.baddbmm(out, x, weight)


def transposed_product(one: Tensor, other: Tensor) -> Tensor:
    """oneᵀ other, summed over a client's rows and positions. The result is small and the sum long, which leaves most of
    a GPU idle, so there it is computed row by row."""
    if one.is_cuda:
        return (one.mT @ other).sum(1)
    return one.flatten(1, 2).mT @ other.flatten(1, 2)


def fast_activation(name: str) -> tuple[Callable[[Tensor], Tensor], float]:
    """An activation f and a factor a such that the given one is x ↦ f(a x)/a; a and 1/a are moved into fc₁ and fc₂.

    CLIP's x σ(1.702 x) takes three passes over memory forward and five backward; silu, x σ(x), takes one each."""
    return (F.silu, 1.702) if name == "quick_gelu" else (ACTIVATIONS[name], 1.0)


def split_heads(x: Tensor, parts: int, heads: int) -> Tensor:
    """[clients, rows, positions, parts × width] as [clients, rows, parts, heads, positions, head size]."""
    return torch.unflatten(x, -1, (parts, heads, -1)).permute(0, 1, 3, 4, 2, 5)
