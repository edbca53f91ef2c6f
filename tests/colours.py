"""An encoder without weights (the mean colour), images for it, and a feature store with small batches and segments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from fedvlm.data import encoding
from fedvlm.data.source import Source, decode, digest


class Colours:
    """An encoder that returns the mean colour and records its calls."""

    scale = 10.0
    black_box = False

    def __init__(self, fingerprint: str = "0123456789abcdef", name: str = "hub/colours", has_text: bool = True):
        self.name, self.fingerprint, self.dim, self.has_text = name, fingerprint, 4, has_text
        self.batches: list[int] = []  # sizes of the batches of images
        self.phrases: list[list[str]] = []

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        self.batches.append(len(images))
        return torch.stack([mean_colour(image) for image in images])

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        self.phrases.append(list(phrases))
        rows = torch.tensor([[*digest(p.encode())[:4]] for p in phrases], dtype=torch.float32)
        return F.normalize(rows + 1, dim=1) if self.has_text else None


class BatchDependent(Colours):
    """Its last bits depend on the size of the batch, as those of real encoders do."""

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        return super().images(images) + 1e-6 * len(images)

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        found = super().texts(phrases)
        return None if found is None else found + 1e-6 * len(phrases)


def mean_colour(image: Image.Image) -> Tensor:
    return F.normalize(torch.tensor([*np.asarray(image, dtype=np.float32).mean((0, 1)), 9.0]), dim=0)


def write_images(root: Path, count: int) -> Path:
    """`count` images of different colours, in two classes."""
    for i in range(count):
        path = root / ("cat" if i % 2 else "dog") / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (3, 2), (7 * i % 256, 90, i)).save(path)
    return root


def expected(source: Source) -> Tensor:
    return torch.stack([mean_colour(decode(data)) for _, data in source.read()])


def small_store(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Where the feature store is from now on."""
    patch.setenv("FEDVLM_CACHE", str(folder / "cache"))
    patch.setattr(encoding, "BATCH", 4)
    patch.setattr(encoding, "SEGMENT_ROWS", 8)
    return folder / "cache" / "features"
