"""Model folders of every layout: their features are those of the library that the layout comes from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import open_clip_models
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from siglip_models import SCALE, SIZES, WORDS, drawn, siglip_folder
from tokenizers import Tokenizer, normalizers
from torch.nn import functional as F

from fedvlm.backbones import load
from fedvlm.backbones.tokenizers import SiglipTokenizer
from fedvlm.errors import FedvlmError

PHRASES = ["a photo of a cat", "A photo of the red, red tree.", "dog"]


def pictures(count: int = 3) -> list[Image.Image]:
    rng = np.random.default_rng(5)
    return [Image.fromarray(rng.integers(0, 256, (37 + 9 * i, 52, 3), dtype=np.uint8)) for i in range(count)]


def ids_of(text: str, length: int, end: int, pad: int, first: int) -> list[int]:
    """What the tokenizer above gives, padded."""
    ids = [*[first + WORDS.index(w) for w in text.split()][: length - 1], end]
    return ids + [pad] * (length - len(ids))


def gap(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    assert found is not None and found.shape == expected.shape and found.dtype == torch.float32
    return float((found - expected).abs().max())


# SigLIP


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("siglip")
    return siglip_folder(folder), load(str(folder))


def squashed(images: list[Image.Image], size: int, mean: list[float], std: list[float]) -> torch.Tensor:
    """Resized without keeping the aspect ratio."""
    arrays = [np.asarray(i.resize((size, size), Image.Resampling.BICUBIC), dtype=np.float32) / 255 for i in images]
    x = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
    return (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


@torch.no_grad()
def test_siglip_features_are_those_of_transformers(siglip):
    model, backbone = siglip
    pixels = squashed(pictures(), 32, [0.5, 0.4, 0.6], [0.5, 0.6, 0.7])
    image = model.get_image_features(pixel_values=pixels).pooler_output
    assert gap(backbone.encode(pictures(), "raw"), image) < 1e-5
    assert gap(backbone.images(pictures()), F.normalize(image, dim=-1)) < 1e-5
    clean = ["a photo of a cat", "a photo of the red red tree", "dog"]  # no punctuation, no capitals
    ids = torch.tensor([ids_of(t, 9, 1, 1, 3) for t in clean])
    text = F.normalize(model.get_text_features(input_ids=ids).pooler_output, dim=-1)
    assert gap(backbone.texts(PHRASES), text) < 1e-5
    assert backbone.scale == pytest.approx(np.exp(SCALE)) and backbone.dim == 16


@torch.no_grad()
def test_siglip_2_keeps_punctuation_and_pads_with_its_own_token(tmp_path):
    model = siglip_folder(tmp_path, "GemmaTokenizer")
    ids = torch.tensor([ids_of("a photo of a red tree .", 9, 1, 2, 3)])
    text = F.normalize(model.get_text_features(input_ids=ids).pooler_output, dim=-1)
    assert gap(load(str(tmp_path)).texts(["A photo of a red tree."]), text) < 1e-5


def test_siglip_2_reads_names_with_capitals_as_transformers_does(tmp_path):
    """Its tokenizer.json knows capitals; transformers' SigLIP 2 has texts in lower case before it."""
    from transformers import Siglip2Tokenizer

    special = {t: i for i, t in enumerate(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"))}
    letters = sorted(set("German Shepherd, a DOG.▁") | set("gsdo"))
    theirs = Siglip2Tokenizer(special | {c: len(special) + i for i, c in enumerate(letters)}, [])
    gemma = Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    gemma.normalizer = normalizers.Replace(" ", "▁")  # without the lower case that Siglip2Tokenizer adds
    gemma.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "GemmaTokenizer", "eos_token": "<eos>", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "German Shepherd, a DOG."
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    ours = SiglipTokenizer(tmp_path, keeps_punctuation=True)
    assert ours.words([text]) == [expected] != [gemma.encode(text).ids]


@torch.no_grad()
def test_siglip_towers_in_pieces(siglip):
    """Stored activations and the layers above them give the embedding; prompts and phrases the text features."""
    _, backbone = siglip
    towers, raw, text = backbone.both_towers, backbone.encode(pictures(), "raw"), backbone.texts(PHRASES)
    for layers in (0, 1, 2):
        hidden = backbone.encode(pictures(), f"hidden@{-layers}")
        assert hidden.shape[1:] == backbone.view_format(f"hidden@{-layers}").shape == (16, 16)
        assert gap(towers.image.last(layers).features(hidden[None])[0], raw) < 1e-5
        plan = towers.text.phrases(PHRASES)
        assert gap(towers.text.above(towers.text.below(plan, layers), plan)[0], text) < 1e-5
    assert gap(towers.text.features(plan)[0], text) < 1e-5
    context = towers.text.phrase("a photo of a")[None, None]
    prompts = towers.text.plan(["cat", "red tree"], 4)
    expected = backbone.texts(["a photo of a cat.", "a photo of a red tree."])
    assert gap(towers.text.features(prompts, context)[0], expected) < 1e-5
    each = context.expand(2, 2, -1, -1)  # a context of its own for each class, two clients
    assert gap(towers.text.features(prompts, each)[1], expected) < 1e-5
    pixels = backbone.encode(pictures(), "pixels")
    assert gap(backbone.image_tower(pixels)[0], raw) < 0.1  # the pixels are rounded


@torch.no_grad()
def test_siglip_deep_prompts_replace_the_context_in_each_layer(siglip):
    model, backbone = siglip
    tower, text = backbone.text_tower, model.text_model
    generator = torch.Generator().manual_seed(3)
    context, deep = torch.randn(1, 1, 2, 16, generator=generator), torch.randn(1, 2, 2, 16, generator=generator)
    plan = tower.plan(["cat", "tree"], 2)
    x = text.embeddings(plan.ids.clamp(min=0))
    x[:, :2] += context[0] - text.embeddings.token_embedding.weight[0]
    for i, layer in enumerate(text.encoder.layers):
        if i:
            x[:, :2] = deep[0, i - 1]
        x = layer(x, attention_mask=None)
    expected = F.normalize(text.head(text.final_layer_norm(x)[:, -1]), dim=-1)
    assert gap(tower.features(plan, context, deep=deep)[0], expected) < 1e-5


def test_siglip_towers_learn_by_gradients(siglip):
    """Low-rank changes have the gradients of the changed weights; half precision runs."""
    _, backbone = siglip
    towers, hidden = backbone.both_towers, backbone.encode(pictures(), "hidden@-1")
    generator = torch.Generator().manual_seed(2)
    shapes = {f"{t}.0.q.{k}": (1, 2, 16) if k == "A" else (1, 16, 2) for t in ("image", "text") for k in "AB"}
    lora = {k: torch.randn(s, generator=generator).requires_grad_() for k, s in shapes.items()}
    plan = towers.text.phrases(PHRASES)
    towers.image.last(1).features(hidden[None], lora).square().sum().backward()
    towers.text.above(towers.text.below(plan, 1), plan, lora)[0, 0, 0].backward()
    assert all(v.grad is not None and v.grad.abs().max() > 0 for v in lora.values())
    half = towers.to(dtype=torch.bfloat16)
    near = half.image.features(backbone.encode(pictures(), "hidden@0")[None])[0]
    assert float((near - backbone.encode(pictures(), "raw")).abs().max()) < 0.5


def test_siglip_naflex_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "siglip2"}')
    save_file({"logit_scale": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(FedvlmError, match=r"NaFlex.*fixed-resolution"):
        load(str(tmp_path))


@pytest.mark.parametrize("missing", ["preprocessor_config.json", "tokenizer.json"])
def test_a_file_that_is_missing_is_named(tmp_path, missing):
    """However long the folder's path is, as those of caches are."""
    folder = tmp_path / ("models--" + "a" * 100) / ("snapshots--" + "b" * 100)
    folder.mkdir(parents=True)
    siglip_folder(folder)
    (folder / missing).unlink()
    with pytest.raises(FedvlmError, match=f": no {missing} in that folder"):
        load(str(folder)).texts(PHRASES)


def test_missing_weights_are_not_replaced_by_random_ones(tmp_path):
    model = siglip_folder(tmp_path)
    weights = {k: v for k, v in model.state_dict().items() if "post_layernorm" not in k}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FedvlmError, match="post_layernorm"):
        load(str(tmp_path)).images(pictures())


# open_clip


@pytest.fixture(scope="module")
def reference():
    return json.loads(open_clip_models.REFERENCE.read_text())


@pytest.mark.parametrize("layout", open_clip_models.LAYOUTS)
def test_open_clip_features_are_those_of_open_clip(layout, reference, tmp_path):
    expected = reference[layout]
    open_clip_models.write_model(layout, tmp_path, expected["shapes"])
    backbone = load(str(tmp_path))
    raw, texts = (torch.tensor(expected[k]) for k in ("images", "texts"))
    assert float(raw.std(0).max()) > 0.01 and float(texts.std(0).max()) > 0.01  # features that differ
    found = gap(backbone.encode(open_clip_models.pictures(), "raw"), raw), gap(backbone.texts(PHRASES), texts)
    assert max(found) < 1e-5
    assert gap(backbone.images(open_clip_models.pictures()), F.normalize(raw, dim=-1)) < 1e-5
    tower = getattr(backbone, "text_tower", None)
    if tower is not None:
        with torch.no_grad():
            assert gap(tower.features(tower.phrases(PHRASES))[0], texts) < 1e-5


@pytest.fixture(scope="module")
def written_vit(tmp_path_factory, reference):
    folder = tmp_path_factory.mktemp("vit")
    open_clip_models.write_model("vit", folder, reference["vit"]["shapes"])
    return folder


@pytest.fixture
def vit(tmp_path, written_vit):
    return Path(shutil.copytree(written_vit, tmp_path / "vit"))


def changed(folder: Path, part: str, **entries: object) -> str:
    """The folder, with these entries in a part of its configuration; part="" is the whole."""
    path = folder / "open_clip_config.json"
    config = json.loads(path.read_text())
    place = config
    for key in filter(None, part.split(".")):
        place = place[key]
    place.update(entries)
    path.write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("part", "entries", "message"),
    [
        ("", {"preprocess_cfg": {}}, "mean and std"),
        ("preprocess_cfg", {"resize_mode": "longest"}, "resize_mode=longest"),
        ("model_cfg", {"multimodal_cfg": {"layers": 3}}, "multimodal_cfg"),
        ("model_cfg.vision_cfg", {"attentional_pool": True}, "attentional_pool=True"),
        ("model_cfg.vision_cfg", {"layers": "many"}, "layers=many"),
        ("model_cfg.vision_cfg", {"timm_model_name": "convnext_base"}, "convnext_base"),
        ("model_cfg.text_cfg", {"pool_type": "eos"}, "pool_type=eos"),
        ("model_cfg.text_cfg", {"vocab_size": 100}, "tokenizer.json"),
        ("model_cfg.text_cfg", {"layers": 1}, r"also hold text_model.encoder.layers.1"),
        ("model_cfg.text_cfg", {"context_length": 21}, "differ in text_model.embeddings.position_embedding"),
    ],
)
def test_open_clip_that_is_not_known_is_refused(vit, part, entries, message):
    with pytest.raises(FedvlmError, match=message):
        load(changed(vit, part, **entries)).texts(PHRASES)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(vit, monkeypatch):
    """The one-line conversion that the error names works."""
    weights = vit / "open_clip_model.safetensors"
    kept = load(str(vit)).texts(PHRASES)
    torch.save(load_file(weights), vit / "open_clip_pytorch_model.bin")
    weights.unlink()
    with pytest.raises(FedvlmError, match=r"open_clip_pytorch_model.bin is a pickle.*convert it once") as caught:
        load(str(vit))
    code = str(caught.value).split('python -c "')[1].split('"')[0]
    monkeypatch.chdir(vit)
    exec(code, {})
    assert gap(load(str(vit)).texts(PHRASES), kept) == 0


def test_a_file_name_cannot_become_part_of_the_command(vit):
    (vit / "open_clip_model.safetensors").rename(vit / "a'); print('run.bin")
    with pytest.raises(FedvlmError, match="copy the model's weights there") as caught:
        load(str(vit))
    assert "print" not in str(caught.value)


def test_a_folder_in_both_formats_is_read_as_hugging_face(tmp_path, vit):
    siglip_folder(vit)
    assert load(str(vit)).dim == 16


def test_the_fingerprint_follows_what_changes_features(vit):
    one = load(str(vit)).fingerprint
    assert load(changed(vit, "preprocess_cfg", resize_mode="squash")).fingerprint != one


# vision only


def vision_model(kind: str) -> torch.nn.Module:
    import transformers

    sizes = SIZES | {"image_size": 28, "patch_size": 14}
    names = {"vit": "ViT", "dinov2": "Dinov2", "dinov3_vit": "DINOv3ViT", "swin": "Swin"}
    config = getattr(transformers, f"{names[kind]}Config")(**({} if kind == "swin" else sizes))
    return drawn(getattr(transformers, f"{names[kind]}Model")(config))


@pytest.mark.parametrize("kind", ["vit", "dinov2", "dinov3_vit"])
def test_vision_only_features_are_those_of_transformers(kind, tmp_path):
    model = vision_model(kind)
    model.save_pretrained(tmp_path)
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 28, "width": 28}, "resample": 3}
    processor |= {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.6, 0.7]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with torch.no_grad():
        pixels = squashed(pictures(), 28, [0.5, 0.4, 0.6], [0.5, 0.6, 0.7])
        expected = model(pixel_values=pixels).last_hidden_state[:, 0]
    backbone = load(str(tmp_path))
    assert gap(backbone.encode(pictures(), "raw"), expected) < 1e-5
    assert backbone.texts(["a cat"]) is None and backbone.dim == 16


