"""Images as a frozen model wants them: resized and cropped by Pillow, then normalised, from the settings of a folder in
Hugging Face's or in open_clip's format.

There are two steps: `pixels` makes uint8 values image by image, and `values` looks up what becomes of each of the 256 in
each channel, for a batch and where the model is. A quarter of the bytes go there, and threads hardly wait for Python's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedvlm.backbones.model_folder import MOST_PIXELS, PREPROCESSING
from fedvlm.core.records import parsed, read_text
from fedvlm.errors import FedvlmError
from fedvlm.system.names import printable

LEVELS = 256  # of a channel
RESAMPLING = Image.Resampling
INTERPOLATIONS = {"bicubic": RESAMPLING.BICUBIC, "bilinear": RESAMPLING.BILINEAR}
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Preprocessing:
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    shortest: int = 0  # the shorter side is resized to this, and the longer one in proportion; 0: see `size`
    size: tuple[int, int] | None = None  # width and height to which images are resized; None: see `shortest`
    crop: tuple[int, int] | None = None  # width and height of what is kept, from the middle
    resample: Image.Resampling = RESAMPLING.BICUBIC
    to_even: bool = False  # half of the pixels that are cut off is rounded to even, as in open_clip; else down
    factor: float = 1 / 255

    def resized(self, image: Image.Image) -> Image.Image:
        image = image if image.mode == "RGB" else image.convert("RGB")
        if self.shortest:
            width, height = (int(self.shortest * side / min(image.size)) for side in image.size)
            image = image.resize((width, height), self.resample)
        elif self.size:
            image = image.resize(self.size, self.resample)
        if not self.crop:
            return image
        spare = [side - kept for side, kept in zip(image.size, self.crop, strict=True)]
        left, top = (round(s / 2) if self.to_even else s // 2 for s in spare)
        return image.crop((left, top, left + self.crop[0], top + self.crop[1]))

    def pixels(self, image: Image.Image) -> Tensor:
        """uint8 [3, height, width]."""
        return torch.from_numpy(np.ascontiguousarray(np.asarray(self.resized(image)).transpose(2, 0, 1)))

    @cached_property
    def table(self) -> Tensor:
        """[3, 256]: what becomes of each value."""
        scaled = (np.arange(LEVELS, dtype=np.float64) * self.factor).astype(np.float32)
        mean, std = (np.array(v, np.float32)[:, None] for v in (self.image_mean, self.image_std))
        return torch.from_numpy((scaled - mean) / std)

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

    def __call__(self, images: Sequence[Image.Image]) -> Tensor:
        return self.values(torch.stack([self.pixels(image) for image in images]))


class Usual(NamedTuple):
    """What a folder need not repeat, by the kind of its image processor."""

    size: Mapping[str, object]
    shortest: bool  # what a plain number means
    cropped: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: Image.Resampling = RESAMPLING.BICUBIC


SHORTER, SQUARE = {"shortest_edge": 224}, {"height": 224, "width": 224}
USUAL = {
    "CLIP": Usual(SHORTER, True, True, CLIP_MEAN, CLIP_STD),
    "Bit": Usual(SHORTER, True, True, CLIP_MEAN, CLIP_STD),
    "Siglip": Usual(SQUARE, True, False, HALF, HALF),
    "ViT": Usual(SQUARE, False, False, HALF, HALF, RESAMPLING.BILINEAR),
    "DeiT": Usual({"height": 256, "width": 256}, False, True, HALF, HALF),
    "Beit": Usual(SQUARE, False, False, HALF, HALF),
    "DINOv3ViT": Usual(SQUARE, False, False, IMAGENET_MEAN, IMAGENET_STD, RESAMPLING.BILINEAR),
}
OF_MODELS = {
    "clip": "CLIP",
    "siglip": "Siglip",
    "vit": "ViT",
    "vit_msn": "ViT",
    "dinov2": "Bit",
    "deit": "DeiT",
    "beit": "Beit",
}
DONE = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")


def settings_of(folder: Path) -> Mapping[str, object]:
    """The settings of the image processor in a folder in Hugging Face's format."""
    file = next(folder / name for name in PREPROCESSING if (folder / name).is_file())
    found = parsed(read_text(file))
    inner = found.get("image_processor", found)  # in processor_config.json
    return inner if isinstance(inner, dict) else found


