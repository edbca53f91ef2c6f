"""The last layers of CLIP's towers from stored activations: Hugging Face's own numbers, with and without trained changes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from helpers import layered, ours, random_task, state_of, tiny_clip
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPModel

from fedvlm.backbones import load
from fedvlm.backbones.base import encode_view, tower_of, view_format
from fedvlm.cli import main
from fedvlm.config.config import resolve
from fedvlm.core.adapter import Task
from fedvlm.core.data import Batch
from fedvlm.core.state import Params, with_client_axis
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.crossed import Crossed
from fedvlm.parts.adapters.lora import Lora
from fedvlm.parts.adapters.maple import Maple
from fedvlm.parts.adapters.mma import Mma
from fedvlm.parts.adapters.visual import Visual
from fedvlm.towers import products
from fedvlm.towers.text import TextTower, padded
from fedvlm.towers.vision import ImageLayers, Towers
from fedvlm.training import train
from fedvlm.training.planned_run import PlannedRun

TEXTS = (
    "a photo of a cat.",
    "a photo of a grand piano.",
    "a photo of a photo of an ox, seen from very far away.",
    "a cat",
)
PROJECTIONS = ("q", "k", "v", "out")
LAYERS = 3  # of the random model


@pytest.fixture(scope="module")
def clip():
    return load("mini-clip")


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    draw = np.random.default_rng(1)
    return [Image.fromarray(draw.integers(0, 256, (96, 96, 3), np.uint8).astype(np.uint8)) for _ in range(4)]


@lru_cache
def whole() -> Towers:
    model = ours(tiny_clip(LAYERS))
    return Towers(ImageLayers.of(model), TextTower.of(model, load("mini-clip").tokenizer))


def noise(*shape: int, seed: int = 1, size: float = 0.5) -> Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def states(model, images: int = 6) -> list[Tensor]:
    """The random model's activations [images, places, width] after 0, 1, … layers."""
    shown = model.vision_model(pixel_values=noise(images, 3, 8, 8), output_hidden_states=True)
    return list(shown.hidden_states)


def embeddings(model, hidden: Tensor, layers: int, every: bool = False) -> Tensor:
    """Plainly, through Hugging Face's own modules: the last layers, norm, projection."""
    for layer in model.vision_model.encoder.layers[LAYERS - layers :]:
        hidden = layer(hidden, attention_mask=None)
    return model.visual_projection(model.vision_model.post_layernorm(hidden if every else hidden[:, 0]))


def words(model, texts) -> Tensor:
    tokenizer = load("mini-clip").tokenizer
    tokens = padded(tokenizer.phrases(texts, 16), tokenizer.pad_token_id)
    return F.normalize(model.text_projection(model.text_model(tokens).pooler_output), dim=-1)


def low_rank(tower: str, clients: int, layers: int, projections=PROJECTIONS, rank: int = 2) -> Params:
    width, lora = {"image": 12, "text": 8}[tower], {}
    for i in range(layers):
        for p, name in enumerate(projections):
            lora[f"{tower}.{i}.{name}.A"] = noise(clients, rank, width, seed=10 * i + p)
            lora[f"{tower}.{i}.{name}.B"] = noise(clients, width, rank, seed=100 + 10 * i + p)
    return lora


def merged(lora: Params, client: int, scale: float):
    """A copy of the model with W + scale · B A in place of W."""
    model = deepcopy(tiny_clip(LAYERS))
    for name in (n.removesuffix(".A") for n in lora if n.endswith(".A")):
        tower, i, projection = name.split(".")
        trained = 1 + max(int(n.split(".")[1]) for n in lora if n.startswith(tower))
        encoder = (model.vision_model if tower == "image" else model.text_model).encoder
        module = getattr(encoder.layers[LAYERS - trained + int(i)].self_attn, f"{projection}_proj")
        module.weight.data += scale * lora[f"{name}.B"][client] @ lora[f"{name}.A"][client]
    return model


