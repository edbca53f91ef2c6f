"""FedDTL, FedCLIP and the prompt methods do what their papers say; each test failed on the code before the audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from colours import Colours, mean_colour, small_store, write_images
from helpers import RULES, example, play, small_adapter
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from fedvlm import backbones
from fedvlm.backbones.base import ViewFormat, encode_view
from fedvlm.config.config import resolve
from fedvlm.core.data import Batch, Data
from fedvlm.core.model import Model
from fedvlm.core.state import with_client_axis
from fedvlm.data.formats.embeddings import open_embeddings, write_embeddings
from fedvlm.data.pool import embedding_pool
from fedvlm.data.source import open_source
from fedvlm.data.store import features, listing, open_view
from fedvlm.parts.adapters.attention import Attention
from fedvlm.parts.adapters.gallop import Gallop
from fedvlm.parts.adapters.lora import Lora
from fedvlm.parts.adapters.maple import Maple, clamped
from fedvlm.parts.local.bgp import aligned_loss
from fedvlm.parts.local.sgd import Sgd
from fedvlm.parts.local.two_stage import TwoStage
from fedvlm.parts.merge.mean import Mean
from fedvlm.parts.merge.stages import Stages
from fedvlm.parts.merge.text_server import TextServer
from fedvlm.rounds.method import Method

IMAGE = Lora(rank=2, towers="image", projections=("q", "k", "v", "out"))


def feddtl(merge: TextServer) -> Method:
    return Method.build(IMAGE, TwoStage(**RULES), merge, example("lora")[0], seed=5)


def moved(params, by=0.3):
    draw = torch.Generator().manual_seed(9)
    return {k: v + by * torch.randn(v.shape, generator=draw).to(v) for k, v in params.items()}


def whole_batch(x: Tensor, y: Tensor) -> Batch:
    """One client's examples as a single batch."""
    data = Data(x, y, np.array([[0, len(y), len(y), len(y)]]), np.array([0]))
    return next(iter(data.batches(len(y), 1)))


# FedDTL's text server


def test_the_anchor_is_the_mean_cosine_distance_to_the_frozen_embeddings(double):
    task, _ = example("lora")
    plain, anchored = (TextServer(anchor=a) for a in (0.0, 5.0))
    adapter = plain.text_adapter(IMAGE)
    params = with_client_axis(moved(adapter.init(task, 5)))
    draw = torch.Generator().manual_seed(1)
    z = F.normalize(torch.randn(6, task.dim, generator=draw), dim=-1)
    batch = whole_batch(z, torch.arange(6) % 5)

    def losses(merge: TextServer, now) -> float:
        return float(merge.text_gradients(feddtl(merge).model)(now, batch)[0])

    far = 1 - F.cosine_similarity(adapter.class_vectors(task, params)[0], task.names(), dim=-1).mean()
    assert losses(anchored, params) == pytest.approx(losses(plain, params) + 5 * float(far), rel=1e-12)
    assert float(far) > 1e-3
    name, step = next(k for k in params if k.endswith(".B")), 1e-6
    direction = {name: torch.randn(params[name].shape, generator=draw)}
    ends = [losses(anchored, params | {name: params[name] + s * step * direction[name]}) for s in (1, -1)]
    slope = dict(zip(params, anchored.text_gradients(feddtl(anchored).model)(params, batch)[1], strict=True))[name]
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float((slope * direction[name]).sum()), rel=1e-5)


def test_an_anchor_keeps_the_class_embeddings_near_the_frozen_ones_and_the_record_says_how_near(double):
    _, data = example("lora")
    found = {}
    for anchor in (0.0, 5.0, 500.0):
        merge = TextServer(anchor=anchor, text_lr=0.02, text_batch=8)
        state, *_, cohort = play(feddtl(merge), data, 6, rounds=3)
        (found[anchor],) = cohort.effects["text_cosine"]
        assert found[anchor] == pytest.approx(float((state.task["text"] * example("lora")[0].names()).sum(-1).mean()))
    assert found[0.0] < found[5.0] < found[500.0] <= 1
    assert set(cohort.effects) == {"text_cosine", "clipped", "flat"}


