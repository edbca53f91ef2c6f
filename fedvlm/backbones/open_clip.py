"""Models in open_clip's format: a folder with open_clip_config.json and open_clip_model.safetensors.

CLIP with a ViT (LAION's, MetaCLIP, DFN) and SigLIP are computed by the modules for Hugging Face's format, so that every
adapter for these works. Other image towers (CLIP's ResNet, EVA-02, timm's ViT) and BERT as the text tower (BiomedCLIP)
give embeddings; prompts need CLIP's own text tower, with any image tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, cast

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.backbones import ASSETS, BUNDLED
from fedvlm.backbones.alone import each_alone
from fedvlm.backbones.base import RAW, Backbone, ViewFormat
from fedvlm.backbones.hf import Clip, HuggingFaceModel, logit_scale
from fedvlm.backbones.known import filled, sizes
from fedvlm.backbones.model_folder import OPEN_CLIP_WEIGHTS, ModelConfig, loading
from fedvlm.backbones.modified_resnet import ModifiedResNet
from fedvlm.backbones.open_clip_config import OpenClipConfig, read_open_clip
from fedvlm.backbones.open_clip_text import BertText, ClipText, clip_text_sizes
from fedvlm.backbones.open_clip_weights import (
    CLIP_IMAGE,
    CLIP_TEXT,
    SCALARS,
    SIGLIP_IMAGE,
    SIGLIP_TEXT,
    converted,
    text_weights,
)
from fedvlm.backbones.preprocessing import Preprocessing
from fedvlm.backbones.siglip import Siglip
from fedvlm.backbones.timm_vit import ImageEncoder, heads_of
from fedvlm.backbones.tokenizers import ClipTokenizer, SiglipTokenizer
from fedvlm.backbones.weights import fill, read_weights
from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError
from fedvlm.towers.modules import TextSizes, TextWithProjection, TwoTowers, VisionSizes
from fedvlm.towers.text import TextTower, Tokenizer

VOCABULARY = 49408  # of CLIP's own tokenizer
# timm's SigLIP image towers with the tanh approximation of GELU; in the others it is exact
TANH = ("vit_base_patch32_siglip", "vit_large_patch16_siglip_512", "vit_so400m_patch16_siglip", "vit_giantopt")


def load_open_clip(name: str, folder: Path) -> Backbone:
    config = read_open_clip(name, folder)
    timm, text = config.image.timm_model_name or "", config.text
    if "siglip" in timm and config.image.timm_pool == "map" and text.no_causal_mask and text.pool_type == "last":
        return OpenClipSiglip(name, folder)
    if not text.hf_model_name and (
        text.no_causal_mask or text.pool_type != "argmax" or text.act_kwargs or text.norm_kwargs
    ):
        raise _unknown(name, "text tower", f"pool_type={text.pool_type}, no_causal_mask={text.no_causal_mask}")
    if not timm and isinstance(config.image.layers, int) and not text.hf_model_name:
        return OpenClipVit(name, folder)
    if "siglip" in timm or (timm and not timm.startswith(("vit_", "eva02_"))):
        raise _unknown(name, "image tower", timm)
    if timm and config.image.timm_pool not in ("", "token", None):
        raise _unknown(name, "image tower", f"{timm} with timm_pool={config.image.timm_pool}")
    if not timm and isinstance(config.image.layers, int):
        raise _unknown(name, "pair of towers", f"open_clip's ViT with {text.hf_model_name}")
    return BertPair(name, folder) if text.hf_model_name else OpenClipPair(name, folder)


def _unknown(name: str, what: str, which: str) -> FedvlmError:
    return FedvlmError(
        f"backbone={name}: its {what} ({which}) is not known here; `fedvlm ls backbones` lists what is. Any encoder can be "
        "given as onnx:FILE, http(s)://… or python:module:function"
    )


class InOpenClipFormat:
    """What the layouts share: the configuration, the weights, the preprocessing."""

    name: str
    folder: Path

    @cached_property
    def open_clip(self) -> OpenClipConfig:
        return read_open_clip(self.name, self.folder)

    def check_preprocessing(self) -> None:
        assert self.open_clip.preprocessing  # reading the configuration checks it

    @cached_property
    def processor(self) -> Preprocessing:
        return self.open_clip.preprocessing

    def weight_files(self) -> list[Path]:
        return [self.folder / OPEN_CLIP_WEIGHTS]

    def weights(self) -> Params:
        with loading(self.folder):
            found = read_weights([self.folder / OPEN_CLIP_WEIGHTS])
        return {k: v for k, v in found.items() if k not in SCALARS}

    @cached_property
    def config(self) -> ModelConfig:
        image = self.open_clip.image
        layers = image.layers if isinstance(image.layers, int) else 0
        sizes = {"image_size": image.image_size, "patch_size": image.patch_size or 32}
        made = {"projection_dim": self.open_clip.model.embed_dim}
        vision = sizes | {"hidden_size": image.width, "num_hidden_layers": layers}
        return cast(ModelConfig, made | {"vision_config": vision})


class OpenClipVit(InOpenClipFormat, Clip):
    """OpenAI's layout: a ViT and a causal text transformer."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return clip_tokenizer(self.name, self.folder, self.open_clip)

    def load(self) -> TwoTowers:
        config, weights = self.open_clip, self.weights()
        image, first = config.image, "visual.transformer.resblocks.0.mlp.c_fc.weight"
        vision = {
            "image_size": image.image_size,
            "patch_size": image.patch_size,
            "hidden_size": image.width,
            "num_hidden_layers": image.layers,
            "num_attention_heads": image.width // image.head_width,
            "intermediate_size": len(weights[first]) if first in weights else 4 * image.width,
            "hidden_act": activation_of(config),
            "layer_norm_eps": 1e-5,
        }
        text = clip_text_sizes(self.name, config, weights, self.tokenizer, activation_of(config))
        ours = converted({k: v for k, v in weights.items() if k.startswith("visual.")}, CLIP_IMAGE)
        ours |= converted(text_weights(weights), CLIP_TEXT) | {"logit_scale": weights["logit_scale"]}
        chosen, dim = sizes(self.name, VisionSizes, vision), config.model.embed_dim
        return filled(self.name, lambda: TwoTowers(chosen, text, "clip", dim), ours)


