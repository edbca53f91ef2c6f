"""Products with a frozen weight, x Wᵀ + b, by the faster of the two libraries that torch has for a CPU.

`F.linear` in float32 uses MKL, which on AMD's processors has no AVX-512 and so reaches half of what oneDNN does (measured
on an EPYC with AVX-512, one core, products of a small CLIP: 117 against 255 GFLOP/s). torch uses oneDNN for bfloat16 by
itself. Which library is used depends on the processor alone, never on a measurement, so that all processes of a machine
compute the same bits. A row does not depend on how many others there are, unless it is alone, nor on the number of
threads.

The operator is torch's own but not documented: without it, or where it fails, `F.linear` is used.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b. W and b are frozen: they get no gradient."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.numel() <= x.shape[-1]:
        return F.linear(x, weight, bias)
    product = onednn()
    if product is None or weight.requires_grad or torch.is_autocast_enabled("cpu") or tracing():
        return F.linear(x, weight, bias)
    return frozen(x, weight, bias) if x.requires_grad and torch.is_grad_enabled() else product(x, weight, bias)


class FrozenContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FrozenContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        product = onednn()
        assert product is not None
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: FrozenContext, grad: Tensor) -> tuple[Tensor, None, None]:
        return linear(grad, ctx.saved_tensors[0].mT), None, None


frozen: Product = Frozen.apply


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
