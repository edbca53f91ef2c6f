"""Small models in open_clip's format, with weights that are a function of their names; see tools/open_clip_reference.py."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

REFERENCE = Path(__file__).parent / "data" / "open_clip_reference.json"
PHRASES = ["a photo of a cat", "A photo of the red, red tree.", "dog"]
WORDS = ["a", "photo", "of", "cat", "dog", "red", "tree", "the", ".", ","]
SPECIAL = ["[PAD]", "</s>", "[UNK]", "[CLS]", "[SEP]"]
OPENAI = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}
HALVES = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "bicubic", "resize_mode": "squash"}
CLIP_TEXT = {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
VIT = {"image_size": 32, "layers": 3, "width": 32, "head_width": 16, "patch_size": 8}
SIGLIP_TEXT = {
    **{"context_length": 12, "vocab_size": 20, "width": 64, "heads": 2, "layers": 2, "no_causal_mask": True},
    **{"proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}, "hf_tokenizer_name": "words"},
    **{"tokenizer_kwargs": {"clean": "canonicalize"}},
}
BERT = {
    **{"hf_model_name": "bert-words", "hf_tokenizer_name": "bert-words", "hf_proj_type": "mlp", "context_length": 16},
    **{"hf_pooler_type": "cls_last_hidden_state_pooler"},
}


def timm(name: str, pool: str, proj: str | None) -> dict[str, object]:
    return {
        "image_size": 32,
        "timm_model_name": name,
        "timm_model_pretrained": False,
        "timm_pool": pool,
        "timm_proj": proj,
    }


def model(vision: Mapping[str, object], text: Mapping[str, object], dim: int, **more: object) -> dict[str, object]:
    return {"embed_dim": dim, "vision_cfg": dict(vision), "text_cfg": dict(text), **more}


LAYOUTS: dict[str, dict[str, dict[str, object]]] = {
    "vit": {"model_cfg": model(VIT, CLIP_TEXT, 24), "preprocess_cfg": OPENAI},
    "vit quickgelu (DFN, MetaCLIP)": {
        "model_cfg": model(VIT, CLIP_TEXT, 24, quick_gelu=True),
        "preprocess_cfg": OPENAI,
    },
    "resnet": {
        "model_cfg": model(
            {"image_size": 64, "layers": [2, 1, 1, 1], "width": 8, "patch_size": None}, CLIP_TEXT, 24, quick_gelu=True
        ),
        "preprocess_cfg": OPENAI | {"interpolation": "bilinear"},
    },
    "biomedclip": {"model_cfg": model(timm("vit_base_patch16_224", "", "linear"), BERT, 24), "preprocess_cfg": OPENAI},
    "eva02": {
        "model_cfg": model(timm("eva02_base_patch16_clip_224", "token", None), CLIP_TEXT, 24, custom_text=True),
        "preprocess_cfg": OPENAI,
    },
    "siglip": {
        "model_cfg": model(
            timm("vit_base_patch16_siglip_224", "map", "none"), SIGLIP_TEXT, 128, custom_text=True, init_logit_bias=-10
        ),
        "preprocess_cfg": HALVES,
    },
    "siglip2": {
        "model_cfg": model(
            timm("vit_so400m_patch16_siglip_256", "map", "none"),
            SIGLIP_TEXT | {"act_kwargs": {"approximate": "tanh"}},
            128,
            custom_text=True,
            init_logit_bias=-10,
        ),
        "preprocess_cfg": HALVES,
    },
}


def pictures() -> list[Image.Image]:
    """Two wide ones and a tall one of different colours, smooth enough that a resize keeps something of them."""
    rng = np.random.default_rng(11)
    base = [np.array(colour)[None, None] for colour in ((210, 40, 90), (20, 160, 230), (120, 220, 10))]
    small = [np.clip(b + rng.integers(-90, 90, (7 + 4 * i, 12, 3)), 0, 255) for i, b in enumerate(base)]
    return [Image.fromarray(a.astype(np.uint8)).resize((81 + 6 * i, 45 + 30 * i)) for i, a in enumerate(small)]


@cache
def uniform_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).random(shape) * 2 - 1


def weights_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Random numbers of a size that keeps activations near 1; variances are positive."""
    found = {}
    for name, shape in shapes.items():
        uniform = uniform_of(name, tuple(shape))
        if name.endswith("num_batches_tracked"):
            found[name] = torch.zeros((), dtype=torch.int64)
            continue
        inputs = int(np.prod(shape[1:])) if len(shape) > 1 else 0
        value = uniform * (1.7 / inputs**0.5 if inputs else 0.3)
        if name.endswith(("running_var", "logit_scale")) or (len(shape) == 1 and name.endswith("weight")):
            value = 1 + value
        found[name] = torch.from_numpy(np.asarray(value, dtype=np.float32))
    return found


def shapes(layout: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = json.loads(REFERENCE.read_text())[layout]["shapes"]
    return found


def write_model(layout: str, folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    (folder / "open_clip_config.json").write_text(json.dumps(LAYOUTS[layout]))
    save_file(weights_of(shapes), folder / "open_clip_model.safetensors")
    if layout in ("biomedclip", "siglip", "siglip2"):
        write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer.json of a few whole words, with BERT's special tokens around a text."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    ids = {w: i for i, w in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    around = [(t, ids[t]) for t in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "pad_token": "</s>"}')


def tokens_for(layout: str, phrases: Sequence[str], simple: Callable[..., Callable[..., Tensor]]) -> Tensor:
    """What open_clip's tokenizer of this layout gives; `simple` is its SimpleTokenizer."""
    text = LAYOUTS[layout]["model_cfg"]["text_cfg"]
    assert isinstance(text, dict)
    length, ids = int(text["context_length"]), {w: i for i, w in enumerate([*SPECIAL, *WORDS])}
    if layout == "biomedclip":
        split = [p.lower().replace(",", " ,").replace(".", " .").split() for p in phrases]
        rows = [[ids["[CLS]"], *(ids[w] for w in words), ids["[SEP]"]] for words in split]
        return torch.tensor([r + [ids["[PAD]"]] * (length - len(r)) for r in rows])
    if layout.startswith("siglip"):
        split = [p.lower().replace(",", "").replace(".", "").split() for p in phrases]
        rows = [[*(ids[w] for w in words), ids["</s>"]] for words in split]
        return torch.tensor([r + [ids["</s>"]] * (length - len(r)) for r in rows])
    return simple(context_length=length)(list(phrases))