class OpenClipSiglip(InOpenClipFormat, Siglip):
    """timm's ViT with an attention pool, and a text transformer that is not causal."""

    @cached_property
    def config(self) -> ModelConfig:
        """The image tower's sizes, which open_clip's configuration leaves to timm."""
        shapes = {k: v.shape for k, v in self.weights().items() if k.startswith("visual.trunk.")}
        patch = shapes.get("visual.trunk.patch_embed.proj.weight")
        if patch is None:
            raise FedvlmError(f"backbone={self.name}: its weights lack visual.trunk.patch_embed.proj.weight")
        layers = 1 + max((int(k.split(".")[3]) for k in shapes if ".blocks." in k), default=-1)
        sizes = {"image_size": self.open_clip.image.image_size, "patch_size": patch[-1]}
        vision = sizes | {"hidden_size": patch[0], "num_hidden_layers": layers}
        return cast(ModelConfig, {"projection_dim": patch[0], "vision_config": vision})

    @cached_property
    def tokenizer(self) -> Tokenizer:
        cleaning = (self.open_clip.text.tokenizer_kwargs or {}).get("clean")
        with loading(self.folder):
            return SiglipTokenizer(self.folder, keeps_punctuation=cleaning != "canonicalize")

    def load(self) -> TwoTowers:
        weights, text = self.weights(), self.open_clip.text
        timm, width = self.open_clip.image.timm_model_name or "", int(self.vision_config["hidden_size"])
        vision = dict(self.vision_config) | {
            "num_attention_heads": heads_of(width),
            "hidden_act": gelu(timm.startswith(TANH)),
            "layer_norm_eps": 1e-6,
            "intermediate_size": len(weights["visual.trunk.blocks.0.mlp.fc1.weight"]),
        }
        texts = {
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.context_length,
            "hidden_size": text.width,
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "intermediate_size": len(weights["text.transformer.resblocks.0.mlp.c_fc.weight"]),
            "projection_size": width,
            "hidden_act": gelu((text.act_kwargs or {}).get("approximate") == "tanh"),
            "layer_norm_eps": (text.norm_kwargs or {}).get("eps", 1e-5),
        }
        ours = converted({k: v for k, v in weights.items() if k.startswith("visual.")}, SIGLIP_IMAGE)
        ours |= converted(text_weights(weights), SIGLIP_TEXT)
        ours |= {k: v for k, v in weights.items() if k.startswith("logit_")}
        one, other = sizes(self.name, VisionSizes, vision), sizes(self.name, TextSizes, texts)
        return filled(self.name, lambda: TwoTowers(one, other, "siglip"), ours)


