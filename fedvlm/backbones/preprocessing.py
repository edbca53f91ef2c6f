"""Images as open_clip prepares them: resized and cropped by PIL, then normalised; and the preprocessing of any CLIP in two
steps, of which the second is done for a batch, where the model is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedvlm.errors import FedvlmError

LEVELS = 256  # of a channel
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
        """The processor's interface is that of transformers' image processors."""
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
    """The preprocessing that open_clip's `preprocess_cfg` describes; an error where it is missing or says what is not
    done here."""
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


class PreparesBatches(Protocol):
    """transformers' image processors, and `Preprocessing`."""

    def __call__(
        self, images: list[Image.Image], *, return_tensors: Literal["pt"], **options: bool
    ) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class TwoSteps:
    """A processor as uint8 pixels, made image by image, and a table of what becomes of each value in each channel. Results
    are the same to the bit, a quarter of the bytes go to the device, and threads hardly wait for Python's lock."""

    pixels: Callable[[Image.Image], Tensor]  # uint8 [3, height, width]
    table: Tensor  # [3, 256]

    def values(self, pixels: Tensor) -> Tensor:
        """float32 [images, 3, height, width] of uint8, on the same device."""
        if pixels.device.type != "cpu":
            return self.gathered(pixels)
        found = np.empty(pixels.shape, np.float32)
        for channel, table in enumerate(self.table.numpy()):
            found[:, channel] = table[pixels[:, channel].numpy()]
        return torch.from_numpy(found)

    def gathered(self, pixels: Tensor) -> Tensor:
        """The same numbers as `values`, by torch, which takes several times as long as NumPy on a CPU."""
        first = LEVELS * torch.arange(3, device=pixels.device, dtype=torch.int32)[:, None, None]
        return self.table.to(pixels.device).flatten()[pixels.int() + first]


def in_two_steps(processor: PreparesBatches) -> TwoSteps | None:
    """None where the processor's results do not come out so for images of three shapes."""
    slow = partial(_pixels_by, processor)
    _, height, width = slow(_levels(64, 48)).shape
    samples = [_levels(width, height), _levels(2 * width + 37, height + 5), _levels(width // 2 + 3, 3 * height)]
    pixels = [slow(image) for image in samples]
    values = [processor(images=[image], return_tensors="pt")["pixel_values"][0] for image in samples]
    table = torch.full((3, LEVELS), torch.nan)
    for channel in range(3):
        table[channel, pixels[0][channel].flatten().int()] = values[0][channel].flatten()
    quick = _resizer(processor)
    with suppress(Exception):  # of an attribute that has another meaning in another version
        if quick and all(torch.equal(quick(i), p) for i, p in zip(samples, pixels, strict=True)):
            slow = quick  # type: ignore[assignment]
    made = TwoSteps(slow, table)
    same = all(torch.equal(made.values(p[None])[0], v) for p, v in zip(pixels, values, strict=True))
    return made if same and not table.isnan().any() else None


def _levels(width: int, height: int) -> Image.Image:
    """An image with all values in all channels, if it has as many pixels."""
    values = np.arange(height * width * 3).reshape(height, width, 3)
    return Image.fromarray((values // 3 + 85 * (values % 3)).astype(np.uint8))


def _pixels_by(processor: PreparesBatches, image: Image.Image) -> Tensor:
    found = processor(images=[image], return_tensors="pt", do_rescale=False, do_normalize=False)["pixel_values"][0]
    return found.to(torch.uint8)


def _resizer(processor: PreparesBatches) -> Callable[[Image.Image], Tensor] | None:
    """The first step without transformers' checks, which take longer than resizing; None where it is not known."""
    if isinstance(processor, Preprocessing):
        return lambda image: _channels_first(processor.resized(image))
    try:
        short, crop = int(processor.size["shortest_edge"]), processor.crop_size  # type: ignore[attr-defined]
        size, how = (int(crop["width"]), int(crop["height"])), Image.Resampling(processor.resample)  # type: ignore[attr-defined]
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    return lambda image: _channels_first(_resized(image, short, size, how))


def _resized(image: Image.Image, short: int, crop: tuple[int, int], how: Image.Resampling) -> Image.Image:
    """The image resized in the same way as by transformers' CLIP processors."""
    image = image if image.mode == "RGB" else image.convert("RGB")
    least = min(image.size)
    width, height = (int(short * side / least) for side in image.size)
    left, top = (width - crop[0]) // 2, (height - crop[1]) // 2
    return image.resize((width, height), how).crop((left, top, left + crop[0], top + crop[1]))


def _channels_first(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))
