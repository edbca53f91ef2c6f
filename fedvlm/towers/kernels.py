"""Two operations of a transformer layer on a GPU, in Triton. They equal PyTorch's up to rounding, with fewer passes
over memory.

**Causal attention of many short sequences behind a common prefix**: the prompts of all classes, after the context that
they share. General attention kernels use tiles of 64 × 128 positions, and a prompt has 5 to 25. Here a program computes
one head of the few whole prompts that fit into a tile of 64 positions. Attention weights stay in registers and are
recomputed in the backward pass. The prefix's keys and values are not copied for each prompt; queries, keys and values
are read from the concatenated projection, and their gradients are written in the same layout.

**Addition and layer norm**: x + update and the layer norm of the sum in one pass, and one pass backward. The weights of
the norm are frozen.

A result does not depend on what else is in the batch, and sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

TILE = 64  # positions that one program computes: as many whole sequences as fit
HEAD_SIZES = (16, 32, 64, 128)
DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
# those with tensor cores for products this small; for others PyTorch is faster
ATTENTION_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16,)

if TYPE_CHECKING:  # Triton comes without types

    class Kernel(Protocol):
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]: ...

        def __call__(self, *arguments: tl.tensor) -> tuple[tl.tensor, ...]: ...  # from within another kernel

    def jit(function: Callable[..., object]) -> Kernel: ...
else:
    jit = triton.jit


def probe(device: str = "cuda") -> None:
    """Runs every kernel once on tiny inputs. Fails where a compiler is missing or the device is not supported."""
    with torch.enable_grad():
        qkv = torch.zeros(1, 1, 2, 48, device=device, dtype=ATTENTION_DTYPES[0], requires_grad=True)
        past, ones = (
            torch.zeros(*shape, device=device, dtype=ATTENTION_DTYPES[0]) for shape in ((1, 1, 2, 1, 1, 16), (16,))
        )
        torch.autograd.grad(fused_add_and_norm(fused_attend(qkv, past), None, ones, ones, 1e-5)[1].sum(), qkv)


def supports(x: Tensor, past: Tensor) -> bool:
    """Whether `fused_attend` can be used, and is fast, for x [clients, rows, positions, …] behind this past."""
    return (
        x.dtype in ATTENTION_DTYPES and x.shape[2] <= TILE and past.shape[-2] <= TILE and past.shape[-1] in HEAD_SIZES
    )


def fused_attend(qkv: Tensor, past: Tensor) -> Tensor:
    """Causal attention, [clients, rows, positions, width].

    qkv [clients or 1, rows, positions, 3 × width]: queries, keys and values. past [clients or 1, 1, 2, heads, past
    length, head size]: keys and values of the prefix, which all positions of all rows of a client attend to."""
    clients, (_, rows, positions, width) = max(len(qkv), len(past)), qkv.shape
    flat = qkv.reshape(len(qkv), rows * positions, width).expand(clients, -1, -1)
    mixed = _short_attention(flat, past[:, 0].expand(clients, -1, -1, -1, -1), positions)
    return torch.unflatten(mixed, 1, (rows, positions))


class AttentionContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    positions: int


class ShortAttention(torch.autograd.Function):
    """Attention of concatenated sequences, [clients, rows × positions, …]."""

    @staticmethod
    def forward(ctx: AttentionContext, qkv: Tensor, past: Tensor, positions: int) -> Tensor:
        ctx.save_for_backward(qkv, past)
        ctx.positions = positions
        out = qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)
        launch = _launch(qkv, past, positions)
        _attention_forward[launch.grid](qkv, past, out, *launch.sizes, **launch.constants)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: AttentionContext, grad_out: Tensor) -> tuple[Tensor, Tensor | None, None]:
        qkv, past = ctx.saved_tensors
        launch = _launch(qkv, past, ctx.positions)
        past_needed, grad_qkv = ctx.needs_input_grad[1], qkv.new_empty(qkv.shape)
        # each tile writes its own part of the prefix's gradient; these are summed afterwards, in a fixed order
        shape = (len(qkv), launch.grid[0] // len(qkv), *past.shape[1:])
        grad_past = past.new_empty(shape, dtype=torch.float32) if past_needed else past
        _attention_backward[launch.grid](
            qkv, past, grad_out.contiguous(), grad_qkv, grad_past, *launch.sizes, **launch.constants, PAST=past_needed
        )
        return grad_qkv, grad_past.sum(1).to(past.dtype) if past_needed else None, None


_short_attention: Callable[[Tensor, Tensor, int], Tensor] = ShortAttention.apply


class Launch(NamedTuple):
    grid: tuple[int, int]  # clients × tiles, heads
    sizes: tuple[int | float, ...]  # the arguments `total` to `past_position_stride` of the kernels
    constants: dict[str, int]  # compile-time sizes of tiles


def _launch(qkv: Tensor, past: Tensor, positions: int) -> Launch:
    if qkv.stride(2) != 1 or past.stride(4) != 1:
        raise ValueError("the last axis of qkv and past must be contiguous")
    used = TILE // positions * positions  # positions of a tile that hold whole sequences
    sizes = (qkv.shape[1], positions, used, past.shape[3], past.shape[4] ** -0.5)
    constants = {"HEADS": past.shape[2], "SIZE": past.shape[4], "POSITIONS": TILE}
    constants["PAST_POSITIONS"] = max(16, triton.next_power_of_2(past.shape[3]))  # tl.dot needs at least 16 rows
    grid = (len(qkv) * triton.cdiv(qkv.shape[1], used), past.shape[2])
    return Launch(grid, (*sizes, *qkv.stride()[:2], *past.stride()[:4]), constants)


@jit
def _load_tile(
    qkv: tl.tensor, past: tl.tensor, total: tl.tensor, used: tl.tensor, past_length: tl.tensor,
    client_stride: tl.tensor, position_stride: tl.tensor,
    past_client_stride: tl.tensor, past_part_stride: tl.tensor, past_head_stride: tl.tensor,
    past_position_stride: tl.tensor,
    HEADS: tl.constexpr, SIZE: tl.constexpr, POSITIONS: tl.constexpr, PAST_POSITIONS: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """The rows of a program's positions in the output, which of them exist, and the values there: query, key, value,
    and the prefix's keys and values."""
    tiles, head = tl.cdiv(total, used), tl.program_id(1)
    client, first = (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles).to(tl.int64) * used
    p, b, s = tl.arange(0, POSITIONS)[:, None], tl.arange(0, PAST_POSITIONS)[:, None], tl.arange(0, SIZE)[None, :]
    at_past = past + client * past_client_stride + head * past_head_stride + b * past_position_stride + s
    past_key = tl.load(at_past, mask=b < past_length, other=0.0)
    past_value = tl.load(at_past + past_part_stride, mask=b < past_length, other=0.0)
    exists = (p < used) & (first + p < total)
    at = qkv + client * client_stride + (first + p) * position_stride + head * SIZE + s
    query = tl.load(at, mask=exists, other=0.0)
    key = tl.load(at + HEADS * SIZE, mask=exists, other=0.0)
    value = tl.load(at + 2 * HEADS * SIZE, mask=exists, other=0.0)
    return client * total + first + p, exists, query, key, value, past_key, past_value


