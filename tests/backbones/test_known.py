"""Models, preprocessing and tokenizers of our own beside those of transformers: the same bits and the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from siglip_models import drawn, siglip_folder
from transformers import AutoImageProcessor, CLIPConfig, CLIPModel, CLIPTokenizer

from fedvlm.backbones import ASSETS, load
from fedvlm.backbones.known import ALONE, read_model, two_towers
from fedvlm.backbones.preprocessing import USUAL, read_preprocessing
from fedvlm.backbones.tokenizers import ClipTokenizer
from fedvlm.backbones.weights import weight_files
from fedvlm.core.state import ALIGNMENT
from fedvlm.errors import FedvlmError

MINI_CLIP = ASSETS / "mini-clip"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
TEXTS = [
    "a photo of a cat.",
    "Größe, naïve café  🐈‍⬛ isn't 1234",
    "",
    "word " * 100,
    "they'll <|endoftext|> x",
    "中文 \t\n ½ ①",
]


def pictures() -> list[Image.Image]:
    draw = np.random.default_rng(0)
    return [
        Image.fromarray(draw.integers(0, 256, (h, w, 3), np.uint8)) for w, h in ((90, 70), (31, 200), (64, 64), (8, 9))
    ]


def random_clip(folder: Path) -> CLIPModel:
    text = SIZES | {"max_position_embeddings": 20, "hidden_act": "gelu", "eos_token_id": 49407}
    vision = SIZES | {"image_size": 32, "patch_size": 8, "layer_norm_eps": 1e-4}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = drawn(CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)))
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("name", ["mini-clip", "random", "siglip"])
def test_both_towers_give_the_bits_of_transformers(name, tmp_path):
    torch.manual_seed(2)
    if name == "mini-clip":
        folder, theirs = MINI_CLIP, CLIPModel.from_pretrained(MINI_CLIP, dtype=torch.float32).eval()
    else:
        folder, theirs = tmp_path, (random_clip if name == "random" else siglip_folder)(tmp_path)
    theirs.requires_grad_(False)  # as loaded models are: torch's attention rounds otherwise where it may need gradients
    ours = two_towers(name, *read_model(folder))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    if name != "siglip":  # in whose layers the order is another
        assert list(ours.state_dict()) == [k for k in theirs.state_dict() if k in ours.state_dict()]
    size = theirs.config.vision_config.image_size
    pixels, longest = torch.randn(3, 3, size, size), theirs.config.text_config.max_position_embeddings
    ids = torch.randint(0, theirs.config.text_config.vocab_size - 2, (4, longest))
    one, other = ours.vision_model(pixels), theirs.vision_model(pixel_values=pixels)
    assert torch.equal(one.pooler_output, other.pooler_output)
    assert name == "siglip" or torch.equal(one.last_hidden_state, other.last_hidden_state)  # whose is normed already
    assert torch.equal(ours.text_model(ids).pooler_output, theirs.text_model(input_ids=ids).pooler_output)


@torch.no_grad()
@pytest.mark.parametrize("size", [28, 42])
@pytest.mark.parametrize("kind", sorted(ALONE))
def test_one_tower_gives_the_bits_of_transformers(kind, size, tmp_path):
    name = {"vit": "ViT", "dinov2": "Dinov2"}[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES, image_size=28, patch_size=7)
    model = drawn(getattr(transformers, f"{name}Model")(config))
    model.save_pretrained(tmp_path)
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": size, "width": size}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    backbone, pixels = load(str(tmp_path)), torch.randn(2, 3, size, size)
    more = {"interpolate_pos_encoding": True} if kind == "vit" and size != 28 else {}
    found = model(pixel_values=pixels, **more).last_hidden_state[:, 0]
    assert torch.equal(backbone.model(pixels).pooler_output, found)


@pytest.mark.parametrize("kind", [k for k in USUAL if k != "DINOv3ViT"])  # transformers' needs torchvision
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"size": 40, "crop_size": 32},
        {"do_rescale": False, "do_normalize": False},
        {"resample": 0, "image_mean": [0.1, 0.2, 0.3], "image_std": [1.1, 0.9, 0.5], "rescale_factor": 0.01},
        {"do_center_crop": True, "size": {"height": 33, "width": 20}, "crop_size": {"height": 40, "width": 18}},
    ],
)
def test_images_are_prepared_as_transformers_does(kind, more, tmp_path):
    given = {"image_processor_type": f"{kind}ImageProcessor"} | more
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    if more.get("do_center_crop") and not hasattr(theirs, "do_center_crop"):
        pytest.skip("its images are never cropped")
    if kind == "Siglip" and "shortest_edge" in theirs.size and theirs.size["shortest_edge"]:
        with pytest.raises(FedvlmError, match="neither crops"):  # of any two images' shapes would differ
            read_preprocessing("a test", given, "")
        return
    ours = read_preprocessing("a test", given, "")
    for image in pictures():
        assert torch.equal(ours([image]), theirs(images=[image], return_tensors="pt")["pixel_values"])


def test_the_kind_of_model_says_how_images_are_prepared_where_the_folder_does_not():
    old = {"feature_extractor_type": "CLIPFeatureExtractor"}
    assert read_preprocessing("a test", {}, "clip") == read_preprocessing("a test", old, "")
    assert read_preprocessing("a test", {}, "siglip").size == (224, 224)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"image_processor_type": "PixtralImageProcessor"}, "Pixtral.*known are"),
        ({"do_pad": True}, "do_pad"),
        ({"size": {"longest_edge": 30}}, "longest_edge"),
        ({"size": 60_000}, "60000.*at most"),
        ({"image_mean": [0.5]}, "image_mean=.0.5"),
        ({"resample": 17}, "resample=17"),
        ({"do_center_crop": False}, "neither crops"),
        ({"crop_size": {"height": -3, "width": 8}}, "crop_size"),
    ],
)
def test_what_is_not_known_of_preprocessing_is_refused(given, words):
    with pytest.raises(FedvlmError, match=words):
        read_preprocessing("a test", given, "clip")


@pytest.mark.parametrize("plain", [True, False], ids=["tokenizer.json", "vocab.json and merges.txt"])
def test_texts_have_the_tokens_of_transformers(plain, tmp_path):
    theirs = CLIPTokenizer.from_pretrained(MINI_CLIP)
    folder = MINI_CLIP
    if not plain:
        model = json.loads((MINI_CLIP / "tokenizer.json").read_text())["model"]
        (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
        pairs = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
        (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]))
        folder = tmp_path
    ours = ClipTokenizer(folder)
    assert ours.words(TEXTS) == theirs(TEXTS, add_special_tokens=False, verbose=False)["input_ids"]
    assert ours.phrases(TEXTS, 16) == theirs(TEXTS, truncation=True, max_length=16)["input_ids"]
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [getattr(ours, k) for k in ids] == [getattr(theirs, k) for k in ids]


def test_weights_in_several_files_are_those_of_one(tmp_path):
    weights = load_file(MINI_CLIP / "model.safetensors")
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((MINI_CLIP / name).read_bytes())
    names = {k: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, k in enumerate(sorted(weights))}
    for file in set(names.values()):
        save_file({k: v for k, v in weights.items() if names[k] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    config, read = read_model(tmp_path)
    assert all(v.data_ptr() % ALIGNMENT == 0 for v in read.values())  # where in a file a weight begins changes no bit
    found = two_towers("shards", config, read).state_dict()
    assert found.keys() == weights.keys() and all(torch.equal(v, weights[k]) for k, v in found.items())


def test_an_index_leads_nowhere_else(tmp_path):
    """`model_folder.check_entries` refuses such names; whoever reads weights without it stays in the folder as well."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../a/x.safetensors"}}))
    assert weight_files(tmp_path) == [tmp_path / "x.safetensors"]


