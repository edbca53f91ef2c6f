"""Hugging Face models from a folder or the hub, and the most common one: CLIP, with two towers.

The weights are loaded on first use, so a run whose features are all stored does not load them.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar, cast

import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.backbones.alone import each_alone
from fedvlm.backbones.base import RAW, Backbone, Precision, ViewFormat
from fedvlm.backbones.known import read_model, two_towers
from fedvlm.backbones.model_folder import PREPROCESSING, ModelConfig, VisionConfig, fingerprint, loading, read_config
from fedvlm.backbones.preprocessing import Preprocessing, read_preprocessing, settings_of
from fedvlm.backbones.tokenizers import ClipTokenizer
from fedvlm.backbones.weights import weight_files
from fedvlm.errors import FedvlmError
from fedvlm.system.timing import timed
from fedvlm.towers.frozen import FrozenImages, FrozenTexts
from fedvlm.towers.modules import TwoTowers
from fedvlm.towers.products import fast_linear, tracing
from fedvlm.towers.text import TextTower, Tokenizer, padded
from fedvlm.towers.vision import ImageLayers, Towers
from fedvlm.towers.whole import WholeModel

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Compute products in TF32, in all threads: torch has one setting."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


Model = TypeVar("Model", bound=nn.Module)


class HuggingFaceModel(Generic[Model]):
    """What CLIP and vision-only encoders share: a folder, a fingerprint, and a model that is loaded on first use."""

    black_box = False
    safe_in_threads = True
    precision: Precision = "full"
    full: Self | None = None  # the same model in full precision, whose weights this one uses

    def __init__(self, name: str, folder: Path):
        with timed("load"):
            self.name, self.folder, self.fingerprint = name, folder, fingerprint(folder)
        self.check_preprocessing()

    def check_preprocessing(self) -> None:
        """An error where the folder does not say how images are prepared: a wrong guess would only lower accuracy."""
        if not any((self.folder / name).is_file() for name in PREPROCESSING):
            raise FedvlmError(
                f"backbone={self.name}: no preprocessor_config.json in that folder, so it is not known how images are "
                "resized and normalised for it; copy the file from where the model came from"
            )

    def load(self) -> Model:
        """A new copy of the frozen model, float32 on the CPU."""
        raise NotImplementedError

    @cached_property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def frozen(self) -> Model:
        """The model on the CPU, read once; its tensors are shared and must not change."""
        with timed("load"):
            return self.load()

    @cached_property
    def model(self) -> Model:
        if self.full is not None:
            return self.full.model
        torch.backends.cudnn.allow_tf32 = False  # stored features should not depend on the device that computed them
        if self.device.type == "cpu":
            return self.frozen
        frozen = self.frozen
        with timed("load"):
            return copy.deepcopy(frozen).to(self.device)

    def in_precision(self, precision: Precision) -> Backbone:
        made = copy.copy(self)
        made.precision, made.full = precision, self
        return cast(Backbone, made)

    def computing(self) -> AbstractContextManager[object]:
        if self.precision == "half":
            return torch.autocast(self.device.type, torch.bfloat16)
        return tf32() if self.precision == "tf32" else contextlib.nullcontext()

    def prepare(self, image: Image.Image, view: str) -> Image.Image | Tensor:
        """The pixels of an image as uint8."""
        return self.processor.pixels(image)

    def pixels(self, images: Sequence[Image.Image | Tensor]) -> Tensor:
        """The pixel values of images, or of what `prepare` made of each of them."""
        found = torch.stack([i if isinstance(i, Tensor) else self.processor.pixels(i) for i in images])
        if self.device.type == "cuda":
            found = found.pin_memory()  # so that the copy does not wait for what the device computes
        return self.processor.values(found.to(self.device, non_blocking=True))

    @cached_property
    def processor(self) -> Preprocessing:
        with timed("load"), loading(self.folder):
            given, kind = settings_of(self.folder), read_config(self.folder).get("model_type", "")
            return read_preprocessing(f"backbone={self.name}", given, kind)

    def computed(
        self,
        images: Sequence[Image.Image | Tensor],
        together: Callable[[Tensor], Tensor],
        alone: Callable[[FrozenImages, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """What `together` gives for the images' pixels. On a CPU each image is computed by itself: by `alone`, which is
        faster, where the tower is one of those that it knows; not where the model is exported to ONNX, whose graph takes
        any number of images."""
        if self.device.type != "cpu" or tracing():
            with torch.no_grad():
                return together(self.pixels(images)).cpu()

        def one_by_one(pixels: Tensor) -> Tensor:
            with fast_linear(pixels):  # a copy of each, since products may depend on where in memory their input begins
                return torch.cat([together(one[None].clone()) for one in pixels])

        encode = partial(alone, self.frozen_images) if alone else one_by_one
        return each_alone(lambda part: encode(self.pixels(part)), images)

    @cached_property
    def frozen_images(self) -> FrozenImages:
        raise NotImplementedError


def logit_scale(name: str, folder: Path, files: Sequence[Path]) -> float:
    for file in files:
        with loading(folder), safe_open(file, "pt") as weights:
            if "logit_scale" in weights.keys():  # noqa: SIM118
                return float(weights.get_tensor("logit_scale").float().exp())
    raise FedvlmError(f"backbone={name}: its weights hold no logit_scale, so it is not a CLIP model")


class Clip(HuggingFaceModel[TwoTowers]):
    """A CLIP in Hugging Face format."""

    views: ClassVar[tuple[str, ...]] = ("embedding", RAW, "patches", "hidden", "pixels")
    towers: ClassVar[tuple[str, ...]] = ("image tower", "text tower", "both towers", "whole model")
    has_texts = True

    def __init__(self, name: str, folder: Path):
        super().__init__(name, folder)
        self.dim, self.scale = (
            int(self.config.get("projection_dim", 512)),
            logit_scale(name, folder, self.weight_files()),
        )

    @cached_property
    def config(self) -> ModelConfig:
        return read_config(self.folder)

    def weight_files(self) -> list[Path]:
        return weight_files(self.folder)

    def load(self) -> TwoTowers:
        return two_towers(self.name, *read_model(self.folder))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        with timed("load"), loading(self.folder):
            return ClipTokenizer(self.folder)

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        return F.normalize(self.embeddings(images), dim=-1)

    def embeddings(self, images: Sequence[Image.Image]) -> Tensor:
        """[images, dim], before they are normalised."""
        return self.computed(images, self.embeddings_of, FrozenImages.embeddings)

    def embeddings_of(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.model.visual_projection(self.model.vision_model(pixels).pooler_output)
        return found

    @cached_property
    def image_layers(self) -> ImageLayers:
        return ImageLayers.of(self.model)

    @cached_property
    def frozen_images(self) -> FrozenImages:
        return FrozenImages(self.model.vision_model, self.image_layers)

    @cached_property
    def frozen_texts(self) -> FrozenTexts:
        return FrozenTexts(self.text_tower)

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        if self.device.type == "cpu":
            return F.normalize(each_alone(self.frozen_texts.embeddings, phrases), dim=-1)
        with torch.no_grad():
            return F.normalize(self.texts_together(phrases), dim=-1).cpu()

    def texts_together(self, phrases: Sequence[str]) -> Tensor:
        longest = self.model.text_model.config.max_position_embeddings
        ids = padded(self.tokenizer.phrases(phrases, longest), self.tokenizer.pad_token_id).to(self.device)
        found: Tensor = self.model.text_projection(self.model.text_model(ids).pooler_output)
        return found

    @cached_property
    def vision_config(self) -> VisionConfig:
        return self.config.get("vision_config", {})

    def view_format(self, view: str) -> ViewFormat | None:
        config = self.vision_config
        size = int(config.get("image_size", 224))
        tokens = 1 + (size // int(config.get("patch_size", 32))) ** 2  # the class token and the patches
        if view.startswith("hidden@"):
            self.layers_below(view)  # an error where there is no such layer
            return ViewFormat((tokens, int(config.get("hidden_size", 768))))
        if view == "patches":
            return ViewFormat((tokens, self.dim), "<f2")
        if view in ("embedding", RAW):
            return ViewFormat((self.dim,))
        return ViewFormat((3, size, size), "u1") if view == "pixels" else None

    def encode(self, images: Sequence[Image.Image], view: str) -> Tensor:
        """raw, hidden@k and patches as below. pixels: resized and cropped as for CLIP, uint8, which takes a quarter of the
        space of float32; ImageTower normalises them."""
        if view == RAW:
            return self.embeddings(images)
        if view.startswith("hidden@"):
            return self.hidden(images, self.layers_below(view))
        if view == "patches":
            return self.patches(images)
        return torch.stack([i if isinstance(i, Tensor) else self.processor.pixels(i) for i in images])

    def patches(self, images: Sequence[Image.Image]) -> Tensor:
        """float16 [images, 1 + patches, dim]: the embedding, then the last layer's patch tokens after the same norm and
        projection, all L2-normalised. These are FedOTP's dense features. We use them for LoCoOp and GalLoP too, whose
        code takes for a patch the last layer's output if each token attended to itself alone."""

        def together(pixels: Tensor) -> Tensor:
            states = self.model.vision_model(pixels).last_hidden_state
            found: Tensor = self.model.visual_projection(self.model.vision_model.post_layernorm(states))
            return found

        found = self.computed(images, together, FrozenImages.patches)
        return F.normalize(found, dim=-1).half()

    def layers_below(self, view: str) -> int:
        """How many layers of the image tower lie below the view hidden@k: k or, where k < 0, all but the last −k."""
        layers, k = int(self.vision_config.get("num_hidden_layers", 12)), view.removeprefix("hidden@")
        if not k.removeprefix("-").isdecimal() or not -layers <= int(k) < layers:
            raise FedvlmError(
                f"{view}: the image tower of backbone={self.name} has {layers} layers, so k is a whole number from "
                f"{-layers} to {layers - 1}; where an adapter trains the last layers, use layers=1 to {layers}, "
                "or 0 for all"
            )
        return int(k) % layers

    def hidden(self, images: Sequence[Image.Image], layers: int) -> Tensor:
        """Activations [images, 1 + patches, width] after the first `layers` layers; 0: the input of the first."""

        def together(pixels: Tensor) -> Tensor:
            x = self.model.vision_model.first_layer_input(pixels)
            for layer in self.model.vision_model.encoder.layers[:layers]:
                x = layer(x)
            return x

        return self.computed(images, together, lambda tower, pixels: tower.hidden(pixels, layers))

    @cached_property
    def image_tower(self) -> ImageTower:
        model = copy.deepcopy(self.frozen)  # whoever trains it may move it to another device
        return ImageTower(model.vision_model, model.visual_projection, self.processor)

    @cached_property
    def text_tower(self) -> TextTower:
        return TextTower.of(self.frozen, self.tokenizer)

    @cached_property
    def both_towers(self) -> Towers:
        model = self.frozen
        return Towers(ImageLayers.of(model), TextTower.of(model, self.tokenizer))

    @cached_property
    def whole_model(self) -> WholeModel:
        model = copy.deepcopy(self.frozen)
        image = ImageTower(model.vision_model, model.visual_projection, self.processor)
        return WholeModel(image, model, self.tokenizer)


class ImageTower(nn.Module):
    """CLIP's image tower, from uint8 pixels to the embedding before normalisation. The embedding is returned twice,
    since modules of `adapters.network` return (logits, features)."""

    mean: Tensor
    std: Tensor

    def __init__(self, vision: nn.Module, projection: nn.Linear | nn.Identity, processor: Preprocessing):
        super().__init__()
        self.vision, self.projection = vision, projection
        for name, values in (("mean", processor.image_mean), ("std", processor.image_std)):
            self.register_buffer(name, (torch.tensor(values) * 255).view(3, 1, 1), persistent=False)

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`real`, which marks examples that are not padding, is ignored: there is no batch norm here."""
        x = ((x - self.mean) / self.std).to(next(self.vision.parameters()).dtype)
        found = self.projection(self.vision(x).pooler_output)
        return found, found
