"""Which arithmetic this machine computes features with: the processor, the library of products, the instruction set, and
the bits of a few fixed operations.

Two processors give an image's features other last bits. The feature store keeps them apart by `mark`, and a run records
what each of its parties computed with.
"""

from __future__ import annotations

import hashlib
import platform
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.backbones.alone import encoder_threads
from fedvlm.towers.products import frozen_product, onednn


class Arithmetic(NamedTuple):
    processor: str  # its maker's name for it
    library: str  # that multiplies: oneDNN, or what torch uses without it
    instructions: str  # the instruction set that torch found, such as AVX2
    mark: str  # hash of the bits of some operations

    def __str__(self) -> str:
        return f"{self.library}, {self.instructions}, on {self.processor} ({self.mark})"


@cache
def arithmetic() -> Arithmetic:
    """The arithmetic of this process: variables of the environment can hold a library to fewer instructions."""
    library = "oneDNN" if onednn() else "MKL" if torch.backends.mkl.is_available() else "torch's own products"
    with torch.no_grad(), encoder_threads(1):
        bits = b"".join(x.contiguous().numpy().tobytes() for x in operations())
    instructions = torch.backends.cpu.get_cpu_capability()
    return Arithmetic(processor(), library, instructions, hashlib.blake2b(bits, digest_size=4).hexdigest())


def operations() -> list[Tensor]:
    """Results of what towers and methods are made of, from numbers that are the same everywhere."""
    x, weight = fixed_numbers(65, 96), fixed_numbers(256, 96)
    inner = frozen_product(weight, None, len(x))(x)
    heads = fixed_numbers(3, 2, 65, 32).unsqueeze(1)
    return [
        inner,
        F.linear(x, weight),
        F.linear(x[:1], weight),
        F.scaled_dot_product_attention(*heads),
        F.gelu(inner),
        inner.softmax(-1),
        F.layer_norm(inner, inner.shape[-1:]),
        F.conv2d(fixed_numbers(1, 3, 24, 24), fixed_numbers(8, 3, 6, 6), stride=6),
        torch.linalg.solve(x[:, :65].double() + 9 * torch.eye(65, dtype=torch.float64), x.double()),
    ]


def fixed_numbers(*shape: int) -> Tensor:
    """Fixed numbers between −1 and 1 that float32 represents exactly."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7919 % 1009 - 504).double() / 512).float().view(shape)


def processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8", "replace"), re.MULTILINE)
    except OSError:
        found = None
    return (found[1].strip() if found else platform.processor()) or platform.machine()


def described_arithmetic(device: str) -> str:
    """A sentence for the record of a run whose methods are trained on this device."""
    gpu = f"; methods on {torch.cuda.get_device_name(device)}" if device.startswith("cuda") else ""
    return f"{arithmetic()}{gpu}"


def computed_by(device: torch.device) -> str:
    """A short name for the arithmetic of a device, for names of files."""
    if device.type == "cuda":
        return re.sub(r"\W+", "", torch.cuda.get_device_name(device).removeprefix("NVIDIA "))
    return arithmetic().mark
