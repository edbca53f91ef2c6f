"""The text tower as a function of context vectors: the same numbers as Hugging Face's modules give, for less work."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from helpers import ours
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPConfig, CLIPModel

from fedvlm.backbones import load
from fedvlm.errors import FedvlmError
from fedvlm.towers import products
from fedvlm.towers.text import TextTower, _groups

NAMES = ("cat", "grand piano", "a rather long name, of many words, for one animal", "ox", "dollar bill", "yin yang")
VECTORS = 5  # odd, so that the two halves of a context differ
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float64: (1e-10, 1e-9)}  # features, gradients


class Case(NamedTuple):
    model: Any
    tower: TextTower


@pytest.fixture(scope="module")
def clip():
    return load("mini-clip")


@pytest.fixture(scope="module")
def cases(clip) -> dict[tuple[str, torch.dtype], Case]:
    width = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    text = width | {"max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-3}
    random = CLIPModel(CLIPConfig(text_config=text, vision_config=width, projection_dim=24)).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in random.parameters():  # freshly initialised norms are ones and zeros, which would hide mistakes
            weight.add_(torch.randn(weight.shape, generator=draw) * 0.2)
    models = {"mini-clip": CLIPModel.from_pretrained(clip.folder, dtype=torch.float32).eval(), "random": random}
    made = {(name, torch.float32): Case(m, TextTower.of(ours(m), clip.tokenizer)) for name, m in models.items()}
    for name, model in models.items():
        wide = deepcopy(model).double()
        made[name, torch.float64] = Case(wide, TextTower.of(ours(wide), clip.tokenizer))
    return made


def contexts(tower: TextTower, clients: int = 2, kinds: int = 1, vectors: int = VECTORS) -> Tensor:
    """kinds: 1, a context shared by all classes, or the number of classes."""
    draw = torch.Generator().manual_seed(2)
    spread = float(tower.token.float().std())
    return (torch.randn(clients, kinds, vectors, tower.token.shape[1], generator=draw) * spread).to(tower.token.dtype)


def reference(case: Case, names, context: Tensor, position: str = "end", cut: int | None = None) -> Tensor:
    """Every prompt at the tower's full length through Hugging Face's modules."""
    text, tokenizer = case.model.text_model, case.tower.tokenizer
    table, places = text.embeddings.token_embedding.weight, text.embeddings.position_embedding.weight
    half = context.shape[2] if position == "end" else context.shape[2] // 2
    prompts, ends = [], []
    for client in context:
        for c, name in enumerate(names):
            vectors = client[c if len(client) > 1 else 0]
            words = table[tokenizer.words([name])[0][:cut]]
            last = table[[*tokenizer.words(["."])[0], tokenizer.eos_token_id]]
            prompt = torch.cat([table[[tokenizer.bos_token_id]], vectors[:half], words, vectors[half:], last])
            ends.append(len(prompt) - 1)
            prompts.append(torch.cat([prompt, table[[0]].expand(len(places) - len(prompt), -1)]))
    mask = torch.full((1, 1, len(places), len(places)), -torch.inf, dtype=table.dtype).triu(1)
    states = text.encoder(inputs_embeds=torch.stack(prompts) + places, attention_mask=mask).last_hidden_state
    pooled = text.final_layer_norm(states)[torch.arange(len(ends)), ends]
    return F.normalize(case.model.text_projection(pooled), dim=-1).unflatten(0, (len(context), len(names)))


def gradient(features: Tensor, context: Tensor) -> Tensor:
    """The gradient of a fixed linear combination of all features."""
    draw = torch.Generator().manual_seed(3)
    weights = torch.randn(features.shape, generator=draw).to(features.dtype)
    return torch.autograd.grad((features * weights).sum(), context)[0]


def distance(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape and one.dtype == other.dtype
    return float((one - other).detach().abs().max())


@pytest.mark.parametrize("position", ["end", "middle"])
@pytest.mark.parametrize("kinds", [1, len(NAMES)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["mini-clip", "random"])
def test_features_and_gradients_equal_the_reference(cases, name, dtype, kinds, position):
    case = cases[name, dtype]
    context = contexts(case.tower, kinds=kinds).requires_grad_()
    ours = case.tower.features(case.tower.plan(NAMES, VECTORS, position), context)
    expected_features = reference(case, NAMES, context, position)
    features, gradients = TOLERANCE[dtype]
    assert distance(ours, expected_features) < features
    expected = gradient(expected_features, context)
    assert distance(gradient(ours, context), expected) < gradients * max(1.0, float(expected.abs().max()))
    assert float(expected.abs().amax(3).min()) > 0, "every vector of every context has an effect"


@pytest.mark.parametrize("kinds", [1, len(NAMES)])
@pytest.mark.parametrize("chunk", [1, 50, 90])
def test_grouping_of_classes_changes_nothing(cases, chunk, kinds):
    tower = cases["mini-clip", torch.float64].tower
    plan, context = tower.plan(NAMES, VECTORS, "middle"), contexts(tower, kinds=kinds)
    assert distance(tower.features(plan, context, chunk), tower.features(plan, context)) < 1e-12


@settings(deadline=None)
@given(
    st.lists(st.integers(3, 30), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 600),
    st.integers(0, 100),
)
def test_groups_hold_every_class_once_and_little_padding(ends, shared, clients, chunk, group_cost):
    groups = _groups(ends, shared, clients, chunk, group_cost)
    assert sorted(c for group in groups for c in group) == list(range(len(ends)))
    for group in groups:
        places = clients * len(group) * (max(ends[i] for i in group) + 1 - shared)
        assert places <= chunk or len(group) == 1
    for group in groups:
        padding = {e: sum(max(ends[i] for i in group) - e for i in group if ends[i] == e) for e in set(ends)}
        assert clients * max(padding.values()) <= group_cost


def test_a_phrase_as_context_gives_the_text_features_of_the_whole_phrase(clip):
    tower = TextTower.of(clip.model, clip.tokenizer)
    names = (*NAMES, "u.s.", "bird (small)")  # the last characters of the name and the full stop form one token
    start = tower.phrase("a photo of a")
    expected = clip.texts([f"a photo of a {name}." for name in names])
    found = tower.features(tower.plan(names, len(start)), start[None, None])
    assert distance(found[0].cpu(), expected) < 1e-5
    bare = tower.features(tower.plan(names, len(start), ending=""), start[None, None])
    assert distance(bare[0].cpu(), clip.texts([f"a photo of a {name}" for name in names])) < 1e-5


@pytest.mark.parametrize("kinds", [1, len(NAMES)])
def test_a_client_does_not_depend_on_the_others(cases, kinds):
    tower = cases["mini-clip", torch.float64].tower
    plan, context = tower.plan(NAMES, VECTORS), contexts(tower, clients=3, kinds=kinds).requires_grad_()
    together = tower.features(plan, context)
    for client in range(3):
        alone = context[client : client + 1].detach().requires_grad_()
        features = tower.features(plan, alone)
        assert distance(features, together[client : client + 1]) < 1e-10
        mine = torch.autograd.grad(together[client].pow(3).sum(), context, retain_graph=True)[0]
        assert distance(mine[client], torch.autograd.grad(features.pow(3).sum(), alone)[0][0]) < 1e-10
        mine[client] = 0
        assert not mine.any()


def test_unread_states_are_not_computed(cases, monkeypatch):
    """FLOPs relative to the reference, with 16 context vectors and 40 positions."""
    monkeypatch.setattr(products, "onednn", lambda: None)  # torch's counter does not know the operator
    case, names = cases["mini-clip", torch.float32], [f"{n} {m}" for n in ("cat", "dog") for m in ("", "bird", "fish")]
    plan = case.tower.plan(names, 16)

    def work(kinds: int, features) -> float:
        context = contexts(case.tower, 2, kinds, 16).requires_grad_()
        with FlopCounterMode(display=False) as counter:
            gradient(features(context), context)
        return counter.get_total_flops()

    for kinds, times in ((1, 6.4), (len(names), 2.2)):  # about 6 and 2 if the last layer ran in full
        ours, plain = (
            work(kinds, f) for f in (lambda c: case.tower.features(plan, c), lambda c: reference(case, names, c))
        )
        assert plain / ours > times


def test_long_names_are_truncated_before_the_end_token(cases):
    case = cases["mini-clip", torch.float64]
    names = ("cat", "very " * 60 + "large cat", "cat " * 60)
    plan = case.tower.plan(names, VECTORS)
    assert plan.ids.shape == (3, 40) and plan.ends == (1 + VECTORS + 2, 39, 39)
    assert (plan.ids[1:, -2:] == plan.ids[0, plan.ends[0] - 1 : plan.ends[0] + 1]).all(), "full stop and end"
    context = contexts(case.tower)
    features = case.tower.features(plan, context)
    assert distance(features, reference(case, names, context, cut=40 - 3 - VECTORS)) < 1e-10
    assert distance(features[:, 1], features[:, 2]) > 1e-3


def test_a_context_that_does_not_fit_is_an_error(cases):
    tower = cases["mini-clip", torch.float32].tower
    assert tower.plan(NAMES, 36).ids.shape[1] == 40
    for position in ("end", "middle"):
        with pytest.raises(FedvlmError, match=r"context=37: .*40 tokens.* use context=1 to 36"):
            tower.plan(NAMES, 37, position)
    with pytest.raises(FedvlmError, match="context=0"):
        tower.plan(NAMES, 0)
    with pytest.raises(FedvlmError, match="position=front"):
        tower.plan(NAMES, 4, "front")
    with pytest.raises(ValueError, match="6 prompts of 4 vectors"):
        tower.features(tower.plan(NAMES, 4), contexts(tower, vectors=3))


@pytest.mark.parametrize("kinds", [1, len(NAMES)])
def test_bfloat16_is_close(cases, kinds):
    tower = cases["mini-clip", torch.float32].tower
    plan, context = tower.plan(NAMES, VECTORS), contexts(tower, kinds=kinds).requires_grad_()
    full, half = tower.features(plan, context), tower.to(dtype=torch.bfloat16).features(plan, context)
    assert half.dtype == torch.float32 and distance(half.norm(dim=-1), torch.ones(2, len(NAMES))) < 1e-6
    assert float((full * half).sum(-1).detach().min()) > 0.999
    assert distance(half, full) > 1e-6, "it was computed in bfloat16"
    gradients = gradient(full, context).flatten(1), gradient(half, context).flatten(1)
    assert float(F.cosine_similarity(*gradients).min()) > 0.99


def test_only_the_context_gets_a_gradient(cases, clip):
    model = deepcopy(cases["random", torch.float32].model).requires_grad_(True)
    mine = ours(model).requires_grad_(True)
    tower = TextTower.of(mine, clip.tokenizer)
    context = contexts(tower, kinds=len(NAMES)).requires_grad_()
    tower.features(tower.plan(NAMES, VECTORS), context).pow(3).sum().backward()
    assert context.grad is not None and context.grad.abs().sum() > 0
    assert all(weight.grad is None for weight in [*mine.parameters(), *model.parameters()])


def test_the_module_does_not_import_transformers():
    script = "import sys, fedvlm.towers.text; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
