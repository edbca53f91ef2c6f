"""Models in Hugging Face's format that are computed by our own modules: CLIP, SigLIP, ViT and DINOv2.

A setting that would change what is computed and is not known here is refused, and the weights must be exactly those of
the module; nothing of a model is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import nn

from fedvlm.backbones.model_folder import loading, most_of
from fedvlm.backbones.weights import fill, read_weights, weight_files
from fedvlm.core.records import parsed, read_text
from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError
from fedvlm.system.names import printable
from fedvlm.towers.modules import ACTIVATIONS, Architecture, OneTower, Sizes, TextSizes, TwoTowers, VisionSizes

# what a config.json need not repeat
VISION: Mapping[str, object] = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"patch_size": 32, "image_size": 224, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}
TEXT: Mapping[str, object] = {
    **{"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8},
    **{"vocab_size": 49408, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "eos_token_id": 49407,
}
SIGLIP: Mapping[str, object] = {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
SIGLIP_TEXT = {k: v for k, v in {**VISION, **SIGLIP}.items() if k not in ("patch_size", "image_size")}
SIGLIP_TEXT |= {"vocab_size": 32000, "max_position_embeddings": 64}
ALONE: Mapping[str, Mapping[str, object]] = {
    "vit": {**VISION, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-12},
    "dinov2": {**VISION, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6},
}
MAY_BE_0 = ("eos_token_id", "projection_size")
SINGLE = {"vision_model.embeddings.class_embedding", "vision_model.embeddings.position_embedding.weight"}
# settings that change what is computed, and the only value that is known here
ONLY = {"qkv_bias": True, "use_swiglu_ffn": False, "vision_use_head": True, "apply_layernorm": True}
RENAMED = (  # of a ViT and a DINOv2: their names, ours
    (r"^(vit|dinov2)\.", ""),
    (r"^embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    (r"^embeddings\.position_embeddings", "vision_model.embeddings.position_embedding.weight"),
    (r"^embeddings\.patch_embeddings\.projection", "vision_model.embeddings.patch_embedding"),
    (r"^encoder\.layer\.", "vision_model.encoder.layers."),
    (r"^layernorm\.", "vision_model.post_layernorm."),
    (r"\.(norm1|layernorm_before)\.", ".layer_norm1."),
    (r"\.(norm2|layernorm_after)\.", ".layer_norm2."),
    (r"\.attention\.attention\.(.)\w+\.", r".self_attn.\1_proj."),
    (r"\.attention\.output\.dense\.", ".self_attn.out_proj."),
    (r"\.layer_scale(.)\.lambda1", r".scale\1"),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
)
UNUSED = re.compile(r"(vit\.|dinov2\.)?(pooler\.|classifier\.|embeddings\.mask_token).*|.*\.position_ids")

AnySizes = TypeVar("AnySizes", bound=Sizes)
AnyModel = TypeVar("AnyModel", bound=nn.Module)


def two_towers(name: str, config: Mapping[str, object], weights: Params) -> TwoTowers:
    """A CLIP or a SigLIP; `config`: what config.json holds."""
    family: Architecture = "siglip" if config.get("model_type") == "siglip" else "clip"
    siglip = family == "siglip"
    vision = sizes(name, VisionSizes, {**VISION, **(SIGLIP if siglip else {}), **side(config, "vision_config")})
    given = {**(SIGLIP_TEXT if siglip else TEXT), **side(config, "text_config")}
    if siglip:
        given = {"projection_size": given["hidden_size"], **given, "eos_token_id": 0}
    text, dim = sizes(name, TextSizes, given), config.get("projection_dim", 512)
    return filled(name, lambda: TwoTowers(vision, text, family, dim if isinstance(dim, int) else 0), weights)


def one_tower(name: str, config: Mapping[str, object], weights: Params) -> OneTower:
    """A ViT or a DINOv2."""
    family = cast(Architecture, config["model_type"])
    given = {**ALONE[family], **config}
    if family == "dinov2" and isinstance(given["hidden_size"], int):
        ratio = config.get("mlp_ratio", 4)
        given["intermediate_size"] = int(given["hidden_size"] * ratio) if isinstance(ratio, int | float) else 0
    vision = sizes(name, VisionSizes, given)
    for pattern, new in RENAMED:
        weights = {re.sub(pattern, new, k): v for k, v in weights.items()}
    for key in SINGLE & weights.keys():  # of one image
        weights[key] = weights[key].flatten(0, -2) if key.endswith("weight") else weights[key].flatten()
    return filled(name, lambda: OneTower(vision, family), weights)


def side(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    """A tower's settings; old files have more of them under another key."""
    found = [config.get(k) or {} for k in (key, f"{key}_dict")]
    return {k: v for part in found if isinstance(part, dict) for k, v in part.items()}


def sizes(name: str, kind: type[AnySizes], given: Mapping[str, object]) -> AnySizes:
    """The settings of a tower; an error where one is not a size, or would change what is computed."""
    for key, only in ONLY.items():
        if given.get(key, only) != only:
            raise refused(name, key, given[key])
    if str(given["hidden_act"]) not in ACTIVATIONS:
        raise refused(name, "hidden_act", given["hidden_act"])
    found: dict[str, object] = {}
    for field in fields(kind):
        value, least = given.get(field.name, field.default), 0 if field.name in MAY_BE_0 else 1
        wanted = {"hidden_act": str, "layer_norm_eps": float}.get(field.name, int)
        if type(value) is not wanted or (isinstance(value, int) and not least <= value <= most_of(field.name)):
            raise refused(name, field.name, value)
        found[field.name] = value
    made = kind(**found)  # type: ignore[arg-type]
    if made.hidden_size % made.num_attention_heads:
        raise refused(name, "num_attention_heads", made.num_attention_heads)
    return made


def refused(name: str, key: str, value: object) -> FedvlmError:
    return FedvlmError(f"backbone={name}: config.json has {key}={printable(value, 40)}, which is not known here")


def read_model(folder: Path) -> tuple[Mapping[str, object], Params]:
    """The configuration, and the weights in float32 without those that no embedding depends on."""
    with loading(folder):
        config = parsed(read_text(folder / "config.json"))
        found = read_weights(weight_files(folder))
    return config, {k: v for k, v in found.items() if not UNUSED.fullmatch(k)}


def filled(name: str, make: Callable[[], AnyModel], weights: Params) -> AnyModel:
    """The module with these weights; nothing is allocated besides."""
    with torch.device("meta"):
        model = make()
    fill(model, weights, name)
    return model
