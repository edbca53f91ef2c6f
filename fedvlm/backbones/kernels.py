"""Two steps of a layer on a GPU, in Triton, where torch's own take several passes over memory. Exact but for rounding.

**Attention of very many short sequences**: prompts, which look back at a prefix that others share. Tiles of general
attention are 64 × 128 places, and a prompt has 5 to 25. Here a program takes one head of a few prompts, each as a whole:
weights never leave the registers, and for slopes are worked out again. The prefix's keys and values are not copied to each
prompt; queries, keys and values are read where their product left them, one behind the other, and their slopes written so.

**The residual and its norm**: x + more and the layer norm of that in one pass, and one back. Weights are frozen.

A result does not depend on its neighbours, and sums have a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 64  # places that are worked on together: as many sequences as fit
SIZES = (16, 32, 64, 128)  # of a head
NUMBERS = (torch.bfloat16, torch.float32)
QUICK = (torch.bfloat16,)  # whose small products a GPU has units for


def probe(device: str = "cuda") -> None:
    """Does everything once, on next to nothing: an error where a compiler is lacking, or the device is not known."""
    with torch.enable_grad():
        asked = torch.zeros(1, 1, 2, 48, device=device, dtype=QUICK[0], requires_grad=True)
        past, one = (torch.zeros(*shape, device=device, dtype=QUICK[0]) for shape in ((1, 1, 2, 1, 1, 16), (16,)))
        torch.autograd.grad(settle(attend(asked, past), None, one, one, 1e-5)[1].sum(), asked)


def short(x: Tensor, past: Tensor) -> bool:
    """Whether `attend` is the way to do it, for x [clients, rows, places, …] behind this past."""
    return x.dtype in QUICK and x.shape[2] <= TILE and past.shape[-2] <= TILE and past.shape[-1] in SIZES


def attend(asked: Tensor, past: Tensor) -> Tensor:
    """asked [clients or 1, rows, places, 3 × width]: queries, keys and values; past [clients or 1, 1, 2, heads, before,
    size]: the keys and values that all rows of a client see besides. Gives what each place sees, [clients, rows, places,
    width]."""
    clients, (_, rows, places, width) = max(len(asked), len(past)), asked.shape
    flat = asked.reshape(len(asked), rows * places, width).expand(clients, -1, -1)
    mixed = Short.apply(flat, past[:, 0].expand(clients, -1, -1, -1, -1), places)
    return mixed.unflatten(1, (rows, places))  # type: ignore[no-any-return]


class Short(torch.autograd.Function):
    """Of sequences that lie one behind the other."""

    @staticmethod
    def forward(ctx: Any, asked: Tensor, past: Tensor, places: int) -> Tensor:
        ctx.save_for_backward(asked, past)
        ctx.places = places
        out = asked.new_empty(*asked.shape[:2], asked.shape[2] // 3)
        grid, sizes, shapes = _launch(asked, past, places)
        _forward[grid](asked, past, out, *sizes, **shapes)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor | None, None]:
        asked, past = ctx.saved_tensors
        grid, sizes, shapes = _launch(asked, past, ctx.places)
        wanted, of_asked = ctx.needs_input_grad[1], asked.new_empty(asked.shape)
        each = (len(asked), grid[0] // len(asked), *past.shape[1:])
        parts = past.new_empty(each, dtype=torch.float32) if wanted else past
        _backward[grid](asked, past, slope.contiguous(), of_asked, parts, *sizes, **shapes, WANTED=wanted)
        return of_asked, parts.sum(1).to(past.dtype) if wanted else None, None


def _launch(asked: Tensor, past: Tensor, places: int) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """The grid of programs; counts, the scale of scores and how far apart things lie; the shapes of tiles."""
    if asked.stride(2) != 1 or past.stride(4) != 1:
        raise ValueError("a head's numbers must lie side by side")
    whole = TILE // places * places  # what of a tile is used
    counts = (asked.shape[1], places, whole, past.shape[3], past.shape[4] ** -0.5)
    shapes = {"HEADS": past.shape[2], "SIZE": past.shape[4], "PLACES": TILE}
    shapes |= {"BEFORE": max(16, triton.next_power_of_2(past.shape[3]))}  # a product has 16 rows at least
    grid = (len(asked) * triton.cdiv(asked.shape[1], whole), past.shape[2])
    return grid, (*counts, *asked.stride()[:2], *past.stride()[:4]), shapes


@triton.jit
def _gather(
    asked, past, every, whole, before, of_client, of_place, past_client, past_part, past_head, past_place,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PLACES: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """A program's places, which of them there are, and what lies there: query, key, value, and the prefix's two."""
    tiles, head = tl.cdiv(every, whole), tl.program_id(1)
    client, first = (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles).to(tl.int64) * whole
    p, b, s = tl.arange(0, PLACES)[:, None], tl.arange(0, BEFORE)[:, None], tl.arange(0, SIZE)[None, :]
    at_old = past + client * past_client + head * past_head + b * past_place + s
    old_key = tl.load(at_old, mask=b < before, other=0.0)
    old_value = tl.load(at_old + past_part, mask=b < before, other=0.0)
    here = (p < whole) & (first + p < every)
    at = asked + client * of_client + (first + p) * of_place + head * SIZE + s
    query = tl.load(at, mask=here, other=0.0)
    key = tl.load(at + HEADS * SIZE, mask=here, other=0.0)
    value = tl.load(at + 2 * HEADS * SIZE, mask=here, other=0.0)
    return client * every + first + p, here, query, key, value, old_key, old_value


@triton.jit
def _weights(query, key, old_key, places, before, scale, PLACES: tl.constexpr, BEFORE: tl.constexpr):
    """Of a sequence's own places and of the prefix, for each place."""
    p, b = tl.arange(0, PLACES), tl.arange(0, BEFORE)
    own = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    same = (p // places)[:, None] == (p // places)[None, :]
    own = tl.where(same & (p[:, None] >= p[None, :]), own, float("-inf"))
    old = tl.dot(query, tl.trans(old_key), input_precision="ieee") * scale
    old = tl.where((b < before)[None, :], old, float("-inf"))
    most = tl.maximum(tl.max(own, 1), tl.max(old, 1))[:, None]
    own, old = tl.exp(own - most), tl.exp(old - most)
    total = (tl.sum(own, 1) + tl.sum(old, 1))[:, None]
    return own / total, old / total


@triton.jit
def _forward(
    asked, past, out, every, places, whole, before, scale,
    of_client, of_place, past_client, past_part, past_head, past_place,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PLACES: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    place, here, query, key, value, old_key, old_value = _gather(
        asked, past, every, whole, before, of_client, of_place, past_client, past_part, past_head, past_place,
        HEADS, SIZE, PLACES, BEFORE,
    )  # fmt: skip
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)[None, :]
    own, old = _weights(query, key, old_key, places, before, scale, PLACES, BEFORE)
    mixed = tl.dot(own.to(value.dtype), value, input_precision="ieee")
    mixed += tl.dot(old.to(value.dtype), old_value, input_precision="ieee")
    tl.store(out + place * (HEADS * SIZE) + at, mixed.to(value.dtype), mask=here)


@triton.jit
def _backward(
    asked, past, slope, of_asked, parts, every, places, whole, before, scale,
    of_client, of_place, past_client, past_part, past_head, past_place,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PLACES: tl.constexpr, BEFORE: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    place, here, query, key, value, old_key, old_value = _gather(
        asked, past, every, whole, before, of_client, of_place, past_client, past_part, past_head, past_place,
        HEADS, SIZE, PLACES, BEFORE,
    )  # fmt: skip
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)[None, :]
    down = tl.load(slope + place * (HEADS * SIZE) + at, mask=here, other=0.0)
    own, old = _weights(query, key, old_key, places, before, scale, PLACES, BEFORE)
    of_own = tl.dot(down, tl.trans(value), input_precision="ieee")
    of_old = tl.dot(down, tl.trans(old_value), input_precision="ieee")
    mean = (tl.sum(own * of_own, 1) + tl.sum(old * of_old, 1))[:, None]
    of_own = (own * (of_own - mean) * scale).to(key.dtype)
    of_old = (old * (of_old - mean) * scale).to(key.dtype)
    own, old = own.to(key.dtype), old.to(key.dtype)
    to = of_asked + place * (3 * HEADS * SIZE) + at
    of_query = tl.dot(of_own, key, input_precision="ieee") + tl.dot(of_old, old_key, input_precision="ieee")
    tl.store(to, of_query.to(key.dtype), mask=here)
    of_key = tl.dot(tl.trans(of_own), query, input_precision="ieee")
    tl.store(to + HEADS * SIZE, of_key.to(key.dtype), mask=here)
    of_value = tl.dot(tl.trans(own), down, input_precision="ieee")
    tl.store(to + 2 * HEADS * SIZE, of_value.to(key.dtype), mask=here)
    if WANTED:
        b, s = tl.arange(0, BEFORE)[:, None], tl.arange(0, SIZE)[None, :]
        to = parts + ((tl.program_id(0).to(tl.int64) * 2 * HEADS + tl.program_id(1)) * before + b) * SIZE + s
        tl.store(to, tl.dot(tl.trans(of_old), query, input_precision="ieee"), mask=b < before)
        tl.store(to + HEADS * before * SIZE, tl.dot(tl.trans(old), down, input_precision="ieee"), mask=b < before)


def settle(x: Tensor, more: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + more, and its layer norm."""
    if more is not None and more.shape != x.shape:
        x, more = x + more, None
    return Settle.apply(x, more, weight, bias, eps)  # type: ignore[no-any-return]


class Settle(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, more: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.both, x, width = more is not None, x.contiguous(), x.shape[-1]
        total, normed = torch.empty_like(x) if ctx.both else x, torch.empty_like(x)
        stats = x.new_empty(x.numel() // width, 2, dtype=torch.float32)
        added = x if more is None else more.contiguous()
        shapes = {"WIDTH": triton.next_power_of_2(width), "BOTH": ctx.both}
        _settle[(len(stats),)](x, added, weight, bias, total, normed, stats, width, eps, **shapes)
        ctx.save_for_backward(total, weight, stats)
        return total, normed

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_total: Tensor | None, of_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, stats = ctx.saved_tensors
        found = of_total
        if of_normed is not None:
            found, width, down = torch.empty_like(total), total.shape[-1], of_normed.contiguous()
            over = down if of_total is None else of_total.contiguous()
            shapes = {"WIDTH": triton.next_power_of_2(width), "BOTH": of_total is not None}
            _unsettle[(len(stats),)](total, weight, stats, over, down, found, width, **shapes)
        return found, found if ctx.both else None, None, None, None


@triton.jit
def _settle(
    x, more, weight, bias, total, normed, stats, width, eps, WIDTH: tl.constexpr, BOTH: tl.constexpr
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    here, place = at < width, row * width + at
    value = tl.load(x + place, mask=here, other=0.0)
    if BOTH:
        value += tl.load(more + place, mask=here, other=0.0)
        tl.store(total + place, value, mask=here)
    wide = value.to(tl.float32)
    mean = tl.sum(wide, 0) / width
    away = tl.where(here, wide - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(away * away, 0) / width + eps)
    scale = tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
    shift = tl.load(bias + at, mask=here, other=0.0).to(tl.float32)
    tl.store(normed + place, (away * inverse * scale + shift).to(value.dtype), mask=here)
    tl.store(stats + 2 * row, mean)
    tl.store(stats + 2 * row + 1, inverse)


@triton.jit
def _unsettle(
    total, weight, stats, of_total, of_normed, found, width, WIDTH: tl.constexpr, BOTH: tl.constexpr
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    here, place = at < width, row * width + at
    mean, inverse = tl.load(stats + 2 * row), tl.load(stats + 2 * row + 1)
    value = tl.load(total + place, mask=here, other=0.0)
    unit = tl.where(here, (value.to(tl.float32) - mean) * inverse, 0.0)
    down = tl.load(of_normed + place, mask=here, other=0.0).to(tl.float32)
    down *= tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
    out = inverse * (down - tl.sum(down, 0) / width - unit * (tl.sum(down * unit, 0) / width))
    if BOTH:
        out += tl.load(of_total + place, mask=here, other=0.0).to(tl.float32)
    tl.store(found + place, out.to(value.dtype), mask=here)