@pytest.mark.parametrize("how", [{"upload_noise": 0.1}, {"upload_groups": 2}], ids=str)
def test_averaged_and_noisy_uploads_are_normalised_on_the_server(double, how):
    """Eq. 1 is a cosine: only the direction of what arrives counts."""
    task, merge = example("lora")[0], TextServer(text_lr=0.01, **how)
    method = feddtl(merge)
    changes = merge.text_adapter(IMAGE).init(task, 5)
    z, y = torch.randn(8, task.dim, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5
    unit, long = (
        merge.train_text_tower(method.model, changes, [(v, y)], 1) for v in (F.normalize(z, dim=-1), 1.88 * z)
    )
    assert long[1] == pytest.approx(unit[1], rel=1e-12)
    for name, value in unit[0].items():
        torch.testing.assert_close(long[0][name], value)


def test_rank_and_layers_move_both_towers_unless_both_are_given():
    def text(**given) -> tuple[int, int]:
        setup = resolve("feddtl", {"data": "emoji", **given})
        assert isinstance(setup.merge, TextServer)
        adapter = setup.merge.text_adapter(setup.adapter)
        return adapter.rank, adapter.layers

    assert text(rank=8) == (8, 2) and text(layers=4) == (4, 4)
    assert text(rank=8, layers=4, text_rank=2, text_layers=0) == (2, 0)
    assert resolve("feddtl", {"data": "emoji", "values": "paper"}).adapter.layers == 3
    assert text(values="paper") == (4, 3)


def test_sixteen_embeddings_of_each_class():
    y = torch.repeat_interleave(torch.arange(3), torch.tensor([40, 16, 5]))
    data = Data(torch.zeros(61, 2), y, np.array([[0, 61, 61, 61]]), np.array([2]), seed=4)
    rows = TextServer(upload_count=16).source_rows(y, data, 2)
    assert torch.bincount(y[torch.cat(rows)]).tolist() == [16, 16, 5]
    assert set(torch.cat(rows[:16]).tolist()) != set(range(16))  # at random
    half = TextServer(upload_count=16, upload_share=0.5).source_rows(y, data, 2)
    assert torch.bincount(y[torch.cat(half)]).tolist() == [16, 8, 3]
    grouped = TextServer(upload_count=16, upload_groups=4).source_rows(y, data, 2)
    assert [len(g) for g in grouped] == [4] * 8 + [2, 1, 1, 1]


def test_the_anchored_variant_differs_in_the_anchor_alone():
    plain, anchored = (resolve(n, {"data": "emoji"}) for n in ("feddtl", "feddtl-anchored"))
    assert (plain.merge.anchor, anchored.merge.anchor) == (0.0, 5.0)
    assert replace(anchored.merge, anchor=0.0) == plain.merge
    assert (plain.adapter, plain.local) == (anchored.adapter, anchored.local)


# FedCLIP's adapter, and the view it reads


def emoji_like(count: int) -> list[Image.Image]:
    draw = np.random.default_rng(3)
    small = draw.integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)
    return [Image.fromarray(each).resize((64, 64)) for each in small]


def variation(x: Tensor, adapter: Attention, task) -> float:
    """Of the mask over images: its standard deviation relative to its mean, mean over coordinates."""
    params = with_client_axis(adapter.init(task, 1))
    mask = (adapter.masked(params, x[None]) / x)[0]
    return float((mask.std(0) / mask.mean(0)).mean())


def test_fedclips_mask_depends_on_the_image():
    clip = backbones.load("mini-clip")
    images = emoji_like(24)
    raw, unit = encode_view(clip, images, Attention().view), clip.images(images)
    assert torch.equal(F.normalize(raw, dim=-1), unit) and raw.norm(dim=-1).mean() > 10
    task = example("attention")[0]._replace(dim=clip.dim, text=unit[:5])
    assert variation(raw, Attention(), task) > 10 * variation(unit, Attention(), task)
    assert variation(raw, Attention(), task) > 0.03


def test_the_width_of_fedclips_adapter():
    task = example("attention")[0]._replace(dim=512, text=torch.zeros(5, 512))
    counts = [sum(v.numel() for v in Attention(width=w).init(task, 1).values()) for w in (1, 2, 4, 8)]
    assert counts == [2 * w * 512**2 + (w + 1) * 512 for w in (1, 2, 4, 8)] and counts[0] == 525_312
    small, data = example("attention")
    wide = Attention(width=4)
    assert wide.logits(small, with_client_axis(wide.init(small, 1)), data.x[None, :3]).shape == (1, 3, 5)


class Raw(Colours):
    """One that gives embeddings before normalisation too, and counts its images."""

    def view_format(self, view: str) -> ViewFormat | None:
        return ViewFormat((4,)) if view in ("embedding", "raw") else None

    def encode(self, images: Sequence[Image.Image], view: str) -> Tensor:
        assert view == "raw"
        self.batches.append(len(images))
        return torch.stack([7.3 * mean_colour(image) * (1 + i) for i, image in enumerate(images)])


@pytest.fixture
def pets(tmp_path, monkeypatch):
    small_store(tmp_path, monkeypatch)
    return open_source(str(write_images(tmp_path / "pets", 10)))


def test_one_encoding_serves_both_views(pets, capsys):
    unit, keys, _ = features(pets, Raw())
    model = Raw()
    raw, raw_keys, _ = features(pets, model, view="raw")
    again, _, _ = features(pets, model)
    assert model.batches == [] and keys == raw_keys and torch.equal(unit, again)
    assert torch.equal(F.normalize(raw, dim=-1), unit) and raw.norm(dim=-1).min() > 7
    assert capsys.readouterr().err == ""


def test_normalised_rows_of_an_earlier_version_are_read_and_raw_ones_encoded_anew_with_a_sentence(pets, capsys):
    old, _, _ = features(pets, Colours())  # the same folder: normalised rows only
    model = Raw()
    assert torch.equal(features(pets, model)[0], old) and model.batches == []
    raw, _, _ = features(pets, model, view="raw")
    assert sum(model.batches) == 10 and raw.norm(dim=-1).min() > 7
    assert "encoded once more" in capsys.readouterr().err
    assert torch.equal(features(pets, Raw())[0], old), "the oldest rows stay in use"