def kind_of(given: Mapping[str, object], model_type: str) -> str:
    """The processor's kind: a name of USUAL, or the name that the folder gives."""
    name = str(
        given.get("image_processor_type") or given.get("feature_extractor_type") or OF_MODELS.get(model_type, "")
    )
    for end in ("Fast", "Pil", "ImageProcessor", "FeatureExtractor"):
        name = name.removesuffix(end)
    return name


def read_preprocessing(where: str, given: Mapping[str, object], model_type: str) -> Preprocessing:
    """What the settings of one of Hugging Face's image processors say; an error where that is not done here."""
    kind = kind_of(given, model_type)
    if kind not in USUAL:
        raise FedvlmError(
            f"{where}: images are prepared by {printable(kind, 60) or 'nothing that it names'}, which is not known here; "
            f"known are the image processors of {', '.join(USUAL)}"
        )
    usual = USUAL[kind]
    more = [k for k, v in given.items() if k.startswith("do_") and v is True and k not in DONE]
    if more:
        raise FedvlmError(f"{where}: its preprocessing has {printable(more[0], 40)}, which is not known here")

    def done(step: str, default: bool = True) -> bool:
        return bool(given.get(step, default))

    def numbers(key: str, default: tuple[float, ...], neutral: float) -> tuple[float, ...]:
        found = given.get(key, list(default)) if done("do_normalize") else [neutral] * 3
        if (
            not isinstance(found, list)
            or len(found) != 3
            or not all(isinstance(v, int | float) and v > -9 for v in found)
        ):
            raise FedvlmError(f"{where}: its preprocessing has {key}={printable(found, 60)}; wanted are three numbers")
        return tuple(float(cast(float, v)) for v in found)

    short, size = sides(where, "size", given.get("size", usual.size), usual.shortest)
    crop = sides(where, "crop_size", given.get("crop_size", 224), False)[1]
    resample, factor = given.get("resample", int(usual.resample)), given.get("rescale_factor", 1 / 255)
    if resample not in list(RESAMPLING) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise FedvlmError(f"{where}: its preprocessing has resample={resample!r:.20}, rescale_factor={factor!r:.20}")
    cut = done("do_center_crop", usual.cropped)
    if not cut and not (size and done("do_resize")):
        raise FedvlmError(f"{where}: its preprocessing neither crops images nor resizes them to one size")
    return Preprocessing(
        numbers("image_mean", usual.mean, 0),
        numbers("image_std", usual.std, 1),
        short if done("do_resize") else 0,
        size if done("do_resize") else None,
        crop if cut else None,
        RESAMPLING(cast(int, resample)),
        factor=float(factor) if done("do_rescale") else 1.0,
    )


def sides(where: str, key: str, given: object, shortest: bool) -> tuple[int, tuple[int, int] | None]:
    """(shorter side, None), or (0, (width, height)); a plain number is the one or both."""
    entries = (
        given
        if isinstance(given, dict)
        else {"shortest_edge": given}
        if shortest
        else {"height": given, "width": given}
    )
    found = {k: v for k, v in entries.items() if v is not None}
    if not all(isinstance(v, int) and 0 < v <= MOST_PIXELS for v in found.values()):
        raise FedvlmError(
            f"{where}: its preprocessing has {key}={printable(given, 60)}, not sides of at most {MOST_PIXELS} pixels"
        )
    sized = cast(dict[str, int], found)
    if sized.keys() == {"shortest_edge"}:
        return sized["shortest_edge"], None
    if sized.keys() == {"height", "width"}:
        return 0, (sized["width"], sized["height"])
    raise FedvlmError(f"{where}: its preprocessing has {key}={printable(given, 60)}, which is not known here")


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
    both, how = (size, size), INTERPOLATIONS[str(interpolation)]
    if mode == "squash":
        return Preprocessing(mean, std, size=both, resample=how)
    return Preprocessing(mean, std, size, None, both, how, to_even=True)


def _three(values: object) -> tuple[float, ...] | None:
    found = values if isinstance(values, list) and len(values) == 3 else []
    return tuple(map(float, found)) if found and all(isinstance(v, int | float) for v in found) else None