def far(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape and one.dtype == other.dtype
    return float((one - other).detach().abs().max())


def test_a_view_is_the_towers_own_activations(clip, pictures):
    pixels = clip.pixels(pictures)
    with products.fast_linear(pixels):
        theirs = CLIPModel.from_pretrained(clip.folder, dtype=torch.float32).vision_model
        own = theirs(pixel_values=pixels.cpu(), output_hidden_states=True).hidden_states
    for k in (0, 3, 7):
        for view in (f"hidden@{k}", f"hidden@{k - 8}"):
            found = encode_view(clip, pictures, view)
            assert (
                view_format(clip, view).shape == tuple(found.shape[1:]) == (65, 256)
                and view_format(clip, view).dtype == "<f4"
            )
            assert far(found, own[k].cpu()) < 1e-6 * float(own[k].abs().max())


@pytest.mark.parametrize("view", ["hidden@8", "hidden@-9", "hidden@", "hidden@two", "hidden@1.5", "hidden@--1"])
def test_layers_that_are_not_there_are_refused(clip, view):
    with pytest.raises(FedvlmError, match=f"{view}: .*8 layers.*-8 to 7.*layers=1 to 8"):
        view_format(clip, view)


def test_a_backbone_without_towers_says_so():
    with pytest.raises(FedvlmError, match="has no image and text towers to give"):
        tower_of(load("pixels:32"), "both towers")


@pytest.mark.parametrize("layers", [1, 2, 5, 0])
def test_the_last_layers_on_stored_activations_are_the_whole_tower(clip, pictures, layers):
    top = clip.both_towers.image.last(layers)
    assert len(top.layers) == (layers or 8)
    found = top.features(encode_view(clip, pictures, f"hidden@{-layers}")[None])[0]
    assert far(F.normalize(found, dim=-1), clip.images(pictures)) < 1e-5


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_last_layers_are_exact(layers):
    model, top = tiny_clip(LAYERS), whole().image.last(layers)
    *_, enters = states(model)[: LAYERS - layers + 1]
    plain = model.visual_projection(model.vision_model(pixel_values=noise(6, 3, 8, 8)).pooler_output)
    assert far(top.features(enters[None])[0], plain) < 1e-10
    assert far(top.features(enters[None], every=True)[0], embeddings(model, enters, layers, every=True)) < 1e-10
    assert far(top.features(enters[None].float()), plain[None].float()) < 1e-4, "in the activations' numbers"


def test_of_the_last_layer_only_the_class_token_is_computed(clip, monkeypatch):
    """Counted, not timed: beside keys and values, a layer of 65 places costs what one place does."""
    monkeypatch.setattr(products, "onednn", lambda: None)  # torch's counter does not know the operator
    top, hidden = clip.both_towers.image.last(1), torch.randn(1, 2, 65, 256)
    work = []
    for every in (False, True):
        with FlopCounterMode(display=False) as counter:
            top.features(hidden, every=every)
        work.append(counter.get_total_flops())
    keys_and_values, rest = 2 * 2 * 65 * 256 * 512, work[0]
    assert rest < 1.15 * keys_and_values and work[1] > 5 * work[0]


@pytest.mark.parametrize("layers", [1, 2, 5, 0])
def test_text_in_two_halves_is_the_whole(clip, layers):
    reader = clip.both_towers.text
    for texts in (TEXTS, TEXTS[:1], (TEXTS[0], TEXTS[0]), ("cat " * 60, "dog " * 60), ("a", "a b")):
        plan = reader.phrases(texts)
        hidden = reader.below(plan, layers)
        assert far(reader.above(hidden, plan)[0], clip.texts(texts)) < 1e-5
        assert far(reader.features(plan)[0], clip.texts(texts)) < 1e-5
        assert hidden.own.shape[1] == len(texts) and not hidden.own.requires_grad


def test_text_is_exact_and_its_common_beginning_read_once():
    reader, plan = whole().text, whole().text.phrases(TEXTS[:3])
    assert plan.shared == 5 and plan.context == 0
    for layers in (1, 2, 3):
        hidden = reader.below(plan, layers)
        assert hidden.prefix.shape == (1, 1, 5, 8) and hidden.layers == layers
        assert far(reader.above(hidden, plan)[0], words(tiny_clip(LAYERS), TEXTS[:3])) < 1e-10
        assert far(reader.above(hidden, plan, chunk=1), reader.above(hidden, plan)) < 1e-12
        assert far(reader.below(plan, layers, chunk=1).own, hidden.own) < 1e-12
    with pytest.raises(ValueError, match="learned context"):
        reader.below(reader.plan(("cat",), 2), 1)


@pytest.mark.parametrize("projections", [*((p,) for p in PROJECTIONS), ("q", "v"), PROJECTIONS], ids="".join)
@pytest.mark.parametrize("layers", [1, 2])
def test_low_rank_changes_are_those_of_the_weights(layers, projections):
    clients, scale = 3, 0.7
    lora = low_rank("image", clients, layers, projections) | low_rank("text", clients, layers, projections)
    enters = states(tiny_clip(LAYERS))[1]  # two layers run, of which one or both are changed
    top, reader, plan = whole().image.last(2), whole().text, whole().text.phrases(TEXTS)
    images = top.features(enters[None], lora, scale)
    text = reader.features(plan, lora=lora, scale=scale)
    halves = reader.above(reader.below(plan, 2), plan, lora, scale)
    for client in range(clients):
        other = merged(lora, client, scale)
        assert far(images[client], embeddings(other, enters, 2)) < 1e-10
        assert far(text[client], words(other, TEXTS)) < 1e-10
        assert far(halves[client], words(other, TEXTS)) < 1e-10
    assert min(far(images[0], images[1]), far(text[0], text[1])) > 1e-4, "clients differ"


def test_low_rank_changes_go_with_a_learned_context():
    """Also where each class has a context of its own, and only [start] is common."""
    reader, names, lora = whole().text, ("cat", "ox"), low_rank("text", 2, 2)
    plan = reader.plan(names, 2)
    for kinds in (1, 2):
        context = noise(2, kinds, 2, 8)
        together = reader.features(plan, context, lora=lora)
        for client in range(2):
            tower = TextTower.of(ours(merged(lora, client, 1.0)), reader.tokenizer)
            assert far(together[client], tower.features(plan, context[client : client + 1])[0]) < 1e-10


def test_more_low_rank_layers_than_layers_are_refused():
    with pytest.raises(FedvlmError, match=r"layers=3: the image tower has 2 layers; use layers=1 to 2, or 0 for all"):
        whole().image.last(2).features(states(tiny_clip(LAYERS))[1][None], low_rank("image", 1, 3))
    with pytest.raises(FedvlmError, match=r"layers=4: the text tower has 3 layers"):
        whole().text.below(whole().text.phrases(TEXTS), 4)
    with pytest.raises(FedvlmError, match=r"layers=-1: the image tower has 3"):
        whole().image.last(-1)


def test_a_client_does_not_depend_on_its_neighbours():
    """Alone or side by side, with activations or changes of one's own or common ones; and no gradient strays."""
    hidden = torch.stack([states(tiny_clip(LAYERS))[1] + noise(5, 12, seed=c, size=0.1) for c in range(3)])
    top, reader, plan = whole().image.last(2), whole().text, whole().text.phrases(TEXTS)
    lora = {k: v.requires_grad_() for k, v in (low_rank("image", 3, 2) | low_rank("text", 3, 2)).items()}
    below = reader.below(plan, 2)
    images, text = top.features(hidden, lora), reader.above(below, plan, lora)
    for client in range(3):
        only = slice(client, client + 1)
        mine = {k: v[only] for k, v in lora.items()}
        assert far(top.features(hidden[only], mine), images[only]) < 1e-12
        assert far(reader.above(below, plan, mine), text[only]) < 1e-12
        assert far(top.features(hidden, mine)[only], images[only]) < 1e-12, "one change for all"
        assert far(top.features(hidden[only], lora)[only], images[only]) < 1e-12, "the same images for all"
        loss = images[client].pow(3).sum() + text[client].pow(3).sum()
        for slope in torch.autograd.grad(loss, list(lora.values()), retain_graph=True):
            assert slope[client].abs().sum() > 0 and not slope[[c for c in range(3) if c != client]].any()


@pytest.mark.parametrize("tower", ["image", "text"])
def test_gradients_are_slopes(tower):
    lora = {k: v.requires_grad_() for k, v in low_rank(tower, 2, 2, rank=1).items()}
    top, reader, plan = whole().image.last(2), whole().text, whole().text.phrases(TEXTS[:2])
    enters, below = states(tiny_clip(LAYERS), 2)[1][None], reader.below(plan, 2)

    def result(*values: Tensor) -> Tensor:
        params = dict(zip(lora, values, strict=True))
        return top.features(enters, params) if tower == "image" else reader.above(below, plan, params)

    assert torch.autograd.gradcheck(result, tuple(lora.values()))


def test_moved_towers_give_the_same():
    both = whole().to(dtype=torch.float32)
    assert both.image.projection.dtype == both.text.token.dtype == torch.float32
    enters, lora = states(tiny_clip(LAYERS))[1][None], low_rank("image", 2, 2)
    found = both.image.last(2).features(enters, lora)
    assert found.dtype == torch.float64 and 0 < far(found, whole().image.last(2).features(enters, lora)) < 1e-4
    copied = random_task()._replace(tower=whole()).to(torch.device("cpu")).tower
    assert isinstance(copied, Towers) and far(copied.image.projection, whole().image.projection) == 0
    half = both.to(dtype=torch.bfloat16).image.last(2).features(enters.float(), lora)
    assert half.dtype == torch.float32 and float(F.cosine_similarity(half, found.float(), dim=-1).min()) > 0.99


@pytest.fixture
def task(double):
    return layered(random_task())


@pytest.mark.parametrize("layers", [1, 2, 0])
@pytest.mark.parametrize("side", ["both", "image", "text"])
def test_lora_starts_zero_shot_and_trains_what_it_says(task, side, layers):
    about, data = task
    adapter = Lora(rank=2, layers=layers, towers=side)
    params = adapter.init(about, 1)
    assert {k.split(".")[0] for k in params} == ({"image", "text"} if side == "both" else {side})
    assert len(params) == 2 * 3 * (layers or 2) * (2 if side == "both" else 1)
    assert adapter.view == ("embedding" if side == "text" else f"hidden@{-layers}")
    x = (
        about.tower.image.last(layers).features(data.x[None])
        if side != "text"
        else data.x[None, :, 0, :1] + noise(1, 1, 16)
    )
    expected = about.scale * F.normalize(x, dim=-1) @ about.names().mT
    seen = F.normalize(x, dim=-1) if side == "text" else data.x[None]
    assert far(adapter.logits(about, with_client_axis(params), seen), expected) < 1e-10
    moved = {k: (v + noise(*v.shape))[None] for k, v in params.items()}
    batch = Batch(seen, data.y[None], torch.ones(1, len(data.y)))
    logits, aligned = adapter.logits_and_aligned(about, moved, batch)
    assert far(logits, adapter.logits(about, moved, seen)) == 0 and far(logits, expected) > 0.1
    wanted = adapter.class_vectors(about, moved) if side == "text" else adapter.embed(about, moved, seen)
    assert far(aligned, wanted) == 0
    assert adapter.open_vocabulary and adapter.logits(about.subset(slice(2)), moved, seen).shape[-1] == 2


def test_lora_draws_from_the_seed_alone(task):
    adapter = Lora()
    one, again, other = (adapter.init(task[0], seed) for seed in (1, 1, 2))
    assert all(torch.equal(one[k], again[k]) for k in one)
    assert all(not torch.equal(one[k], other[k]) for k in one if k.endswith("A"))
    drawn = torch.stack([v for k, v in one.items() if k.endswith("A") and k.startswith("image")])
    assert 0.9 < float(drawn.abs().max()) * 12**0.5 <= 1 and len(drawn.flatten().unique()) == drawn.numel()


@pytest.mark.parametrize("kind", [Lora, Mma])
def test_the_phrases_of_all_classes_are_needed(task, kind):
    for some in ((), task[0].phrases[1:]):
        with pytest.raises(FedvlmError, match=f"Task.phrases holds {len(some)} phrases for 5 classes"):
            kind().init(task[0]._replace(phrases=some), 1)
    assert Lora(towers="image").init(task[0]._replace(phrases=()), 1), "clients of a text server read none"


@pytest.mark.parametrize("method", ["fedlora", "pfedmma", "feddtl"])
def test_any_template_starts_zero_shot(method, images, tmp_path):
    given = {"data": str(images), "template": "{}, as if drawn", "rounds": 0, "protocol": "base-to-novel"}
    found = []
    for name, more in (("zero-shot", {}), (method, {"layers": 1, "engine": "serial"})):
        setup = resolve(name, given | more)
        found.append(train.train(PlannedRun(setup, Pools().load(setup), tmp_path / name)).record.finished.last)
    assert all(found[0][k] == pytest.approx(found[1][k], abs=0.02) for k in ("local", "base", "novel"))
    assert found[0]["personal"]["val_loss"] == pytest.approx(found[1]["personal"]["val_loss"], abs=1e-4)


def test_lora_needs_two_towers(task):
    with pytest.raises(FedvlmError, match="two towers"):
        Lora().init(task[0]._replace(tower=None), 1)
    with pytest.raises(FedvlmError, match="layers=3: the image tower has 2"):
        Lora(layers=3).init(task[0], 1)


def with_tokens(model, hidden: Tensor, tokens: Tensor, layers: int) -> Tensor:
    """Plainly: tokens [depth, n, width] join at the end, and are replaced there at each of the first `depth` layers."""
    own = hidden.shape[1]
    for i, layer in enumerate(model.vision_model.encoder.layers[LAYERS - layers :]):
        if i < len(tokens):
            hidden = torch.cat([hidden[:, :own], tokens[i].expand(len(hidden), -1, -1)], 1)
        hidden = layer(hidden, attention_mask=None)
    return model.visual_projection(model.vision_model.post_layernorm(hidden[:, 0]))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("layers", [1, 3])
def test_tokens_join_the_image(layers, depth):
    enters, tokens = states(tiny_clip(LAYERS))[LAYERS - layers], noise(2, depth, 4, 12)
    top = whole().image.last(layers)
    found = top.features(enters[None], tokens=tokens)
    for client in range(2):
        assert far(found[client], with_tokens(tiny_clip(LAYERS), enters, tokens[client], layers)) < 1e-10
    assert far(found[0], found[1]) > 1e-4
    assert top.features(enters[None], tokens=tokens, every=True).shape == (2, 6, 5 + 4, 16)
    plain = top.features(enters[None])
    assert far(top.features(enters[None], tokens=tokens[:1, :, :0]), plain) < 1e-12, "no tokens, no change"


@pytest.mark.parametrize("deep", [False, True])
def test_visual_tokens_at_zero_number_are_zero_shot_and_in_the_way_otherwise(task, deep):
    about, data = task
    adapter = Visual(tokens=3, deep=deep)
    params = with_client_axis(adapter.init(about, 1))
    assert params["tokens"].shape == (1, 2 if deep else 1, 3, 12) and adapter.view == "hidden@0"
    x = data.x[None]
    zero_shot = about.scale * F.normalize(about.tower.image.features(x), dim=-1) @ about.names().mT
    assert far(adapter.logits(about, {"tokens": params["tokens"][:, :, :0]}, x), zero_shot) < 1e-10
    assert far(adapter.logits(about, params, x), zero_shot) > 1e-3
    logits, features = adapter.logits_and_aligned(about, params, Batch(x, data.y[None], torch.ones(1, len(data.y))))
    assert far(logits, about.scale * F.normalize(features, dim=-1) @ about.names().mT) == 0
    assert Visual(layers=1).view == "hidden@-1"


def test_a_context_that_is_new_at_deeper_layers():
    """Plainly: every prompt in full through Hugging Face's layers, its places 1 … n overwritten on the way."""
    model, reader, names = tiny_clip(LAYERS), whole().text, ("cat", "grand piano")
    plan, context, deep = reader.plan(names, 2), noise(2, 1, 2, 8), noise(2, 2, 2, 8, seed=3)
    found = reader.features(plan, context, deep=deep)
    table, places = (
        w.weight for w in (model.text_model.embeddings.token_embedding, model.text_model.embeddings.position_embedding)
    )
    for client in range(2):
        for c, end in enumerate(plan.ends):
            x = (table[plan.ids[c].clamp(min=0)] + places[: plan.ids.shape[1]])[None].clone()
            x[0, 1:3] = context[client, 0] + places[1:3]
            mask = torch.full((1, 1, x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)
            for i, layer in enumerate(model.text_model.encoder.layers):
                if i:
                    x[0, 1:3] = deep[client, i - 1]
                x = layer(x, attention_mask=mask)
            state = model.text_projection(model.text_model.final_layer_norm(x[0, end]))
            assert far(found[client, c], F.normalize(state, dim=-1)) < 1e-10
    assert far(reader.features(plan, context, deep=deep[:1])[0], found[0]) < 1e-12, "the same deeper ones for all"
    assert far(reader.features(plan, context[:1], deep=deep)[1], found[1]) > 1e-4
    with pytest.raises(ValueError, match="before the name"):
        reader.features(reader.plan(names, 2, "middle"), context, deep=deep)


def test_maple_couples_the_towers(task):
    about, data = task
    adapter = Maple(depth=2)
    params = with_client_axis(adapter.init(about, 1))
    reader = about.tower.text
    assert far(params["context"][0, 0], reader.phrase("a photo")) == 0
    assert {k: tuple(v.shape[1:]) for k, v in params.items()} == {
        "context": (1, 2, 8), "deep": (1, 2, 8), "couple.weight": (2, 12, 8), "couple.bias": (2, 12)
    }  # fmt: skip
    vectors = torch.cat([params["context"][0], params["deep"][0]])
    tokens = torch.stack(
        [F.linear(v, params["couple.weight"][0, i], params["couple.bias"][0, i]) for i, v in enumerate(vectors)]
    )
    plain = with_images(tiny_clip(), data.x, tokens)
    assert far(adapter.features(about, params, data.x[None])[0], F.normalize(plain, dim=-1)) < 1e-10
    for name in params:  # a step in the text's vectors moves both sides, in the coupling the image's alone
        moved = params | {name: params[name] + noise(*params[name].shape)}
        sides = [
            far(f(about, moved), f(about, params))
            for f in (adapter.class_vectors, lambda t, p: adapter.features(t, p, data.x[None]))
        ]
        assert sides[1] > 1e-4 and (sides[0] > 1e-4) == (not name.startswith("couple"))
    assert "deep" not in Maple(depth=1).init(about, 1)
    for wrong, says in (
        ({"context": 5}, "has 4 words"),
        ({"context": 0}, "context=0"),
    ):
        with pytest.raises(FedvlmError, match=says):
            Maple(**{"depth": 2} | wrong).init(about, 1)
    assert Maple(context=5, depth=1, phrase="").init(about, 1)["context"].std() < 0.1


def with_images(model, hidden: Tensor, tokens: Tensor) -> Tensor:
    for i, layer in enumerate(model.vision_model.encoder.layers):
        hidden = layer(torch.cat([hidden[:, :5], tokens[i].expand(len(hidden), -1, -1)], 1), attention_mask=None)
    return model.visual_projection(model.vision_model.post_layernorm(hidden[:, 0]))


def test_crossed_prompts_are_the_shared_ones_until_a_client_has_its_own(task):
    """Plainly: with own = shared, or nothing private, MaPLe's towers with these vectors; else the equation, by hand."""
    about, data = task
    adapter, reader = Crossed(context=2, tokens=3, size=4), about.tower.text
    start = adapter.init(about, 1)
    assert set(adapter.private) == set(start) - {"context", "tokens"}
    assert far(start["context"][0], reader.phrase("a photo")) == 0
    moved = {k: (v + noise(*v.shape, seed=s))[None] for s, (k, v) in enumerate(start.items())}
    for params in (with_client_axis(start), adapter.shared_only(moved)):
        text = reader.features(reader.plan(about.classes, 2), params["context"])
        image = about.tower.image.features(data.x[None], tokens=params["tokens"])
        assert far(adapter.class_vectors(about, params), text) < 1e-12
        assert far(adapter.features(about, params, data.x[None]), F.normalize(image, dim=-1)) < 1e-12
    for prompt in ("context", "tokens"):
        shared, own = moved[prompt][0, 0], moved[f"own.{prompt}"][0, 0]
        query, key, value, out = (moved[f"fuse.{prompt}.{part}"][0] for part in ("query", "key", "value", "out"))
        expected = torch.empty_like(shared)
        for i, mine in enumerate(own):
            weights = torch.stack([(query @ mine) @ (key @ one) / 2 for one in shared]).softmax(0)
            added = sum(w * (out @ (value @ one)) for w, one in zip(weights, shared, strict=True))
            expected[i] = (shared[i] + mine) / 2 + added
        assert far(adapter.fused(moved, prompt)[0, 0], expected) < 1e-12
    with pytest.raises(FedvlmError, match="has 4 words"):
        Crossed(context=5).init(about, 1)


@pytest.mark.parametrize("layers", [1, 2])
def test_mma_is_a_small_network_beside_each_layer(task, layers):
    """Plainly: hooks on Hugging Face's own layers."""
    about, data = task
    adapter = Mma(size=3, layers=layers, scale=0.3)
    start = adapter.init(about, 1)
    assert set(adapter.private) == set(start) - {"middle", "middle.bias"}
    top = about.tower.image.last(layers)
    zero_shot = about.scale * F.normalize(top.features(data.x[None]), dim=-1) @ about.names().mT
    assert far(adapter.logits(about, with_client_axis(start), data.x[None]), zero_shot) < 1e-10
    params = {k: v + noise(2, *v.shape) for k, v in start.items()}
    found, text = adapter.features(about, params, data.x[None]), adapter.class_vectors(about, params)
    for client in range(2):
        model, mine = deepcopy(tiny_clip()), {k: v[client] for k, v in params.items()}

        def hooked(block, i: int, tower: str, mine: Params = mine):
            def added(module, given, result):
                y = block.layer_norm1(given[0])
                for name in (f"{tower}.down", "middle", f"{tower}.up"):
                    y = F.linear(y if name.endswith("down") else y.relu(), mine[name][i], mine[f"{name}.bias"][i])
                return result + 0.3 * y

            block.register_forward_hook(added)

        for tower, encoder in (("image", model.vision_model.encoder), ("text", model.text_model.encoder)):
            for i, block in enumerate(encoder.layers[-layers:]):
                hooked(block, i, tower)
        hidden = data.x
        for layer in model.vision_model.encoder.layers[-layers:]:
            hidden = layer(hidden, attention_mask=None)
        plain = model.visual_projection(model.vision_model.post_layernorm(hidden[:, 0]))
        assert far(found[client], F.normalize(plain, dim=-1)) < 1e-10
        assert far(text[client], words(model, [f"a photo of a {name}" for name in about.classes])) < 1e-10


@pytest.mark.parametrize("method", ["fedlora", "vpt", "vpt-deep", "fedmaple", "pfedmma", "pfeddc"])
def test_a_run_from_images_to_predictions(method, images, tmp_path, capsys):
    """On mini-clip; what was learned predicts the same from its folder as from the run."""
    out, cut = tmp_path / "run", {"fedmaple": ["layers=1", "depth=1"]}
    cut |= {name: ["layers=1"] for name in ("vpt", "vpt-deep", "pfeddc")}
    words = [f"data={images}", "unseen=noto", "rounds=1", "epochs=1", "shots=2", *cut.get(method, [])]
    assert main(["run", method, *words, f"out={out}"]) == 0
    capsys.readouterr()
    shown = sorted(str(p) for p in (images / "noto" / "bird").iterdir())[:2]
    assert main(["predict", str(out), *shown]) == 0
    told = capsys.readouterr().out.partition("image ")[2]  # without lines of progress, where it is slow
    assert main(["export", str(out), "--out", str(tmp_path / "model")]) == 0
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "model"), *shown]) == 0
    assert capsys.readouterr().out.partition("image ")[2] == told


