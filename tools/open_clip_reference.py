"""Writes tests/data/open_clip_reference.json: features that open_clip itself computes for small random models.

    pip install --target FOLDER --no-deps open_clip_torch timm torchvision ftfy wcwidth
    PYTHONPATH=FOLDER:tests python tools/open_clip_reference.py

For each layout: the configuration, the names and shapes of the weights, and the features of a few images and phrases.
The weights themselves are a function of their names (`open_clip_models.weights_of`), so that they need not be stored.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

library = torch.library.Library(
    "torchvision", "DEF"
)  # torchvision may be built for another torch: only its PIL part is used
for operator in ("nms", "qnms"):
    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import open_clip  # noqa: E402
import timm  # noqa: E402
from open_clip.transform import PreprocessCfg, image_transform_v2  # noqa: E402
from open_clip_models import LAYOUTS, PHRASES, pictures, tokens_for, weights_of  # noqa: E402
from transformers import BertConfig  # noqa: E402

OUT = Path(__file__).parent.parent / "tests" / "data" / "open_clip_reference.json"
TIMM = {"embed_dim": 128, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8}


def small_timm(name: str, **options):
    return original(name, **TIMM, **options)


original, timm.create_model = timm.create_model, small_timm


def reference(layout: str, folder: Path) -> dict[str, object]:
    settings = LAYOUTS[layout]
    given = json.loads(json.dumps(settings["model_cfg"]))
    if "hf_model_name" in given["text_cfg"]:
        sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 96}
        BertConfig(vocab_size=64, max_position_embeddings=32, **sizes).save_pretrained(folder)
        given["text_cfg"] |= {"hf_model_name": str(folder), "hf_model_pretrained": False}
    quick, custom = given.pop("quick_gelu", False), given.pop("custom_text", False)
    custom = custom or "hf_model_name" in given["text_cfg"]
    kind = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    model = kind(**given, quick_gelu=quick).eval()
    shapes = {k: list(v.shape) for k, v in model.state_dict().items()}
    model.load_state_dict(weights_of(shapes))
    size = given["vision_cfg"]["image_size"]
    prepare = image_transform_v2(PreprocessCfg(size=size, **settings["preprocess_cfg"]), is_train=False)
    with torch.no_grad():
        images = model.encode_image(torch.stack([prepare(i) for i in pictures()]))
        texts = model.encode_text(tokens_for(layout, PHRASES, open_clip.SimpleTokenizer), normalize=True)
    return {"shapes": shapes, "images": images.tolist(), "texts": texts.tolist()}


if __name__ == "__main__":
    found = {}
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            found[layout] = reference(layout, Path(folder))
    text = json.dumps(found, separators=(",", ":"))
    OUT.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {OUT.name}, {len(text) / 1e3:.0f} kB, with open_clip {open_clip.__version__}")
