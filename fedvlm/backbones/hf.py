"""Hugging Face models from a folder or the hub: CLIP (two towers), or a vision-only encoder (ViT, DINOv2, …).

The towers load when first needed: a run whose features are stored never pays for them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.backbones.base import Form
from fedvlm.backbones.text import TextTower
from fedvlm.backbones.vision import Both, VisionTop
from fedvlm.core import FedvlmError

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def folder_of(name: str) -> Path:
    """The model's local folder, fetched from the hub where the name is not a folder."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
        except Exception as error:
            raise FedvlmError(
                f"backbone={name}: cannot be fetched from the hub ({type(error).__name__}). Offline, copy the model's "
                "folder here and give its path (backbone=path/to/model), or use the embedded backbone=mini-clip"
            ) from error
    if not (folder / "config.json").is_file():
        raise FedvlmError(f"backbone={name}: no config.json in that folder; it must be in Hugging Face format")
    if not list(folder.glob("*.safetensors")):
        raise FedvlmError(
            f"backbone={name}: no .safetensors file; weights in other formats can run code, so save the model again "
            "with save_pretrained(folder, safe_serialization=True)"
        )
    return folder


def describe(folder: Path) -> dict:
    try:
        return json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise FedvlmError(f"backbone={folder}: config.json is not readable ({error})") from error


def clip_processor(where: str | Path):
    """The PIL processor: the same pixels with and without torchvision."""
    try:
        from transformers import CLIPImageProcessorPil as Processor
    except ImportError:
        from transformers import CLIPImageProcessor as Processor  # type: ignore[assignment]
    return Processor.from_pretrained(where)


def _fingerprint(folder: Path) -> str:
    """Of the weights and the preprocessing."""
    seen = hashlib.blake2b(digest_size=8)
    for file in [*sorted(folder.glob("*.safetensors")), folder / "config.json", folder / "preprocessor_config.json"]:
        if file.is_file():
            with file.open("rb") as stream:
                while chunk := stream.read(1 << 24):
                    seen.update(chunk)
    return seen.hexdigest()


def _load(kind: str, folder: Path):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise FedvlmError(f"backbone={folder}: does not load ({str(error).splitlines()[0]})") from error
    return model.eval().requires_grad_(False)


class Towers:
    """What the two kinds share: a folder, a fingerprint, and a model that loads when first needed."""

    black_box = False
    kind: ClassVar[str]  # the transformers class

    def __init__(self, name: str, folder: Path):
        self.name, self.folder, self.fingerprint = name, folder, _fingerprint(folder)

    @cached_property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def model(self) -> Any:
        torch.backends.cudnn.allow_tf32 = False  # features are kept: they should not depend on where they were made
        return _load(self.kind, self.folder).to(self.device)

    def pixels(self, images: Sequence[Image.Image]) -> Tensor:
        return self.processor(images=list(images), return_tensors="pt")["pixel_values"].to(self.device)

    @cached_property
    def processor(self) -> Any:
        raise NotImplementedError