def test_clients_apart_agree(images, tmp_path, bytes_only):
    words = [f"data={images}", "unseen=noto", "rounds=1", "epochs=1", "shots=1", "layers=1"]
    for engine in ("serial", "loopback"):
        assert main(["run", "fedlora", *words, f"engine={engine}", f"out={tmp_path / engine}"]) == 0
    assert state_of(tmp_path / "serial") == state_of(tmp_path / "loopback")


@pytest.mark.parametrize("kind", [Lora, Visual, Maple, Mma, Crossed])
def test_halves_are_near_and_what_is_learned_stays_whole(kind, clip, pictures):
    """On mini-clip: bfloat16 towers, float32 parameters and results."""
    classes = ("cat", "ox", "grand piano")
    phrases = tuple(f"a photo of a {c}" for c in classes)
    about = Task(classes, clip.texts(phrases), clip.dim, clip.scale, clip.both_towers, phrases=phrases)
    full = kind(layers=1, **({"depth": 1} if kind is Maple else {}))
    half = replace(full, precision="half")
    start = full.init(about, 1)
    params = {k: (v + 0.02 * torch.randn(v.shape))[None].requires_grad_() for k, v in start.items()}
    x = encode_view(clip, pictures, "hidden@-1")[None]
    found = [adapter.features(about, params, x) for adapter in (full, half)]
    assert far(*found) > 1e-6 and float((found[0] * found[1]).sum(-1).detach().min()) > 0.999
    logits = [adapter.logits(about, params, x) for adapter in (full, half)]
    assert 0 < far(*logits) < 0.5 and logits[1].dtype == torch.float32
    slopes = [torch.autograd.grad(one.square().sum(), list(params.values())) for one in logits]
    flat = [torch.cat([g.flatten() for g in one]) for one in slopes]
    assert float(F.cosine_similarity(*flat, dim=0)) > 0.98 and flat[1].dtype == torch.float32
