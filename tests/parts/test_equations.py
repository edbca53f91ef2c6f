"""Equations against closed forms, brute force or an independent implementation."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import random_task
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedvlm.core import descent
from fedvlm.core.adapter import Task
from fedvlm.core.data import Batch
from fedvlm.core.descent import Optimiser, OptimiserSettings
from fedvlm.core.observers import Agreement
from fedvlm.core.records import BackboneRecord, ClientScores, DataRecord, MethodRecord, PartRecord, Result, RunRecord
from fedvlm.core.state import Reply, State, with_client_axis
from fedvlm.core.tasks import contrastive, cross_entropy
from fedvlm.evaluation.protocols import by_seed, matrix_row, matrix_summary, partial
from fedvlm.parts.adapters.attention import Attention
from fedvlm.parts.adapters.clip_adapter import ClipAdapter
from fedvlm.parts.adapters.linear import Linear
from fedvlm.parts.adapters.mlp import Mlp
from fedvlm.parts.adapters.rotation import Rotation, cayley, rotate

pytestmark = pytest.mark.usefixtures("double")


def batch_of(x, y, real):
    weight = real / real.sum(-1, keepdim=True)
    return Batch(x, y, weight)


def test_attention_is_the_papers_network():
    task = random_task()
    params = Attention().init(task, 7)
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softmax(dim=1))
    for layer, w, b in ((net[0], "w1", "b1"), (net[2], "w2", "b2")):
        layer.weight.data.copy_(params[w])
        layer.bias.data.copy_(params[b])
    h = F.normalize(torch.randn(9, 16), dim=-1)
    masked = net(h) * h
    expected = task.scale * (masked / masked.norm(dim=1, keepdim=True)) @ task.names().T
    torch.testing.assert_close(Attention().logits(task, with_client_axis(params), h[None])[0], expected)


def test_clip_adapter_is_a_residual_of_two_linear_layers():
    task, adapter = random_task(), ClipAdapter(reduction=4, ratio=0.2)
    params = adapter.init(task, 7)
    net = nn.Sequential(nn.Linear(16, 4, bias=False), nn.ReLU(), nn.Linear(4, 16, bias=False), nn.ReLU())
    net[0].weight.data.copy_(params["w1"])
    net[2].weight.data.copy_(params["w2"])
    h = torch.randn(9, 16)
    expected = task.scale * F.normalize(0.8 * h + 0.2 * net(h), dim=1) @ task.names().T
    found = adapter.logits(task, with_client_axis(params), h[None])[0]
    torch.testing.assert_close(found, expected)
    frozen = ClipAdapter(ratio=0.0).logits(task, with_client_axis(params), h[None])[0]
    torch.testing.assert_close(frozen, task.scale * F.normalize(h, dim=1) @ task.names().T)


def test_fedclip_has_525312_parameters_at_512():
    task = Task(("a", "b"), torch.zeros(2, 512), 512, 100.0)
    assert sum(v.numel() for v in Attention().init(task, 0).values()) == 525_312


def test_cayley_is_torchs():
    x = torch.randn(3, 1, 8, 8)
    for client in x:
        layer = nn.utils.parametrizations.orthogonal(
            nn.Linear(8, 8, bias=False), orthogonal_map="cayley", use_trivialization=False
        )
        raw = layer.parametrizations.weight.original
        skew = (client[0] - client[0].T) / 2
        raw.data.copy_(skew.tril(-1))  # torch builds A − Aᵀ from the lower triangle and solves (I + A/2)(I − A/2)⁻¹
        torch.testing.assert_close(cayley(2 * 0.5 * client)[0], brute_cayley(skew))
        torch.testing.assert_close(layer.weight.detach(), brute_cayley(skew / 2))


def brute_cayley(skew):
    eye = torch.eye(len(skew))
    return (eye + skew) @ torch.linalg.inv(eye - skew)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_rotations_are_orthogonal_for_small_and_large_batches(blocks):
    """A small batch uses the solve, a large one the explicit matrix: the same values and gradients."""
    x = torch.randn(2, blocks, 16 // blocks, 16 // blocks)
    maps = cayley(x)
    eye = torch.eye(16 // blocks).expand_as(maps)
    torch.testing.assert_close(maps @ maps.mT, eye)
    assert torch.linalg.cond(maps).sub(1).abs().max() < 1e-9
    h = torch.randn(2, 40, 16)
    few, many = x.clone().requires_grad_(), x.clone().requires_grad_()
    a = torch.cat([rotate(few, h[:, i : i + 2]) for i in range(0, 40, 2)], dim=1)
    b = rotate(many, h)
    torch.testing.assert_close(a, b)
    target = torch.randn_like(b)
    torch.testing.assert_close(*(torch.autograd.grad((y * target).sum(), p)[0] for y, p in ((a, few), (b, many))))
    torch.testing.assert_close(b.norm(dim=-1), h.norm(dim=-1))


def test_rotation_starts_at_the_frozen_model_and_has_a_linear_form():
    task = random_task()
    h = F.normalize(torch.randn(1, 6, 16), dim=-1)
    for blocks in (1, 4):
        adapter = Rotation(blocks=blocks)
        params = adapter.init(task, 0)
        torch.testing.assert_close(adapter.logits(task, with_client_axis(params), h), task.scale * h @ task.names().T)
        params["skew"] = torch.randn_like(params["skew"])
        torch.testing.assert_close(
            adapter.logits(task, with_client_axis(params), h)[0], h[0] @ adapter.to_linear(task, params).T
        )


@pytest.mark.parametrize("adapter", [Linear(), Mlp()])
def test_ablations_start_at_the_frozen_model(adapter):
    task = random_task()
    h = F.normalize(torch.randn(1, 6, 16), dim=-1)
    torch.testing.assert_close(
        adapter.logits(task, with_client_axis(adapter.init(task, 0)), h), task.scale * h @ task.names().T
    )


def test_cross_entropy_is_torchs_on_the_real_examples():
    logits, y = torch.randn(3, 6, 5), torch.randint(5, (3, 6))
    real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]).double()
    got = cross_entropy(logits, batch_of(logits, y, real))
    for k in range(3):
        m = real[k] > 0
        torch.testing.assert_close(got[k], F.cross_entropy(logits[k][m], y[k][m]))


def test_contrastive_is_the_symmetric_in_batch_loss():
    logits, y = torch.randn(2, 5, 4), torch.randint(4, (2, 5))
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).double()
    got = contrastive(logits, batch_of(logits, y, real))
    for k in range(2):
        n = int(real[k].sum())
        pairs = logits[k, :n][:, y[k, :n]]
        target = torch.arange(n)
        torch.testing.assert_close(got[k], (F.cross_entropy(pairs, target) + F.cross_entropy(pairs.T, target)) / 2)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 7), st.integers(0, 10_000))
def test_agreement_is_the_mean_over_pairs(clients, seed):
    draw = torch.Generator().manual_seed(seed)
    rows = {"a": torch.randn(clients, 3, generator=draw), "b": torch.randn(clients, 2, 2, generator=draw)}
    anchor = {"a": torch.randn(3, generator=draw), "b": torch.randn(2, 2, generator=draw)}
    agreement = Agreement(State(anchor, {}, {}))
    for part in (slice(1), slice(1, None)):
        agreement.add(Reply(np.arange(clients)[part], {}, {k: v[part] for k, v in rows.items()}))
    flat = torch.cat([(rows[k] - anchor[k]).flatten(1) for k in ("a", "b")], dim=1)
    pairs = [F.cosine_similarity(flat[i], flat[j], dim=0) for i, j in itertools.combinations(range(clients), 2)]
    assert agreement.mean() == pytest.approx(float(torch.stack(pairs).mean()), abs=1e-9)


def record(clients: dict[str, ClientScores], unseen: list[str], held_out: list[str], seed: int = 1) -> RunRecord:
    """Of a run with these scores; unseen: domains as configured, held_out: their clients."""
    last = {"round": 1, "clients": clients}
    return RunRecord(
        identity="",
        method=MethodRecord("fedavg"),
        adapter=PartRecord("head"),
        local=PartRecord("sgd"),
        merge=PartRecord("mean"),
        config={"seed": seed, "unseen": unseen},
        given={},
        data=DataRecord("toy", "f", "accuracy", 90, [], ["a", "b"]),
        backbone=BackboneRecord("tiny", "1", 4, 1.0),
        result=Result(last, last, {}, 0, 0, 0.0, held_out),
    )


def test_g_p_c_by_hand():
    """Three domains: diagonal .1 .2 .3, the rest .5 … 1.0; two seeds, of which the second lacks a target."""
    a = np.array([[0.1, 0.5, 0.6], [0.7, 0.2, 0.8], [0.9, 1.0, 0.3]])
    names = ["x", "y", "z"]

    def run(i, seed):
        clients: dict[str, ClientScores] = {
            n: {"shared": {"test": a[i, j] if i == j else 0.0}} for j, n in enumerate(names)
        }
        for j, n in enumerate(names):
            if i != j:
                clients[n]["personal"] = {"test": a[i, j]}
        return record(clients, [names[i]], [names[i]], seed)

    records = [run(0, 1), run(1, 1), run(2, 1), run(0, 2)]
    (got,) = by_seed(records).values()
    assert got["G"] == pytest.approx(0.2) and got["P"] == pytest.approx(0.75) and got["C"] == pytest.approx(a.mean())
    assert partial(records) == [2]


def test_clients_of_a_domain_count_as_one_domain():
    clients = {"a-0": {"personal": {"test": 0.2}}, "a-1": {"personal": {"test": 0.4}}, "b-0": {"shared": {"test": 1.0}}}
    clients["c-0"] = {"personal": {"test": 0.5}}
    homes = {"a-0": "a", "a-1": "a", "b-0": "b", "c-0": "c"}
    found = matrix_row(replace(record(clients, ["b"], ["b-0"]), homes=homes))
    assert found == {"a": (pytest.approx(0.3), False), "b": (1.0, True), "c": (0.5, False)}
    assert matrix_summary([found]) == {"G": 1.0, "P": pytest.approx(0.4), "C": pytest.approx(0.6)}


def test_g_is_undefined_without_a_shared_model():
    held = {"x": (np.nan, True), "y": (0.5, False)}
    assert matrix_summary([held]) == {"G": None, "P": 0.5, "C": None}
    assert matrix_summary([{"y": (0.5, False)}]) == {"G": None, "P": 0.5, "C": None}


TORCHS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("optimiser", "options", "kernel"),
    [
        ("sgd", {}, "none"),
        ("sgd", {"momentum": 0.9}, "none"),
        *(
            (name, {"betas": (0.8, 0.95), "eps": 1e-6}, kernel)
            for name in ("adam", "adamw")
            for kernel in ("fused", "public")
        ),
    ],
)
def test_optimisers_are_torchs(optimiser, options, kernel, weight_decay, dtype, tolerance, monkeypatch):
    """Ten steps with a falling learning rate of two clients, each against a torch.optim of its own; the second stops after
    six. Adam with torch's fused kernel and with public operations."""
    if kernel == "public":
        monkeypatch.setattr(descent, "FUSED", None)
    elif kernel == "fused":
        assert descent.FUSED is not None, "this torch has no fused kernel"
    draw = torch.Generator().manual_seed(3)
    shapes = {"w": (4, 3), "b": (5,)}
    start = {k: torch.randn(2, *shape, generator=draw).to(dtype) for k, shape in shapes.items()}
    params = {k: v.clone() for k, v in start.items()}
    ours = Optimiser(OptimiserSettings(optimiser=optimiser, weight_decay=weight_decay, **options), params)
    leaves = [[nn.Parameter(v[i].clone()) for v in start.values()] for i in range(2)]
    theirs = [TORCHS[optimiser](own, lr=0.1, weight_decay=weight_decay, **options) for own in leaves]
    for step in range(10):
        rate, active = 0.1 / (1 + step), 2 if step < 6 else 1
        gradients = [torch.randn(active, *shape, generator=draw).to(dtype) for shape in shapes.values()]
        ours.step(active, gradients, rate)
        for i in range(active):
            for leaf, gradient in zip(leaves[i], gradients, strict=True):
                leaf.grad = gradient[i].clone()
            theirs[i].param_groups[0]["lr"] = rate
            theirs[i].step()
        for i in range(2):
            for value, leaf in zip(params.values(), leaves[i], strict=True):
                torch.testing.assert_close(value[i], leaf.detach(), rtol=tolerance, atol=tolerance)
    assert all((params[k] - start[k]).abs().min() > 0 for k in params)


def test_the_running_statistics_follow_the_batches_and_not_the_optimiser():
    """Their "gradient" is the distance to the batch's statistic; a step moves by a tenth of it, as torch's batch norm."""
    norm = nn.BatchNorm1d(3)
    x = torch.randn(7, 3)
    params = {"weight": torch.ones(1, 3), "n.running_mean": norm.running_mean[None].clone()}
    ours = Optimiser(OptimiserSettings(lr=0.5, momentum=0.9, weight_decay=0.1), params)
    for _ in range(3):
        ours.step(1, [torch.zeros(1, 3), params["n.running_mean"] - x.mean(0)], 0.5)
        norm(x)
    torch.testing.assert_close(params["n.running_mean"][0], norm.running_mean)
