"""Products with a weight, x Wᵀ + b, on a CPU by oneDNN where torch has its operator.

`F.linear` in float32 uses MKL, which is slower on most processors (measured with one core and the products of a small CLIP:
with AVX-512 on an EPYC 117 against 258 GFLOP/s and on a Xeon 29 against 54, held to AVX2 120 against 132) and rounds a
row otherwise where other rows are beside it. torch uses oneDNN for bfloat16 by itself. Which library is used depends on
what torch was built with, never on a measurement or on the processor's maker.

The operator is torch's own but not documented: without it, or where it fails, `F.linear` is used.

    y = linear(x, weight, bias)              in place of F.linear
    product = frozen(weight, bias, rows)     y = product(x) for a weight that stays, and x of about so many rows
    with fast_linear(x): …                   in which modules' own calls of F.linear are made by `plain_linear`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

FEW = 128  # rows up to which a frozen weight is kept in oneDNN's own layout, which takes its memory once more

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.numel() <= x.shape[-1]:
        return F.linear(x, weight, bias)
    product = onednn()
    if product is None or torch.is_autocast_enabled("cpu") or tracing():
        return F.linear(x, weight, bias)
    trained = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    return with_gradient(x, weight, bias) if trained and torch.is_grad_enabled() else product(x, weight, bias)


class LinearContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class LinearProduct(torch.autograd.Function):
    """The gradients are products, too, and can be differentiated again."""

    @staticmethod
    def forward(ctx: LinearContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else x.new_empty(0), weight)
        product = onednn()
        assert product is not None
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: LinearContext, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            plain_linear(grad, weight.mT) if of_x else None,
            plain_linear(rows.mT, x.flatten(0, -2).mT) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


with_gradient: Product = LinearProduct.apply


class FastLinear(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return plain_linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def fast_linear(x: Tensor) -> AbstractContextManager[object]:
    """A context in which modules, given such input, call `plain_linear` in place of F.linear."""
    slow = x.device.type != "cpu" or torch.get_default_dtype() != torch.float32 or tracing() or onednn() is None
    return nullcontext() if slow else FastLinear()


def frozen_product(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """x ↦ x Wᵀ + b without a gradient. With few rows, putting a weight into oneDNN's layout takes a part of the
    product's time that is noticed (a sixth at 65 rows), so it is done once."""
    product = onednn() if weight.dtype == torch.float32 and weight.device.type == "cpu" else None
    if product is None:
        return lambda x: F.linear(x, weight, bias)
    chosen = product
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, rows) if rows <= FEW else weight

    def multiply(x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            return F.linear(x, weight, bias)
        return chosen(x, laid_out, bias)

    return multiply


@cache
def onednn() -> Product | None:
    """oneDNN's product; None where its operator is missing or fails."""
    try:
        operator: PointwiseLinear = torch.ops.mkldnn._linear_pointwise

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return operator(x, weight, bias, "none", [], "")

        x, weight, bias = torch.eye(3, 2), torch.tensor([[1.0, 2.0]]), torch.ones(1)
        laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, 3)
        right = all(torch.equal(product(x, w, bias), F.linear(x, weight, bias)) for w in (weight, laid_out))
    except (AttributeError, RuntimeError):
        return None
    return product if right else None


class PointwiseLinear(Protocol):
    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, after: str, scalars: list[float], algorithm: str, /
    ) -> Tensor: ...


def tracing() -> bool:
    return bool(torch.jit.is_tracing() or torch.compiler.is_compiling())  # type: ignore[attr-defined, no-untyped-call]
