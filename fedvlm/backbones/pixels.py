"""`pixels:SIZE`: no model. The image itself, resized to a square, for networks that are trained from pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedvlm.backbones.base import ViewFormat
from fedvlm.errors import FedvlmError


class Pixels:
    dim, scale, black_box = 0, 1.0, False
    views: ClassVar[tuple[str, ...]] = ("pixels",)
    towers: ClassVar[tuple[str, ...]] = ()
    has_texts = False

    def __init__(self, name: str, size: str):
        if not size.isdigit() or not 1 <= int(size) <= 2048:
            raise FedvlmError(
                f"backbone={name}: expected pixels:SIZE with a size between 1 and 2048, such as pixels:64"
            )
        self.name, self.size, self.fingerprint = name, int(size), f"bicubic{size}"

    def view_format(self, view: str) -> ViewFormat | None:
        return ViewFormat((3, self.size, self.size), "u1") if view == "pixels" else None

    def encode(self, images: Sequence[Image.Image], view: str) -> Tensor:
        small = [i.convert("RGB").resize((self.size, self.size), Image.Resampling.BICUBIC) for i in images]
        return torch.from_numpy(np.stack([np.asarray(i) for i in small])).permute(0, 3, 1, 2).contiguous()

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        raise FedvlmError(f"backbone={self.name} is no model and has no embeddings; give backbone=mini-clip")

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        return None