def test_a_black_box_gives_its_embeddings_as_raw_ones(pets):
    unit, _, _ = features(pets, Colours())
    model = Colours()
    raw, _, _ = features(pets, model, view="raw")
    assert torch.equal(raw, unit) and model.batches == []
    assert open_view(model, "raw").format == open_view(model).format
    assert len(list(listing())) == 1


def test_given_embeddings_are_raw_where_the_adapter_asks_for_it(tmp_path):
    x = 3 * torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    write_embeddings(tmp_path / "e.safetensors", x, [0, 1] * 3, ["a", "b"])
    source = open_embeddings(tmp_path / "e.safetensors")
    raw, unit = embedding_pool(source, "raw"), embedding_pool(source)
    assert torch.equal(raw.x, x) and torch.equal(unit.x, F.normalize(x, dim=-1))
    assert raw.fingerprint == unit.fingerprint


# what alignment compares


@pytest.mark.parametrize("name", ["attention", "lora", "visual", "maple", "mma", "crossed"])
def test_image_features_are_aligned_before_normalisation(name, double):
    task, data = example(name)
    adapter = small_adapter(name)
    params = with_client_axis(moved(adapter.init(task, 1), 0.1))
    batch = whole_batch(data.x[:9].double(), data.y[:9])
    logits, aligned = adapter.logits_and_aligned(task, params, batch)
    torch.testing.assert_close(logits, adapter.logits(task, params, batch.x))
    torch.testing.assert_close(F.normalize(aligned, dim=-1), adapter.features(task, params, batch.x))
    assert (aligned.norm(dim=-1) - 1).abs().min() > 1e-3
    if name == "attention":
        flat = {k: torch.zeros_like(v) for k, v in params.items()}  # a uniform mask
        torch.testing.assert_close(adapter.logits_and_aligned(task, flat, batch)[1], batch.x)


def test_fedclips_alignment_has_a_gradient_to_speak_of():
    """Relative to the task's; on normalised features it was about a thousandth."""
    clip = backbones.load("mini-clip")
    x = encode_view(clip, emoji_like(32), "raw")
    task = example("attention")[0]._replace(dim=clip.dim, text=F.normalize(x[:5], dim=-1), scale=clip.scale)
    model, batch = Model(Attention(), task), whole_batch(x, torch.arange(32) % 5)
    sent = with_client_axis(Attention().init(task, 1))
    now = {
        k: (v + 0.01 * torch.randn(v.shape, generator=torch.Generator().manual_seed(4))).requires_grad_()
        for k, v in sent.items()
    }

    def slope(strength: float) -> Tensor:
        loss = aligned_loss(model, "cross-entropy", now, sent, batch, strength)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss.sum(), list(now.values()))])

    task_gradient = slope(0.0)
    assert float((slope(1.0) - task_gradient).norm() / task_gradient.norm()) > 0.02


def test_reinforcement_learning_suits_every_adapter_of_the_image_tower():
    """Tables 9 and 25 put it on pFedDC, pFedMMA and MaPLe."""
    assert not any(TwoStage().incompatible(small_adapter(n)) for n in ("maple", "mma", "crossed", "visual", "lora"))
    assert TwoStage().incompatible(small_adapter("head"))
    task, data = example("mma")
    merge = Stages(stage="reinforced", reference="latest")
    *_, cohort = play(Method.build(small_adapter("mma"), TwoStage(**RULES), merge, task, seed=5), data, 6)
    assert len(cohort.effects["clipped"]) > 1


# prompts


def test_fedgallop_sends_the_global_prompts_only():
    task, data = example("gallop")
    adapter = small_adapter("gallop")
    method = Method.build(adapter, Sgd(**RULES), Mean(), task, seed=5)
    assert set(method.initial) == {"context"} and {"detail", "projection"} <= set(method.newcomer)
    state = play(method, data, 6).state
    assert set(state.shared) == {"context"}
    shared = method.shared_model(state.message())
    torch.testing.assert_close(shared["detail"], shared["context"])
    assert torch.equal(shared["projection"][0], torch.eye(task.dim))
    assert Gallop(local_prompts=0).private == ()
    assert resolve("fedgallop", {"data": "emoji"}).adapter.private == ("detail", "projection")
    assert resolve("fedgallop-all-shared", {"data": "emoji"}).adapter.private == ()


def test_maple_is_nine_layers_deep_or_as_deep_as_the_tower(capsys):
    task, _ = example("maple")
    clamped.cache_clear()
    assert Maple().depth == 9
    params = Maple().init(task, 1)
    layers = min(len(task.tower.image.layers), len(task.tower.text.layers))
    assert params["couple.weight"].shape[0] == layers < 9
    assert f"depth=9: the smaller tower has {layers} layers" in capsys.readouterr().err
    Maple(depth=layers).init(task, 1)
    assert capsys.readouterr().err == ""