def test_an_encoder_without_a_class_token_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "swin", "hidden_size": 16}')
    (tmp_path / "preprocessor_config.json").write_text("{}")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(FedvlmError, match=r"model_type=swin.*dinov2"):
        load(str(tmp_path))


# which adapters work


def small_run(images: Path, folder: Path, method: str, **keys: object):
    import fedvlm

    return fedvlm.run(method, data=str(images), rounds=1, out=str(folder / "run"), **keys)


class Encoder:
    """A black box of one's own that counts its images."""

    def __init__(self, texts: bool):
        self.seen, self.fingerprint = 0, f"counted-{texts}"
        if texts:
            self.texts = lambda phrases: [[len(p), 1.0, p.count("a")] for p in phrases]

    def __call__(self, images):
        self.seen += len(images)
        return [np.asarray(i, dtype=np.float32).mean((0, 1)) + 1 for i in images]


@pytest.mark.parametrize(
    ("method", "texts", "message"),
    [
        ("promptfl", True, r"adapter=prompt works inside a CLIP's text tower.*adapters that work with it: .*attention"),
        ("fedlora", True, r"adapter=lora reads activations inside the image tower"),
        ("zero-shot", False, r"adapter=none needs embeddings of the class names.*head \(init_from=random\)"),
        ("fedot", False, r"no text tower; give init_from=random"),
        ("fedclip", False, r"adapter=attention needs embeddings of the class names"),
    ],
)
def test_what_a_backbone_cannot_give_is_refused_before_images_are_encoded(images, tmp_path, method, texts, message):
    encoder = Encoder(texts)
    with pytest.raises(FedvlmError, match=message):
        small_run(images, tmp_path, method, backbone=encoder)
    assert encoder.seen <= 1  # the one that tells the dimension


