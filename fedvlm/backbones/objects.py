"""A backbone given as a Python object: a torch module, or a function from PIL images to embeddings.

It exists in this process only. What it encoded is in the feature store, so other processes (several runs at a time) and
later evaluations read it from there; to predict new images, give the object again (`run.predictor(backbone=…)`).
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
from PIL import Image
from torch import Tensor, nn

from fedvlm.backbones.base import Backbone, checked_embeddings
from fedvlm.errors import FedvlmError
from fedvlm.system import files
from fedvlm.system.machine import cache_home
from fedvlm.system.names import file_name

PREFIX = "object:"
SIDE = 224  # pixels, for a module without `preprocess`
Encode = Callable[[list[Image.Image]], object]
_registered: dict[str, Backbone] = {}


class Object:
    """Optional attributes of the object: `scale` (logit scale, 20 by default), `texts` (a function list[str] → embeddings),
    `fingerprint` (its version), and of a module `preprocess` (a function from a PIL image to a tensor [3, height, width];
    without it images are resized and cropped to 224 pixels, with values from 0 to 1)."""

    black_box = True

    def __init__(self, thing: object):
        if not callable(thing):
            raise FedvlmError(f"backbone: {type(thing).__name__} is neither a name, a torch module nor a function")
        self.module = thing if isinstance(thing, nn.Module) else None
        self.thing = thing
        name = getattr(thing, "__name__", type(thing).__name__)
        self.source = f"backbone={name}"
        self.scale = float(getattr(thing, "scale", 20.0))
        self.text_encoder = getattr(thing, "texts", None)
        self.has_texts = self.text_encoder is not None
        self.fingerprint = str(getattr(thing, "fingerprint", "") or fingerprint_of(thing))
        self.name = f"{PREFIX}{name}-{self.fingerprint[:12]}"
        self.dim = 0
        self.dim = self.images([Image.linear_gradient("L").resize((64, 64)).convert("RGB")]).shape[1]

    @torch.no_grad()
    def images(self, images: Sequence[Image.Image]) -> Tensor:
        if not images:
            return torch.empty(0, self.dim)
        if self.module is not None:
            prepare = cast(Callable[[Image.Image], Tensor], getattr(self.module, "preprocess", default_preprocess))
            self.module.eval()
            found: object = self.module(torch.stack([prepare(i) for i in images]))
        else:
            found = cast(Encode, self.thing)(list(images))
        return checked_embeddings(found, len(images), self.source, self.dim)

    @torch.no_grad()
    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        if self.text_encoder is None:
            return None
        found = cast(Callable[[list[str]], object], self.text_encoder)(list(phrases))
        return checked_embeddings(found, len(phrases), f"{self.source}: texts", self.dim)


class Recorded:
    """What is known of an object in another process: only what the feature store holds can be used."""

    black_box = True

    def __init__(self, name: str):
        self.name = name
        path = description(name)
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise FedvlmError(
                f"backbone={name} was a Python object and does not exist in this process; give it again with backbone="
            ) from None
        self.fingerprint, self.dim, self.scale = str(about["fingerprint"]), int(about["dim"]), float(about["scale"])
        self.has_texts = bool(about["texts"])

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        raise FedvlmError(
            f"backbone={self.name} is a Python object of another process, and the feature store lacks some images; run it "
            "where the object is, or give the object again (backbone=)"
        )

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        return self.images([]) if self.has_texts else None


def register(thing: object) -> str:
    """The name under which `backbones.load` finds the object in this process."""
    made = Object(thing)
    if made.name not in _registered:
        _registered[made.name] = made
        path = description(made.name)
        about = {
            "fingerprint": made.fingerprint,
            "dim": made.dim,
            "scale": made.scale,
            "texts": made.text_encoder is not None,
        }
        files.write(path, json.dumps(about))
    return made.name


def load_object(name: str) -> Backbone:
    return _registered[name] if name in _registered else Recorded(name)


def description(name: str) -> Path:
    return cache_home() / "objects" / f"{file_name(name.removeprefix(PREFIX))}.json"


def fingerprint_of(thing: object) -> str:
    """A hash of a module's class and weights, or of a function's source (set `fingerprint` where that does not say it
    all)."""
    seen = hashlib.blake2b(digest_size=8)
    kind = thing if inspect.isroutine(thing) else type(thing)
    try:
        seen.update(inspect.getsource(cast(type, kind)).encode())
    except (OSError, TypeError):
        seen.update(repr(kind).encode())
    if isinstance(thing, nn.Module):
        for name, value in sorted(thing.state_dict().items()):
            seen.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return seen.hexdigest()


def default_preprocess(image: Image.Image) -> Tensor:
    scale = SIDE / min(image.size)
    size = (max(SIDE, round(image.width * scale)), max(SIDE, round(image.height * scale)))
    resized = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    left, top = (resized.width - SIDE) // 2, (resized.height - SIDE) // 2
    cropped = resized.crop((left, top, left + SIDE, top + SIDE))
    pixels = torch.frombuffer(bytearray(cropped.tobytes()), dtype=torch.uint8).view(SIDE, SIDE, 3)
    return pixels.permute(2, 0, 1).float() / 255
