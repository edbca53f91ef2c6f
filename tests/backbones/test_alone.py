"""An image's features, and a text's, depend on nothing but it and the weights: each backbone, both libraries of products."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import open_clip_models
import pytest
import torch
from siglip_models import siglip_folder

from fedvlm import backbones
from fedvlm.backbones.alone import each_alone, encoder_threads, pieces
from fedvlm.backbones.arithmetic import Arithmetic, arithmetic
from fedvlm.backbones.base import Backbone, encode_view, in_precision, view_format

ROOT = Path(__file__).parents[2]
PHRASES = ["a cat", "a photo of the red tree .", "dog", "a dog", "the red red tree of a cat"]
GROUPS = {"two": [[0, 1, 2], [3, 4, 5, 6]], "alone": [[k] for k in range(7)], "turned": [[6, 4, 2, 0], [5, 3, 1]]}
LAYOUTS = ("vit quickgelu (DFN, MetaCLIP)", "resnet", "biomedclip", "eva02", "siglip2")


def vit_folder(folder: Path) -> None:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ViTModel(ViTConfig(**sizes, image_size=32, patch_size=16), add_pooling_layer=False).save_pretrained(folder)
    own = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(own | {"image_std": [0.5] * 3}))


@pytest.fixture(scope="module", params=["mini-clip", "siglip", "vit", *LAYOUTS])
def backbone(request, tmp_path_factory) -> Backbone:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "mini-clip":
        return backbones.load("mini-clip")
    if request.param == "siglip":
        siglip_folder(folder)
    elif request.param == "vit":
        vit_folder(folder)
    else:
        open_clip_models.write_model(request.param, folder, open_clip_models.shapes(request.param))
    return backbones.load(str(folder))


def views(backbone: Backbone) -> list[str]:
    wanted = ("embedding", "raw", "hidden@-1", "hidden@1", "patches", "pixels")
    return [v for v in wanted if v == "embedding" or backbone.view_format(v) is not None]


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def fresh(backbone, library):
    """The backbone with its frozen towers laid out for this library, and without them afterwards."""
    forget(backbone)
    yield backbone
    forget(backbone)


def images():
    from open_clip_models import pictures

    some = pictures()
    return [*some, *(image.rotate(90) for image in some), some[0].rotate(45)]


def test_an_image_does_not_depend_on_the_others(fresh, threads):
    given = images()
    for view in views(fresh):
        whole = encode_view(fresh, given, view)
        assert whole.shape == (7, *view_format(fresh, view).shape)
        for name, groups in GROUPS.items():
            found = torch.cat([encode_view(fresh, [given[k] for k in group], view) for group in groups])
            order = torch.tensor([k for group in groups for k in group])
            assert torch.equal(found, whole[order]), (view, name)
    assert torch.get_num_threads() == threads


def test_the_number_of_threads_changes_nothing(fresh):
    before, found = torch.get_num_threads(), []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        found.append(encode_view(fresh, images(), views(fresh)[-2]))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_text_does_not_depend_on_the_others(backbone, threads):
    whole = backbone.texts(PHRASES)
    if whole is None:
        pytest.skip("it has no text tower")
    for k, phrase in enumerate(PHRASES):
        alone = backbone.texts([phrase])
        assert alone is not None and torch.equal(alone[0], whole[k]), phrase


def test_less_precision_holds_it_too(threads):
    half = in_precision(backbones.load("mini-clip"), "half")
    given = images()
    with half.computing():
        whole, alone = half.images(given), torch.cat([half.images([image]) for image in given])
    assert torch.equal(whole, alone)
    assert not torch.equal(whole, backbones.load("mini-clip").images(given))


def forget(backbone: Backbone) -> None:
    for name in ("frozen_images", "frozen_texts"):
        backbone.__dict__.pop(name, None)


@pytest.mark.parametrize("count", [1, 5, 17, 64])
def test_pieces_have_all_images_once_and_are_nearly_equal(count):
    cut = pieces(count, 16)
    assert [i for s in cut for i in range(count)[s]] == list(range(count))
    sizes = [s.stop - s.start for s in cut]
    assert max(sizes) <= 16 and max(sizes) - min(sizes) <= 1


def test_each_thread_computes_on_one_core_without_gradients_and_in_order(threads):
    seen = set()

    def encode(part):
        seen.add((torch.get_num_threads(), torch.is_grad_enabled()))
        return torch.tensor([[2.0 * k] for k in part])

    assert each_alone(encode, list(range(40))).flatten().tolist() == [2.0 * k for k in range(40)]
    assert seen == {(1, False)} and torch.get_num_threads() == threads


def test_an_error_ends_the_threads_and_gives_the_cores_back():
    torch.set_num_threads(2)

    def encode(part):
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        each_alone(encode, list(range(40)))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert not [t for t in threading.enumerate() if t.name.startswith("encode")]


def test_two_threads_of_a_user_compute_the_same_as_one():
    model, given = backbones.load("mini-clip"), images()
    expected, found = model.images(given), {}

    def work(name):
        torch.set_num_threads(2)
        found[name] = model.images(given)

    both = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert torch.equal(found[0], expected) and torch.equal(found[1], expected)


def test_threads_inside_threads_wait_for_nobody(threads):
    """Who starts them computes on one core meanwhile, too."""
    with encoder_threads(2) as pool, encoder_threads(2):
        assert torch.get_num_threads() == 1
        assert pool.submit(lambda: torch.get_num_threads()).result(timeout=10) == 1


def test_the_arithmetic_is_that_of_this_process():
    found = arithmetic()
    assert found == Arithmetic(*found) and len(found.mark) == 8 and found.processor
    assert found.instructions == torch.backends.cpu.get_cpu_capability()
    code = "from fedvlm.backbones.arithmetic import arithmetic; print(arithmetic())"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert again.stdout.strip() == str(found)


def test_other_instructions_have_another_mark():
    """The same processor, held to SSE4.2, multiplies in another order."""
    held = os.environ | {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    code = "from fedvlm.backbones.arithmetic import arithmetic; print(*arithmetic()[2:], sep=',')"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, env=held)
    instructions, mark = again.stdout.strip().split(",")
    if instructions == arithmetic().instructions:
        pytest.skip("it has no other instructions")
    assert mark != arithmetic().mark


def test_on_other_processors_too():
    """The short form of benchmarks/processors.py: this processor, and held to AVX2 and to SSE4.2."""
    call = [sys.executable, str(ROOT / "benchmarks" / "processors.py"), "--short"]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0 and "the same bits everywhere" in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.skipif(importlib.util.find_spec("onnx") is None, reason="needs onnx")
def test_an_exported_model_does_not_depend_on_the_others_either(tmp_path, threads):
    class Tower(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = torch.nn.Conv2d(3, 32, 8, 8), torch.nn.Linear(32 * 16, 24)

        def forward(self, pixels):
            return self.out(torch.nn.functional.gelu(self.conv(pixels)).flatten(1))

    torch.manual_seed(0)
    file, axes = tmp_path / "tower.onnx", {"pixels": {0: "n"}}
    one = torch.zeros(1, 3, 32, 32)
    torch.onnx.export(Tower(), (one,), str(file), input_names=["pixels"], dynamic_axes=axes, dynamo=False)
    model = backbones.load(f"onnx:{file}")
    given = images()
    assert torch.equal(model.images(given), torch.cat([model.images([image]) for image in given]))
