"""Products with a weight, x Wᵀ + b, by the faster of the two libraries that torch has for a CPU.

`F.linear` in float32 uses MKL, which on AMD's processors has no AVX-512 and so reaches half of what oneDNN does (measured
on an EPYC with AVX-512, one core, products of a small CLIP: 117 against 255 GFLOP/s). torch uses oneDNN for bfloat16 by
itself. Which library is used depends on the processor alone, never on a measurement, so that all processes of a machine
compute the same bits. A row does not depend on how many others there are, unless it is alone, nor on the number of
threads.

The operator is torch's own but not documented: without it, or where it fails, `F.linear` is used.

    y = linear(x, weight, bias)       in place of F.linear
    with fast_linear(x): …            in which modules' own calls of F.linear are made by it
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
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


class Linear(torch.autograd.Function):
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
            linear(grad, weight.mT) if of_x else None,
            linear(rows.mT, x.flatten(0, -2).mT) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


with_gradient: Product = Linear.apply


class FastLinear(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def fast_linear(x: Tensor) -> AbstractContextManager[object]:
    """A context in which modules, given such input, call `linear` in place of F.linear."""
    slow = x.device.type != "cpu" or torch.get_default_dtype() != torch.float32 or tracing() or onednn() is None
    return nullcontext() if slow else FastLinear()


@cache
def onednn() -> Product | None:
    """oneDNN's product where MKL is the slower one and the operator works; else None."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available() or not amd():
        return None
    try:
        operator: PointwiseLinear = torch.ops.mkldnn._linear_pointwise

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return operator(x, weight, bias, "none", [], "")

        x, weight, bias = torch.eye(3, 2), torch.tensor([[1.0, 2.0]]), torch.ones(1)
        right = torch.equal(product(x, weight, bias), F.linear(x, weight, bias))
    except (AttributeError, RuntimeError):
        return None
    return product if right else None


class PointwiseLinear(Protocol):
    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, after: str, scalars: list[float], algorithm: str, /
    ) -> Tensor: ...


def tracing() -> bool:
    return bool(torch.jit.is_tracing() or torch.compiler.is_compiling())  # type: ignore[attr-defined, no-untyped-call]


def amd() -> bool:
    name = "AuthenticAMD"
    try:
        return name in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return name in platform.processor()
