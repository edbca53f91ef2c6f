"""open_clip_config.json as typed values. What is not known here is refused, since ignoring it would change features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from fedvlm.backbones.model_folder import OPEN_CLIP
from fedvlm.backbones.preprocessing import Preprocessing, preprocessing_of
from fedvlm.core.records import parsed, read_text
from fedvlm.errors import FedvlmError
from fedvlm.system.names import printable

# entries that change nothing here: for training only, seen in the weights' shapes, or about where the model came from
IGNORED = {
    *("patch_dropout", "mlp_ratio", "timm_model_pretrained", "timm_drop", "timm_drop_path", "timm_patch_drop"),
    *("timm_proj_bias", "hf_model_pretrained", "hf_tokenizer_name", "proj_bias", "init_logit_scale", "init_logit_bias"),
    *("output_tokens", "nonscalar_logit_scale", "pad_id", "cast_dtype", "output_dict"),
}


@dataclass(frozen=True)
class ImageSide:
    """vision_cfg, with open_clip's defaults."""

    image_size: int = 224
    layers: int | list[int] = 12
    width: int = 768
    head_width: int = 64
    patch_size: int | None = 16
    timm_model_name: str | None = None
    timm_pool: str | None = "avg"
    timm_proj: str | None = "linear"


@dataclass(frozen=True)
class TextSide:
    """text_cfg, with open_clip's defaults."""

    context_length: int = 77
    vocab_size: int = 49408
    width: int = 512
    heads: int = 8
    layers: int = 12
    no_causal_mask: bool = False
    pool_type: str = "argmax"
    hf_model_name: str | None = None
    hf_proj_type: str | None = "mlp"
    hf_pooler_type: str | None = "mean_pooler"
    act_kwargs: dict[str, object] | None = None
    norm_kwargs: dict[str, object] | None = None
    tokenizer_kwargs: dict[str, object] | None = None


@dataclass(frozen=True)
class ModelSide:
    """model_cfg, with open_clip's defaults."""

    embed_dim: int = 512
    quick_gelu: bool = False
    custom_text: bool = False
    vision_cfg: dict[str, object] = field(default_factory=dict)
    text_cfg: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenClipConfig:
    model: ModelSide
    image: ImageSide
    text: TextSide
    preprocessing: Preprocessing


Side = TypeVar("Side", ImageSide, TextSide, ModelSide)
TYPES = {  # by the annotation of a field
    "int": int,
    "int | None": int | None,
    "int | list[int]": int | list,
    "str": str,
    "str | None": str | None,
    "bool": bool,
    "dict[str, object]": dict,
    "dict[str, object] | None": dict | None,
}


def read_open_clip(name: str, folder: Path) -> OpenClipConfig:
    try:
        found = parsed(read_text(folder / OPEN_CLIP))
    except (OSError, ValueError) as error:
        raise FedvlmError(f"backbone={name}: {OPEN_CLIP} is not readable ({error})") from error
    given, preprocess = found.get("model_cfg"), found.get("preprocess_cfg", {})
    if not isinstance(given, dict) or not isinstance(preprocess, dict):
        raise FedvlmError(
            f"backbone={name}: {OPEN_CLIP} must hold model_cfg and preprocess_cfg, as open_clip saves them"
        )
    model = _side(name, ModelSide, given)
    sizes = model.vision_cfg.get("image_size")
    square = sizes[0] if isinstance(sizes, list) and len(sizes) == 2 and sizes[0] == sizes[1] else sizes
    image = _side(name, ImageSide, model.vision_cfg if square is None else model.vision_cfg | {"image_size": square})
    text = _side(name, TextSide, model.text_cfg)
    return OpenClipConfig(model, image, text, preprocessing_of(name, image.image_size, preprocess))


def _side(name: str, kind: type[Side], given: Mapping[str, object]) -> Side:
    types = {f.name: TYPES[str(f.type)] for f in fields(kind)}
    for key, value in given.items():
        if key in types and not isinstance(value, types[key]):
            raise FedvlmError(f"backbone={name}: {OPEN_CLIP} has {key}={printable(value, 60)}")
        if key not in types and key not in IGNORED and value:
            raise FedvlmError(
                f"backbone={name}: {OPEN_CLIP} has {printable(key, 40)}={printable(value, 60)}, which is not known here; "
                "use the model in Hugging Face format, or as onnx:FILE or python:module:function"
            )
    return kind(**{k: v for k, v in given.items() if k in types})  # type: ignore[arg-type]
