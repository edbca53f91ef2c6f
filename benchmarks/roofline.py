"""What prompts.py and lora.py share: the bundled model, a random model of ViT-B/16's size, timing on a device, and the share
of the device's peak rate that a step reaches.

The peak is the rate of a large bfloat16 matrix product, measured on the same device in the same run and repeated for about
as long as a step takes: under sustained load a device runs slower than in its first product.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save_file

from fedvlm import backbones
from fedvlm.backbones.hf import Clip
from fedvlm.towers.modules import TextSizes, TwoTowers, VisionSizes
from fedvlm.towers.vision import ImageLayers

if TYPE_CHECKING:
    from transformers import CLIPModel

REQUIRED = 40  # per cent of the peak rate, in bfloat16
COLUMNS = ["per second", "ms", "GFLOP", "TFLOP/s", "share", "required", "verdict"]  # of `line`, after its name


def mini_clip() -> Clip:
    """On the CPU."""
    backbone = backbones.load("mini-clip")
    assert isinstance(backbone, Clip)
    backbone.device = torch.device("cpu")
    return backbone


def random_clip(text: tuple[int, int, int], vision: tuple[int, int, int], pixels: int, dim: int) -> TwoTowers:
    """A CLIP with these (width, layers, heads) and random weights, on which speed does not depend."""
    torch.manual_seed(0)
    (w, layers, heads), (v, deep, many) = text, vision
    reader = TextSizes(w, 4 * w, layers, heads, "quick_gelu", 1e-5, 49408, 77, 49407)
    model = TwoTowers(VisionSizes(v, 4 * v, deep, many, "quick_gelu", 1e-5, pixels, 16), reader, "clip", dim)
    return model.eval().requires_grad_(False)


def save_clip(model: TwoTowers, folder: Path) -> Path:
    """The model as a folder in Hugging Face's format, with mini-clip's tokenizer and CLIP's preprocessing for its size."""
    vision, text = model.vision_model.config, model.text_model.config
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "model.safetensors")
    config = {"model_type": "clip", "projection_dim": model.visual_projection.out_features}
    (folder / "config.json").write_text(json.dumps(config | {"vision_config": vars(vision), "text_config": vars(text)}))
    prepared = {"image_processor_type": "CLIPImageProcessor", "size": vision.image_size, "crop_size": vision.image_size}
    (folder / "preprocessor_config.json").write_text(json.dumps(prepared))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(backbones.ASSETS / "mini-clip" / name, folder)
    return folder


def transformers_clip(folder: Path) -> CLIPModel:
    """The same model by transformers, for references."""
    from transformers import CLIPModel

    return CLIPModel.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def peak_rate(size: int, device: str) -> float:
    """FLOP/s of a size × size bfloat16 product, twenty in a row."""
    a, times = torch.randn(size, size, device=device, dtype=torch.bfloat16), 20
    once = 2 * size**3 / median_seconds(lambda: a @ a, device)
    sustained = times * 2 * size**3 / median_seconds(lambda: [a @ a for _ in range(times)], device)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"{name}: a {size}² bfloat16 product runs at {once / 1e12:.3g} TFLOP/s,", end=" ")
    print(f"{times} in a row at {sustained / 1e12:.3g}")
    return sustained


def median_seconds(work: Callable[[], object], device: str, times: int = 10) -> float:
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    seconds = []
    for k in range(times + 2):
        wait()
        began = time.perf_counter()
        work()
        wait()
        if k > 1:  # the first two warm up
            seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


def line(
    name: str, count: int, work: Callable[[], object], flops: float, device: str, peak: float, judged: bool
) -> list[str]:
    """A row of the table, for work on `count` images or prompts; judged: with a verdict, unless the device is a CPU."""
    seconds = median_seconds(work, device)
    share = 100 * flops / seconds / peak
    verdict = [f"{REQUIRED} %", "met" if share >= REQUIRED else "MISSED"] if judged and device != "cpu" else ["", ""]
    return [
        name, f"{count / seconds:,.0f}", f"{1e3 * seconds:.2f}", f"{flops / 1e9:,.4g}", f"{flops / seconds / 1e12:.3g}",
        f"{share:.1f} %", *verdict,
    ]  # fmt: skip


def image_flops(top: ImageLayers, t: int) -> tuple[float, float]:
    """Of one image with t tokens through these layers, forward: matrix products and attention, 2 per multiply-add. The last
    layer computes the class token only. With width w, m layers, d dimensions: (m − 1) 24 w² t + 4 w² t + 20 w² + 2 w d, and
    (m − 1) 4 w t² + 4 w t."""
    (d, w), whole = top.projection.shape, len(top.layers) - 1
    return whole * 24 * w * w * t + 4 * w * w * t + 20 * w * w + 2 * w * d, whole * 4 * w * t * t + 4 * w * t