@jit
def _attention_weights(
    query: tl.tensor, key: tl.tensor, past_key: tl.tensor,
    positions: tl.tensor, past_length: tl.tensor, scale: tl.tensor,
    POSITIONS: tl.constexpr, PAST_POSITIONS: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Softmax weights of each position for the positions of its own sequence, and for those of the prefix."""
    p, b = tl.arange(0, POSITIONS), tl.arange(0, PAST_POSITIONS)
    own = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    same = (p // positions)[:, None] == (p // positions)[None, :]
    own = tl.where(same & (p[:, None] >= p[None, :]), own, float("-inf"))
    old = tl.dot(query, tl.trans(past_key), input_precision="ieee") * scale
    old = tl.where((b < past_length)[None, :], old, float("-inf"))
    largest = tl.maximum(tl.max(own, 1), tl.max(old, 1))[:, None]
    own, old = tl.exp(own - largest), tl.exp(old - largest)
    normaliser = (tl.sum(own, 1) + tl.sum(old, 1))[:, None]
    return own / normaliser, old / normaliser


@jit
def _attention_forward(
    qkv: tl.tensor, past: tl.tensor, out: tl.tensor,
    total: tl.tensor, positions: tl.tensor, used: tl.tensor, past_length: tl.tensor, scale: tl.tensor,
    client_stride: tl.tensor, position_stride: tl.tensor,
    past_client_stride: tl.tensor, past_part_stride: tl.tensor, past_head_stride: tl.tensor,
    past_position_stride: tl.tensor,
    HEADS: tl.constexpr, SIZE: tl.constexpr, POSITIONS: tl.constexpr, PAST_POSITIONS: tl.constexpr,
) -> None:  # fmt: skip
    row, exists, query, key, value, past_key, past_value = _load_tile(
        qkv, past, total, used, past_length, client_stride, position_stride,
        past_client_stride, past_part_stride, past_head_stride, past_position_stride,
        HEADS, SIZE, POSITIONS, PAST_POSITIONS,
    )  # fmt: skip
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)[None, :]
    own, old = _attention_weights(query, key, past_key, positions, past_length, scale, POSITIONS, PAST_POSITIONS)
    mixed = tl.dot(own.to(value.dtype), value, input_precision="ieee")
    mixed += tl.dot(old.to(value.dtype), past_value, input_precision="ieee")
    tl.store(out + row * (HEADS * SIZE) + at, mixed.to(value.dtype), mask=exists)


@jit
def _attention_backward(
    qkv: tl.tensor, past: tl.tensor, grad_out: tl.tensor, grad_qkv: tl.tensor, grad_past: tl.tensor,
    total: tl.tensor, positions: tl.tensor, used: tl.tensor, past_length: tl.tensor, scale: tl.tensor,
    client_stride: tl.tensor, position_stride: tl.tensor,
    past_client_stride: tl.tensor, past_part_stride: tl.tensor, past_head_stride: tl.tensor,
    past_position_stride: tl.tensor,
    HEADS: tl.constexpr, SIZE: tl.constexpr, POSITIONS: tl.constexpr, PAST_POSITIONS: tl.constexpr,
    PAST: tl.constexpr,
) -> None:  # fmt: skip
    """grad_past is written only where PAST."""
    row, exists, query, key, value, past_key, past_value = _load_tile(
        qkv, past, total, used, past_length, client_stride, position_stride,
        past_client_stride, past_part_stride, past_head_stride, past_position_stride,
        HEADS, SIZE, POSITIONS, PAST_POSITIONS,
    )  # fmt: skip
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)[None, :]
    grad = tl.load(grad_out + row * (HEADS * SIZE) + at, mask=exists, other=0.0)
    own, old = _attention_weights(query, key, past_key, positions, past_length, scale, POSITIONS, PAST_POSITIONS)
    grad_own = tl.dot(grad, tl.trans(value), input_precision="ieee")
    grad_old = tl.dot(grad, tl.trans(past_value), input_precision="ieee")
    mean = (tl.sum(own * grad_own, 1) + tl.sum(old * grad_old, 1))[:, None]
    grad_own = (own * (grad_own - mean) * scale).to(key.dtype)  # from here on: gradients of the scores
    grad_old = (old * (grad_old - mean) * scale).to(key.dtype)
    own, old = own.to(key.dtype), old.to(key.dtype)
    to = grad_qkv + row * (3 * HEADS * SIZE) + at
    grad_query = tl.dot(grad_own, key, input_precision="ieee") + tl.dot(grad_old, past_key, input_precision="ieee")
    tl.store(to, grad_query.to(key.dtype), mask=exists)
    grad_key = tl.dot(tl.trans(grad_own), query, input_precision="ieee")
    tl.store(to + HEADS * SIZE, grad_key.to(key.dtype), mask=exists)
    grad_value = tl.dot(tl.trans(own), grad, input_precision="ieee")
    tl.store(to + 2 * HEADS * SIZE, grad_value.to(key.dtype), mask=exists)
    if PAST:
        b, s = tl.arange(0, PAST_POSITIONS)[:, None], tl.arange(0, SIZE)[None, :]
        to = grad_past + ((tl.program_id(0).to(tl.int64) * 2 * HEADS + tl.program_id(1)) * past_length + b) * SIZE + s
        tl.store(to, tl.dot(tl.trans(grad_old), query, input_precision="ieee"), mask=b < past_length)
        grad_past_value = tl.dot(tl.trans(old), grad, input_precision="ieee")
        tl.store(to + HEADS * past_length * SIZE, grad_past_value, mask=b < past_length)


def fused_add_and_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + update (None: x alone), and its layer norm."""
    if update is not None and update.shape != x.shape:
        x, update = x + update, None
    return _add_and_norm(x, update, weight, bias, eps)


class NormContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    has_update: bool


class AddAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: NormContext, x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.has_update, x, width = update is not None, x.contiguous(), x.shape[-1]
        total, normed = torch.empty_like(x) if ctx.has_update else x, torch.empty_like(x)
        stats = x.new_empty(x.numel() // width, 2, dtype=torch.float32)
        added = x if update is None else update.contiguous()
        constants = {"WIDTH": triton.next_power_of_2(width), "UPDATE": ctx.has_update}
        _norm_forward[(len(stats),)](x, added, weight, bias, total, normed, stats, width, eps, **constants)
        ctx.save_for_backward(total, weight, stats)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: NormContext, grad_total: Tensor | None, grad_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, stats = ctx.saved_tensors
        grad = grad_total
        if grad_normed is not None:
            grad, width, grad_normed = torch.empty_like(total), total.shape[-1], grad_normed.contiguous()
            direct = grad_normed if grad_total is None else grad_total.contiguous()
            constants = {"WIDTH": triton.next_power_of_2(width), "DIRECT": grad_total is not None}
            _norm_backward[(len(stats),)](total, weight, stats, direct, grad_normed, grad, width, **constants)
        return grad, grad if ctx.has_update else None, None, None, None


_add_and_norm: Callable[[Tensor, Tensor | None, Tensor, Tensor, float], tuple[Tensor, Tensor]] = AddAndNorm.apply


@jit
def _norm_forward(
    x: tl.tensor, update: tl.tensor, weight: tl.tensor, bias: tl.tensor,
    total: tl.tensor, normed: tl.tensor, stats: tl.tensor, width: tl.tensor, eps: tl.tensor,
    WIDTH: tl.constexpr, UPDATE: tl.constexpr,
) -> None:  # fmt: skip
    """One row. `update` is read, and `total` written, only where UPDATE."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    exists, place = at < width, row * width + at
    value = tl.load(x + place, mask=exists, other=0.0)
    if UPDATE:
        value += tl.load(update + place, mask=exists, other=0.0)
        tl.store(total + place, value, mask=exists)
    wide = value.to(tl.float32)
    mean = tl.sum(wide, 0) / width
    centred = tl.where(exists, wide - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    scale = tl.load(weight + at, mask=exists, other=0.0).to(tl.float32)
    shift = tl.load(bias + at, mask=exists, other=0.0).to(tl.float32)
    tl.store(normed + place, (centred * inverse * scale + shift).to(value.dtype), mask=exists)
    tl.store(stats + 2 * row, mean)
    tl.store(stats + 2 * row + 1, inverse)


@jit
def _norm_backward(
    total: tl.tensor, weight: tl.tensor, stats: tl.tensor, grad_total: tl.tensor, grad_normed: tl.tensor,
    grad: tl.tensor, width: tl.tensor, WIDTH: tl.constexpr, DIRECT: tl.constexpr,
) -> None:  # fmt: skip
    """One row. The gradient `grad_total`, which does not pass through the norm, is added only where DIRECT."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    exists, place = at < width, row * width + at
    mean, inverse = tl.load(stats + 2 * row), tl.load(stats + 2 * row + 1)
    value = tl.load(total + place, mask=exists, other=0.0)
    unit = tl.where(exists, (value.to(tl.float32) - mean) * inverse, 0.0)
    grad_unit = tl.load(grad_normed + place, mask=exists, other=0.0).to(tl.float32)
    grad_unit *= tl.load(weight + at, mask=exists, other=0.0).to(tl.float32)
    out = inverse * (grad_unit - tl.sum(grad_unit, 0) / width - unit * (tl.sum(grad_unit * unit, 0) / width))
    if DIRECT:
        out += tl.load(grad_total + place, mask=exists, other=0.0).to(tl.float32)
    tl.store(grad + place, out.to(value.dtype), mask=exists)
