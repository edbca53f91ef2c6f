"""Equations against closed forms, brute force or an independent implementation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from conftest import random_task
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedvlm.adapters.attention import Attention
from fedvlm.adapters.base import Task
from fedvlm.adapters.linear import Linear
from fedvlm.adapters.mlp import Mlp
from fedvlm.adapters.rotation import Rotation, cayley, rotate
from fedvlm.core import Batch, lift
from fedvlm.evaluate.protocols import by_seed, partial, row, summary
from fedvlm.merge.mean import Agreement
from fedvlm.tasks import contrastive, cross_entropy

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
    torch.testing.assert_close(Attention().logits(task, lift(params), h[None])[0], expected)


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
def test_rotations_are_orthogonal_and_both_ways_agree(blocks):
    """A small batch goes through the solve, a large one through the map: the same values and gradients."""
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


def test_rotation_starts_at_the_frozen_model_and_folds_into_a_head():
    task = random_task()
    h = F.normalize(torch.randn(1, 6, 16), dim=-1)
    for blocks in (1, 4):
        adapter = Rotation(blocks=blocks)
        params = adapter.init(task, 0)
        torch.testing.assert_close(adapter.logits(task, lift(params), h), task.scale * h @ task.names().T)
        params["skew"] = torch.randn_like(params["skew"])
        torch.testing.assert_close(adapter.logits(task, lift(params), h)[0], h[0] @ adapter.fold(task, params).T)


@pytest.mark.parametrize("adapter", [Linear(), Mlp()])
def test_ablations_start_at_the_frozen_model(adapter):
    task = random_task()
    h = F.normalize(torch.randn(1, 6, 16), dim=-1)
    torch.testing.assert_close(adapter.logits(task, lift(adapter.init(task, 0)), h), task.scale * h @ task.names().T)


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
    agreement = Agreement()
    agreement.add({k: v[:1] for k, v in rows.items()}, anchor)
    agreement.add({k: v[1:] for k, v in rows.items()}, anchor)
    flat = torch.cat([(rows[k] - anchor[k]).flatten(1) for k in ("a", "b")], dim=1)
    pairs = [F.cosine_similarity(flat[i], flat[j], dim=0) for i, j in itertools.combinations(range(clients), 2)]
    assert agreement.mean() == pytest.approx(float(torch.stack(pairs).mean()), abs=1e-9)


def test_g_p_c_by_hand():
    """Three domains: diagonal .1 .2 .3, the rest .5 … 1.0; two seeds, of which the second lacks a target."""
    a = np.array([[0.1, 0.5, 0.6], [0.7, 0.2, 0.8], [0.9, 1.0, 0.3]])
    names = ["x", "y", "z"]

    def info(i, seed):
        clients = {n: {"shared": {"test": a[i, j] if i == j else 0.0}} for j, n in enumerate(names)}
        for j, n in enumerate(names):
            if i != j:
                clients[n]["personal"] = {"test": a[i, j]}
        return {
            "config": {"seed": seed, "unseen": [names[i]]},
            "result": {"unseen": [names[i]], "last": {"clients": clients}},
        }

    infos = [info(0, 1), info(1, 1), info(2, 1), info(0, 2)]
    (got,) = by_seed(infos).values()
    assert got["G"] == pytest.approx(0.2) and got["P"] == pytest.approx(0.75) and got["C"] == pytest.approx(a.mean())
    assert partial(infos) == [2]


def test_clients_of_a_domain_count_as_one_domain():
    clients = {"a-0": {"personal": {"test": 0.2}}, "a-1": {"personal": {"test": 0.4}}, "b-0": {"shared": {"test": 1.0}}}
    clients["c-0"] = {"personal": {"test": 0.5}}
    info = {
        "config": {"seed": 1, "unseen": ["b"]},
        "homes": {"a-0": "a", "a-1": "a", "b-0": "b", "c-0": "c"},
        "result": {"unseen": ["b-0"], "last": {"clients": clients}},
    }
    assert row(info) == {"a": (pytest.approx(0.3), False), "b": (1.0, True), "c": (0.5, False)}
    assert summary([row(info)]) == {"G": 1.0, "P": pytest.approx(0.4), "C": pytest.approx(0.6)}


def test_g_is_undefined_without_a_shared_model():
    held = {"x": (np.nan, True), "y": (0.5, False)}
    assert summary([held]) == {"G": None, "P": 0.5, "C": None}
    assert summary([{"y": (0.5, False)}]) == {"G": None, "P": 0.5, "C": None}