def test_siglip_and_biomedclip_say_what_works(siglip, reference, tmp_path):
    from fedvlm.config.layouts import check_adapter
    from fedvlm.parts.registry import find

    open_clip_models.write_model("biomedclip", tmp_path, reference["biomedclip"]["shapes"])
    biomedclip = load(str(tmp_path))
    for name in ("prompt", "lora", "visual", "maple", "mma", "tower", "head", "none"):
        check_adapter(name, find("adapter", name)(), siglip[1])
    for name in ("head", "attention", "rotation", "none"):
        check_adapter(name, find("adapter", name)(), biomedclip)
    with pytest.raises(FedvlmError, match=r"adapter=transported reads patches.*: .*prompt"):
        check_adapter("transported", find("adapter", "transported")(), siglip[1])
    with pytest.raises(FedvlmError, match=r"text tower, .* none of that kind"):
        check_adapter("prompt", find("adapter", "prompt")(), biomedclip)


def test_every_adapter_works_with_some_layout():
    from fedvlm.config.layouts import LAYOUTS, usable_adapters
    from fedvlm.parts.registry import built_in, find

    found = {name.split()[0] for layout in LAYOUTS for name in usable_adapters(layout.offer)}
    assert found == {name for name in built_in("adapter") if find("adapter", name)().view != "text"}