class Clip(Towers):
    """Any CLIP in Hugging Face format."""

    kind = "CLIPModel"

    def __init__(self, name: str, folder: Path):
        super().__init__(name, folder)
        self.dim, self.scale = int(describe(folder).get("projection_dim", 512)), self._scale()

    def _scale(self) -> float:
        for file in self.folder.glob("*.safetensors"):
            with safe_open(file, "pt") as weights:
                if "logit_scale" in weights.keys():  # noqa: SIM118
                    return float(weights.get_tensor("logit_scale").float().exp())
        raise FedvlmError(f"backbone={self.name}: its weights hold no logit_scale, so it is not a CLIP model")

    @cached_property
    def processor(self) -> Any:
        return clip_processor(self.folder)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import CLIPTokenizer

        return CLIPTokenizer.from_pretrained(self.folder)

    @torch.no_grad()
    def images(self, images: Sequence[Image.Image]) -> Tensor:
        pooled = self.model.vision_model(pixel_values=self.pixels(images)).pooler_output
        return F.normalize(self.model.visual_projection(pooled), dim=-1).cpu()

    @torch.no_grad()
    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        # padding to the longest phrase is exact: the tower is causal and pooled at the end-of-text token
        tokens = self.tokenizer(list(phrases), padding=True, truncation=True, return_tensors="pt").to(self.device)
        pooled = self.model.text_model(**tokens).pooler_output
        return F.normalize(self.model.text_projection(pooled), dim=-1).cpu()

    def form(self, view: str) -> Form | None:
        seen = describe(self.folder).get("vision_config", {})
        size = int(seen.get("image_size", 224))
        if view.startswith("hidden@"):
            self.passed(view)
            return Form((1 + (size // int(seen.get("patch_size", 32))) ** 2, int(seen.get("hidden_size", 768))))
        if view == "patches":
            return Form((1 + (size // int(seen.get("patch_size", 32))) ** 2, self.dim), "<f2")
        return {"embedding": Form((self.dim,)), "pixels": Form((3, size, size), "u1")}.get(view)

    def encode(self, images: Sequence[Image.Image], view: str) -> Tensor:
        """Pixels as CLIP crops them, 0 … 255: a quarter of the space, and the tower scales them itself."""
        if view.startswith("hidden@"):
            return self.hidden(images, self.passed(view))
        if view == "patches":
            return self.patches(images)
        found = self.processor(images=list(images), do_rescale=False, do_normalize=False, return_tensors="pt")
        return found["pixel_values"].to(torch.uint8)  # type: ignore[no-any-return]

    @torch.no_grad()
    def patches(self, images: Sequence[Image.Image]) -> Tensor:
        """Halves [images, 1 + patches, dim]: the embedding, then the last layer's patch tokens through the same norm and
        projection, all L2-normalised. FedOTP's dense features; our reading is that they serve LoCoOp and GalLoP too, whose
        code takes for a patch what the last layer would give if each token attended to itself alone."""
        states = self.model.vision_model(pixel_values=self.pixels(images)).last_hidden_state
        found = self.model.visual_projection(self.model.vision_model.post_layernorm(states))
        return F.normalize(found, dim=-1).half().cpu()

    def passed(self, view: str) -> int:
        """How many layers of the image tower lie below the view hidden@k: k or, where k < 0, all but the last −k."""
        layers, told = int(describe(self.folder).get("vision_config", {}).get("num_hidden_layers", 12)), view[7:]
        if not told.removeprefix("-").isdecimal() or not -layers <= int(told) < layers:
            raise FedvlmError(
                f"{view}: the image tower of backbone={self.name} has {layers} layers, so k is a whole number from "
                f"{-layers} to {layers - 1}; where an adapter trains the last layers, use layers=1 to {layers}, or 0 for all"
            )
        return int(told) % layers

    @torch.no_grad()
    def hidden(self, images: Sequence[Image.Image], layers: int) -> Tensor:
        """Activations [images, 1 + patches, width] after so many layers; 0: what enters the first."""
        vision = self.model.vision_model
        x = vision.pre_layrnorm(vision.embeddings(self.pixels(images)))
        for layer in vision.encoder.layers[:layers]:
            x = layer(x, attention_mask=None)
        return x.cpu()  # type: ignore[no-any-return]

    @cached_property
    def image_tower(self) -> nn.Module:
        model = _load(self.kind, self.folder)
        return ImageTower(model.vision_model, model.visual_projection, self.processor)

    @cached_property
    def text_tower(self) -> TextTower:
        return TextTower.of(_load(self.kind, self.folder), self.tokenizer)

    @cached_property
    def both_towers(self) -> Both:
        model = _load(self.kind, self.folder)
        return Both(VisionTop.of(model), TextTower.of(model, self.tokenizer))


class ImageTower(nn.Module):
    """CLIP's image half from raw pixels to the embedding, not yet normalised; twice, as a network gives logits too."""

    def __init__(self, vision: nn.Module, projection: nn.Module, processor: Any):
        super().__init__()
        self.vision, self.projection = vision, projection
        for name in ("mean", "std"):
            values = torch.tensor(getattr(processor, f"image_{name}")) * 255
            self.register_buffer(name, values.view(3, 1, 1), persistent=False)

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = ((x - self.mean) / self.std).to(self.projection.weight.dtype)  # type: ignore[operator,arg-type]
        found = self.projection(self.vision(pixel_values=x).pooler_output)
        return found, found


class Vision(Towers):
    """A vision-only encoder: its class token."""

    kind = "AutoModel"

    def __init__(self, name: str, folder: Path):
        super().__init__(name, folder)
        self.dim = int(describe(folder).get("hidden_size", 0))
        self.scale = 20.0  # no temperature of its own: our choice
        if not self.dim:
            raise FedvlmError(f"backbone={name}: its config.json names no hidden_size; is it an image encoder?")

    @cached_property
    def processor(self) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(self.folder, backend="pil")

    @torch.no_grad()
    def images(self, images: Sequence[Image.Image]) -> Tensor:
        return F.normalize(self.model(pixel_values=self.pixels(images)).last_hidden_state[:, 0], dim=-1).cpu()

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        return None