@pytest.mark.parametrize(
    ("side", "key", "value"),
    [
        ("vision_config", "hidden_act", "swish"),
        ("vision_config", "num_attention_heads", 3),
        ("vision_config", "num_hidden_layers", 1_000_000),
        ("vision_config", "patch_size", 0),
        ("vision_config", "hidden_act", ["gelu"]),
        ("text_config", "layer_norm_eps", "1e-5"),
        ("text_config", "vocab_size", 2**40),
        ("text_config", "hidden_size", True),
    ],
)
def test_a_setting_that_is_not_known_is_refused_before_anything_is_built(side, key, value):
    config, weights = read_model(MINI_CLIP)
    with pytest.raises(FedvlmError, match=f"backbone=odd: config.json has {key}=.*not known"):
        two_towers("odd", {**config, side: {**config[side], key: value}}, weights)


def test_weights_must_be_exactly_those_of_the_model():
    config, weights = read_model(MINI_CLIP)
    for wrong in (weights | {"extra": torch.zeros(1)}, {k: v for k, v in weights.items() if "fc1" not in k}):
        with pytest.raises(FedvlmError, match=r"backbone=odd: its weights (also hold extra|lack .*fc1)"):
            two_towers("odd", config, wrong)


def test_known_models_never_import_transformers():
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        "from PIL import Image; from fedvlm import backbones\n"
        "b = backbones.load('mini-clip'); b.images([Image.new('RGB', (9, 9))]); b.texts(['a cat'])"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_another_model_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deit", "hidden_size": 8}))
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "DeiTImageProcessor"}')
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(FedvlmError, match=r"model_type=deit is computed by transformers: pip install .fedvlm\[tr"):
        load(str(tmp_path)).images(pictures())