@pytest.mark.parametrize(("method", "layers"), [("promptfl", {"context": 2}), ("fedlora", {"layers": 1})])
def test_adapters_inside_towers_train_on_siglip(siglip, images, tmp_path, capsys, method, layers):
    run = small_run(images, tmp_path, method, backbone=siglip[1].name, **layers)
    assert run.done and capsys.readouterr().out.count("the bias drops out") == 1


def test_unit_vectors_in_place_of_raw_embeddings_are_said_and_recorded(siglip, images, tmp_path, capsys):
    run = small_run(images, tmp_path, "fedclip", backbone=Encoder(texts=True))
    assert capsys.readouterr().out.count("sees unit vectors") == 1
    assert run.record.backbone.view == "embedding"
    own = small_run(images, tmp_path / "own", "fedclip", backbone=siglip[1].name)
    assert "unit vectors" not in capsys.readouterr().out and own.record.backbone.view == "raw"


def test_mini_clip_on_data_of_ones_own_is_said_once(images, capsys):
    import fedvlm.api
    from fedvlm.training.planning import checked

    pools = fedvlm.api.new_pools()
    for method in ("zero-shot", "fedot"):
        checked(fedvlm.api.chosen(method, {"data": str(images)}), pools)
    assert capsys.readouterr().out.count("hf download openai/clip-vit-base-patch16") == 1


