"""What `prompts.py --gpu` and `lora.py --gpu` share: a model of ViT-B/16's size, a clock, and the share of what a device can
do. That is the rate of a large bfloat16 product on it in the same run, over and over for as long as a step takes: a device
that is kept busy runs slower than at its first product.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedvlm.backbones.vision import VisionTop

SHARE = 40  # per cent of the matrix product's rate, bfloat16
COLUMNS = ["a second", "ms", "GFLOP", "TFLOP/s", "share", "bar", "verdict"]  # of `line`


def random_clip(text: tuple[int, ...], vision: tuple[int, ...], pixels: int, dim: int) -> Any:
    """A CLIPModel of these widths, layers and heads; speed does not ask what weights say."""
    from transformers import CLIPConfig, CLIPModel

    shapes = {
        part: {"hidden_size": w, "intermediate_size": 4 * w, "num_hidden_layers": deep, "num_attention_heads": heads}
        for part, (w, deep, heads) in {"text": text, "vision": vision}.items()
    }
    shapes["vision"] |= {"image_size": pixels, "patch_size": 16}
    torch.manual_seed(0)
    config = CLIPConfig(text_config=shapes["text"], vision_config=shapes["vision"], projection_dim=dim)
    return CLIPModel(config).eval().requires_grad_(False)


def matrix_rate(square: int, device: str) -> float:
    """FLOP/s of a large bfloat16 product, twenty in a row."""
    a, times = torch.randn(square, square, device=device, dtype=torch.bfloat16), 20
    once = 2 * square**3 / clock(lambda: a @ a, device)
    roof = times * 2 * square**3 / clock(lambda: [a @ a for _ in range(times)], device)
    where = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"{where}: a {square}² bfloat16 product runs at {once / 1e12:.3g} TFLOP/s,", end=" ")
    print(f"{times} in a row at {roof / 1e12:.3g}")
    return roof


def clock(work: Callable[[], object], device: str, times: int = 10) -> float:
    """The median of so many, in seconds."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    took = []
    for k in range(times + 2):
        wait()
        began = time.perf_counter()
        work()
        wait()
        if k > 1:  # the first warm up
            took.append(time.perf_counter() - began)
    return float(np.median(took))


def line(
    what: str, count: int, work: Callable[[], object], flops: float, device: str, roof: float, judged: bool
) -> list:
    """A row of the table: so many things, so many FLOPs; a verdict only on a device that is no CPU."""
    took = clock(work, device)
    share = 100 * flops / took / roof
    verdict = [f"{SHARE} %", "met" if share >= SHARE else "MISSED"] if judged and device != "cpu" else ["", ""]
    return [
        what, f"{count / took:,.0f}", f"{1e3 * took:.2f}", f"{flops / 1e9:,.4g}", f"{flops / took / 1e12:.3g}",
        f"{share:.1f} %", *verdict,
    ]  # fmt: skip


def image_flops(top: VisionTop, t: int) -> tuple[float, float]:
    """Of an image with t tokens through these layers, forward: products and attention, 2 a multiply-add. The last layer is
    read at one token only. With width w, m layers, d dimensions: (m − 1) 24 w² t + 4 w² t + 20 w² + 2 w d, and
    (m − 1) 4 w t² + 4 w t."""
    (d, w), deep = top.projection.shape, len(top.layers) - 1
    return deep * 24 * w * w * t + 4 * w * w * t + 20 * w * w + 2 * w * d, deep * 4 * w * t * t + 4 * w * t
