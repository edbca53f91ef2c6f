"""Images as open_clip prepares them: resized and cropped by PIL, then normalised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedvlm.core import FedvlmError

INTERPOLATIONS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@dataclass(frozen=True)
class Preprocessing:
    size: int  # height and width of the result
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    interpolation: str = "bicubic"
    resize_mode: Literal["shortest", "squash"] = "shortest"  # squash: the aspect ratio is not kept; else it is cropped

    def __call__(
        self,
        images: Sequence[Image.Image],
        *,
        return_tensors: str = "pt",
        do_rescale: bool = True,
        do_normalize: bool = True,
    ) -> Mapping[str, Tensor]:
        """Called as transformers' image processors are."""
        arrays = np.stack([np.asarray(self.resized(image), dtype=np.float32) for image in images])
        x = torch.from_numpy(arrays).permute(0, 3, 1, 2).contiguous()
        x = x / 255 if do_rescale else x
        mean, std = (torch.tensor(v)[:, None, None] for v in (self.image_mean, self.image_std))
        return {"pixel_values": (x - mean) / std if do_normalize else x}

    def resized(self, image: Image.Image) -> Image.Image:
        image, how = image.convert("RGB"), INTERPOLATIONS[self.interpolation]
        if self.resize_mode == "squash":
            return image.resize((self.size, self.size), how)
        short = min(image.size)
        width, height = (int(self.size * side / short) for side in image.size)
        image = image.resize((width, height), how)
        left, top = (round((side - self.size) / 2) for side in image.size)
        return image.crop((left, top, left + self.size, top + self.size))


def preprocessing_of(name: str, size: int, given: Mapping[str, object]) -> Preprocessing:
    """By open_clip's `preprocess_cfg`; an error where it is missing or says what is not done here."""
    mean, std = (_three(given.get(key)) for key in ("mean", "std"))
    if mean is None or std is None:
        raise FedvlmError(
            f"backbone={name}: open_clip_config.json has no preprocess_cfg with mean and std, so it is not known how images "
            "are normalised for it; add them from where the model came from"
        )
    interpolation, mode = given.get("interpolation") or "bicubic", given.get("resize_mode") or "shortest"
    if interpolation not in INTERPOLATIONS or mode not in ("shortest", "squash") or given.get("mode", "RGB") != "RGB":
        raise FedvlmError(
            f"backbone={name}: preprocess_cfg has interpolation={interpolation}, resize_mode={mode}, mode="
            f"{given.get('mode', 'RGB')}; known here are bicubic and bilinear, shortest and squash, RGB"
        )
    return Preprocessing(size, mean, std, str(interpolation), "squash" if mode == "squash" else "shortest")


def _three(values: object) -> tuple[float, ...] | None:
    found = values if isinstance(values, list) and len(values) == 3 else []
    return tuple(map(float, found)) if found and all(isinstance(v, int | float) for v in found) else None