def test_mini_clip_is_no_rehearsal_model_on_emoji():
    from fedvlm.config.layouts import notes_on
    from fedvlm.parts.registry import find

    clip, head = load("mini-clip"), find("adapter", "head")()
    assert not notes_on(clip, head, own_data=False) and len(notes_on(clip, head, own_data=True)) == 1


def test_device_mps(monkeypatch):
    from fedvlm.config.config import resolve
    from fedvlm.engines.base import device_of

    setup = resolve("promptfl", {"device": "mps"})
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(FedvlmError, match="no Apple GPU here; give device=cpu"):
        device_of(setup)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device_of(setup) == "mps"


# AlexNet


def test_alexnet_is_torchvisions():
    """Their layers in their order, with our parameters by their names."""
    from torch import nn

    from fedvlm.core.adapter import Task
    from fedvlm.parts.adapters.alexnet import AlexNet

    relu, pool = nn.ReLU(), nn.MaxPool2d(3, 2)
    convolutions = [nn.Conv2d(3, 4, 11, 4, 2), relu, pool, nn.Conv2d(4, 12, 5, padding=2), relu, pool]
    convolutions += [nn.Conv2d(12, 24, 3, padding=1), relu, nn.Conv2d(24, 16, 3, padding=1), relu]
    convolutions += [nn.Conv2d(16, 16, 3, padding=1), relu, pool]
    hidden = [nn.Identity(), nn.Linear(16 * 36, 256), relu, nn.Identity(), nn.Linear(256, 256), relu, nn.Linear(256, 3)]
    whole = nn.ModuleDict({"features": nn.Sequential(*convolutions), "classifier": nn.Sequential(*hidden)})
    task = Task(("a", "b", "c"), None, 0, 1.0)
    params = AlexNet(width=4).init(task, 3)
    whole.load_state_dict(params)
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        pooled = nn.functional.adaptive_avg_pool2d(whole["features"](x), 6).flatten(1)
        found = AlexNet(width=4).logits(task, {k: v[None] for k, v in params.items()}, x[None])[0]
        assert torch.allclose(found, whole["classifier"](pooled), atol=1e-6)
    with torch.device("meta"):
        full = AlexNet().build(Task(tuple(map(str, range(1000))), None, 0, 1.0))
    assert sum(v.numel() for v in full.parameters()) == 61_100_840


def test_alexnet_is_a_preset():
    from fedvlm.config.config import resolve

    setup = resolve("fedavg", {"on": "alexnet"})
    assert setup.config.backbone == "pixels:64" and setup.parts["adapter"].name == "alexnet"
