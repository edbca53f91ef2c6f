"""Image encoders without a text tower, in Hugging Face format: ViT, DINOv2, DINOv3 and others. Never fitted to class names,
they suit linear heads and other adapters on embeddings that start from random classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, cast

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.backbones.base import RAW, ViewFormat
from fedvlm.backbones.hf import HuggingFaceModel
from fedvlm.backbones.known import ALONE, one_tower, read_model
from fedvlm.backbones.model_folder import loading, read_config
from fedvlm.backbones.through_transformers import transformers_for
from fedvlm.errors import FedvlmError
from fedvlm.system.names import printable

# vision-only encoders by what of their output is the embedding: the class token, or what the model itself pools
CLASS_TOKEN = ("vit", "deit", "beit", "data2vec-vision", "vit_msn", "dinov2", "dinov2_with_registers", "dinov3_vit")
POOLED = ("clip_vision_model", "siglip_vision_model", "dinov3_convnext")


class Vision(HuggingFaceModel[nn.Module]):
    """A vision-only encoder (ViT, DINOv2, DINOv3, …)."""

    views: ClassVar[tuple[str, ...]] = ("embedding", RAW)
    towers: ClassVar[tuple[str, ...]] = ()
    has_texts = False

    def __init__(self, name: str, folder: Path):
        super().__init__(name, folder)
        config = read_config(folder)
        self.model_type = kind = config.get("model_type", "")
        if kind not in (*CLASS_TOKEN, *POOLED):
            raise FedvlmError(
                f"backbone={name}: model_type={printable(kind, 40)} is not known here; Hugging Face models can be clip, "
                f"siglip, {', '.join((*CLASS_TOKEN, *POOLED))}, and any other one onnx:FILE or python:module:function"
            )
        self.pooled = kind in POOLED
        sizes = config.get("hidden_sizes") or [config.get("hidden_size", 0)]
        self.dim = int(sizes[-1])
        self.scale = 20.0  # such a model has no logit scale; this value is our choice
        if not self.dim:
            raise FedvlmError(f"backbone={name}: its config.json names no hidden_size; is it an image encoder?")

    def load(self) -> nn.Module:
        """ViT and DINOv2 by our own modules, others by transformers."""
        if self.model_type in ALONE:
            return one_tower(self.name, *read_model(self.folder))
        options = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
        what = f"backbone={self.name}: model_type={self.model_type}"
        with transformers_for(what) as transformers, loading(self.folder):
            model, info = transformers.AutoModel.from_pretrained(self.folder, dtype=torch.float32, **options)
        missing = sorted(k for k in info["missing_keys"] if "pooler" not in k)  # not used
        if missing:  # transformers would fill them with random numbers
            raise FedvlmError(f"backbone={self.name}: its weights lack {len(missing)} tensors, such as {missing[0]}")
        model.train(False)
        model.requires_grad_(False)
        return cast(nn.Module, model)

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        return F.normalize(self.encode(images, RAW), dim=-1)

    def view_format(self, view: str) -> ViewFormat | None:
        return ViewFormat((self.dim,)) if view in ("embedding", RAW) else None

    def encode(self, images: Sequence[Image.Image], view: str) -> Tensor:
        """Encode images in the one further view, raw."""
        model, pooled = self.model, self.pooled or self.model_type in ALONE  # loaded before threads ask for it

        def embeddings_of(pixels: Tensor) -> Tensor:
            output = model(pixel_values=pixels)
            found: Tensor = output.pooler_output if pooled else output.last_hidden_state[:, 0]
            return found

        return self.computed(images, embeddings_of)

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        return None