class Pair(nn.Module):
    """An image tower and a text tower."""

    def __init__(self, image: nn.Module, text: ClipText | BertText):
        super().__init__()
        self.image, self.text = image, text


class OpenClipPair(InOpenClipFormat, HuggingFaceModel[Pair]):
    """Other towers: embeddings of images and texts and, with CLIP's text tower, prompts."""

    views: ClassVar[tuple[str, ...]] = ("embedding", RAW)
    towers: ClassVar[tuple[str, ...]] = ("text tower",)
    has_texts = True

    def __init__(self, name: str, folder: Path):
        super().__init__(name, folder)
        self.dim = self.open_clip.model.embed_dim
        self.scale = logit_scale(self.name, folder, self.weight_files())

    def load(self) -> Pair:
        weights = self.weights()
        visual = {k.removeprefix("visual."): v for k, v in weights.items() if k.startswith("visual.")}
        with loading(self.folder):
            image = image_tower(self.open_clip, visual)
        fill(image, visual, self.name)
        return Pair(image, self.text_model(weights))

    def text_model(self, weights: Params) -> ClipText | BertText:
        config, tokenizer = self.open_clip, clip_tokenizer(self.name, self.folder, self.open_clip)
        text = clip_text_sizes(self.name, config, weights, tokenizer, activation_of(config))
        ours = converted(text_weights(weights), CLIP_TEXT)
        return ClipText(filled(self.name, lambda: TextWithProjection(text, config.model.embed_dim), ours), tokenizer)

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        return F.normalize(self.encode(images, RAW), dim=-1)

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        if self.device.type == "cpu":
            found = each_alone(lambda part: torch.cat([self.model.text([one]) for one in part]), phrases)
            return F.normalize(found, dim=-1)
        with torch.no_grad():
            return F.normalize(self.model.text(phrases), dim=-1).cpu()

    def view_format(self, view: str) -> ViewFormat | None:
        return ViewFormat((self.dim,)) if view in self.views else None

    def encode(self, images: Sequence[Image.Image], view: str) -> Tensor:
        """Encode images in the one further view, raw."""
        return self.computed(images, self.model.image)

    @cached_property
    def text_tower(self) -> TextTower | None:
        text = self.text_model(self.weights())
        return TextTower.of(text.model, text.tokenizer) if isinstance(text, ClipText) else None


class BertPair(OpenClipPair):
    """A pair of towers with BERT for texts, which is not CLIP's text tower: it gives embeddings only."""

    towers: ClassVar[tuple[str, ...]] = ()

    def text_model(self, weights: Params) -> ClipText | BertText:
        return BertText(self.name, self.folder, self.open_clip.text, text_weights(weights))


def image_tower(config: OpenClipConfig, weights: Params) -> nn.Module:
    """`weights` without their beginning "visual."."""
    image, timm = config.image, config.image.timm_model_name
    if timm:
        quick = timm.startswith("vit_") and "quickgelu" in timm
        return ImageEncoder(weights, timm.startswith("eva02_"), quick_gelu if quick else F.gelu)
    assert isinstance(image.layers, list)
    heads = image.width * 32 // image.head_width
    return ModifiedResNet(image.layers, image.width, heads, image.image_size, config.model.embed_dim)


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def activation_of(config: OpenClipConfig) -> str:
    """The activation in open_clip's own transformers."""
    return "quick_gelu" if config.model.quick_gelu else "gelu"


def gelu(tanh: bool) -> str:
    return "gelu_pytorch_tanh" if tanh else "gelu"


def clip_tokenizer(name: str, folder: Path, config: OpenClipConfig) -> ClipTokenizer:
    """The folder's tokenizer or, where it has none, CLIP's own, which open_clip has built in."""
    own = (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file()
    if not own and config.text.vocab_size != VOCABULARY:
        raise FedvlmError(
            f"backbone={name}: no tokenizer.json in that folder, and its {config.text.vocab_size} tokens are not CLIP's "
            "own; copy the model's tokenizer there"
        )
    with loading(folder):
        return ClipTokenizer(folder if own else ASSETS / BUNDLED)
