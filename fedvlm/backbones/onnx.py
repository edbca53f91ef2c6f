"""An ONNX image encoder run by onnxruntime: float32 pixels [n, 3, height, width] in, embeddings [n, dim] out.

Two optional files in the model's folder: `preprocessor_config.json` (Hugging Face CLIP format: size, crop, mean, std;
by default the model's input size and CLIP's mean and std) and `classes.json`, {"scale": 20.5}, the logit scale (20 by
default).
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from PIL import Image
from torch import Tensor

from fedvlm.backbones.alone import each_alone
from fedvlm.backbones.base import checked_embeddings
from fedvlm.backbones.preprocessing import read_preprocessing
from fedvlm.core.records import parsed, read_text
from fedvlm.errors import FedvlmError
from fedvlm.system.allowed import absolute

if TYPE_CHECKING:
    Json = dict[str, "Json"] | list["Json"] | str | float | bool | None

SIDECAR = "preprocessor_config.json"
CLIP_NORMALISATION: dict[str, Json] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


class Onnx:
    black_box, has_texts = True, False

    def __init__(self, path: Path):
        self.name = f"onnx:{path}"
        self.label = f"backbone={self.name}"  # starts every error message
        try:
            import onnxruntime
        except ImportError as error:
            raise FedvlmError(f'{self.label}: needs onnxruntime; pip install "fedvlm[onnx]"') from error
        path = Path(absolute(path))
        if not os.path.isfile(path):  # noqa: PTH113 (Path's raises for a name that is too long)
            raise FedvlmError(f"{self.label}: no such file; give the path of an .onnx model")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # `each_alone` has a thread for each core
        options.log_severity_level = 4
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors share no base class
            raise FedvlmError(f"{self.label}: onnxruntime cannot load it ({error})") from error
        self.input, self.batch, height, width = self._input()
        config = _config(path.parent / SIDECAR, height, width, self.label)
        self.processor = read_preprocessing(f"{self.label}: {SIDECAR}", config, "clip")
        classes = path.parent / "classes.json"
        self.scale = _scale(classes, self.label) if classes.is_file() else 20.0
        self.fingerprint = _fingerprint(path, json.dumps([config, self.scale], sort_keys=True))
        self.dim = 0
        self.dim = self.images([Image.linear_gradient("L")]).shape[1]

    def _input(self) -> tuple[str, int | None, int | None, int | None]:
        """The name of the only input, and its batch size, height and width; None where they are not fixed."""
        inputs = self.session.get_inputs()
        shape = inputs[0].shape if len(inputs) == 1 else []
        if len(shape) != 4 or inputs[0].type != "tensor(float)" or (isinstance(shape[1], int) and shape[1] != 3):
            found = ", ".join(f"{i.name} {i.type} {i.shape}" for i in inputs)
            raise FedvlmError(
                f"{self.label}: takes {found}; export the image tower alone, float32 [n, 3, height, width]"
            )
        batch, _, height, width = (s if isinstance(s, int) and s > 0 else None for s in shape)
        return inputs[0].name, batch, height, width

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        """Each image by itself; a model with a fixed batch size takes so many, the last one again where they are fewer."""
        if not images:
            return torch.empty(0, self.dim)
        step = self.batch or 1

        def encode(part: Sequence[Image.Image]) -> Tensor:
            return torch.cat([self._run(list(part[first : first + step])) for first in range(0, len(part), step)])

        return encode(images) if self.batch else each_alone(encode, images)

    def _run(self, part: list[Image.Image]) -> Tensor:
        filled = part + part[-1:] * (self.batch - len(part) if self.batch else 0)
        try:
            found = self.session.run(None, {self.input: self.processor(filled).numpy()})[0]
        except Exception as error:
            raise FedvlmError(f"{self.label}: onnxruntime failed; does {SIDECAR} fit the model? ({error})") from error
        return checked_embeddings(found, len(filled), f"{self.label}: its first output", self.dim)[: len(part)]

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        return None


def _config(file: Path, height: int | None, width: int | None, source: str) -> dict[str, Json]:
    if not file.is_file():
        if not height or not width:
            raise FedvlmError(
                f"{source}: its input has no fixed height and width; "
                f"put a {SIDECAR} (Hugging Face CLIP format) into the model's folder"
            )
        size: dict[str, Json] = {"size": {"shortest_edge": max(height, width)}}
        return CLIP_NORMALISATION | size | {"crop_size": {"height": height, "width": width}}
    config = _json(file, source)
    needed = ["size", *CLIP_NORMALISATION, *(["crop_size"] if config.get("do_center_crop", True) else [])]
    missing = [k for k in needed if k not in config]
    if missing:  # CLIP's own values need not fit this model
        raise FedvlmError(f"{source}: {SIDECAR} lacks {', '.join(missing)}; add these fields")
    return config


def _scale(file: Path, source: str) -> float:
    scale = _json(file, source).get("scale", 20.0)
    if not isinstance(scale, int | float) or not 0 < scale < 1e6:
        raise FedvlmError(f'{source}: {file.name} says scale={scale!r}; write a positive number, {{"scale": 20.5}}')
    return float(scale)


def _json(file: Path, source: str) -> dict[str, Json]:
    try:
        return cast("dict[str, Json]", parsed(read_text(file)))
    except (OSError, ValueError) as error:
        raise FedvlmError(f"{source}: {file.name} is not readable as a JSON object ({error})") from error


def _fingerprint(path: Path, settings: str) -> str:
    """A hash of the model, its external weights (model.onnx.data, model.onnx_data) and its settings."""
    digest = hashlib.blake2b(settings.encode(), digest_size=8)
    for file in sorted(path.parent.glob(glob.escape(path.name) + "*")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()
