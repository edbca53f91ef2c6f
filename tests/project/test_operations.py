"""What is computed from features, wherever a simulation and a deployment group or store them differently: the same bits.

operation: in a simulation (engine=serial) | at a site | the test

- encoding an image: other images of the pool beside it, any piece and thread | the site's own images | test_alone,
  test_encoding, benchmarks/processors.py
- a class name's embedding: with those that the store lacks | with those that this site's store lacks | test_alone
- nouns far from the classes: where the rounds are played | not computed: a site is told their names | test_alone
- class products, logits, losses, metrics (steps score, validate): [1, examples, dim], a part of the pool's tensor |
  the same shape, a tensor of its own that was read from a file | here
- training: batches gathered from the pool | batches gathered from the site's own tensor | here
- second moments and heads: the client's rows of the pool, in float64 | the site's own rows | here
- a model that arrives: the server's tensors | tensors of a frame | here
- a private row: [1, …] of the table of all clients | [1, …] of a table of one | here
- a state that is resumed: tensors that were computed | tensors of a file | here
- merges: replies in the order of clients | the same order, whichever came first | test_contract
- sums in fixed point (secure=true): integers | the same integers, modulo 2³² or 2⁶⁴ | test_secure
- draws of batches, noise and cohorts: keyed by seed, round and client | the same keys | test_draws
- predictions of a finished run: image by image | image by image | test_alone, benchmarks/processors.py

engine=stacked computes clients side by side, in other shapes: up to rounding only (test_contract, 1e-9 in float64).
Products may round otherwise where their numbers begin elsewhere in memory (MKL's do), so what comes from a file, from a
frame or from the middle of a tensor is moved first (`core.state.aligned`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import ABLE, build, example, message, random_data, random_task, small_parts, train_small
from torch import Tensor

from fedvlm.core.data import Data
from fedvlm.core.state import ALIGNMENT, Message, aligned
from fedvlm.engines.rows import Rows
from fedvlm.engines.stacked import Stacked
from fedvlm.federation.wire import Header, pack_message, to_message, unpack
from fedvlm.rounds.method import Method

COMBINATIONS = [
    ("head", "sgd", "mean"),
    ("attention", "sgd", "mean"),
    ("rotation", "sgd", "mean"),
    ("linear", "prox", "mean"),
    ("mlp", "sgd", "mean"),
    ("affine", "moments", "moments"),
    ("prompt", "sgd", "mean"),
    ("outsiders", "sgd", "transport"),
    ("lora", "two_stage", "text_server"),
    ("lowrank", "sgd", "ga"),
    ("memory", "memory", "mean"),
]
STEPS = ("validate", "score", "train")


def elsewhere(x: Tensor) -> Tensor:
    """The same numbers, one number further on in memory than torch would put them."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x)
    assert not x.numel() or moved.data_ptr() % ALIGNMENT
    return moved


def at_site(data: Data, i: int) -> Data:
    """What a site has: its own rows alone."""
    low, high = int(data.bounds[i, 0]), int(data.bounds[i, 3])
    own = {"x": elsewhere(data.x[low:high]), "y": data.y[low:high].clone()}
    extras = {
        k: e._replace(x=elsewhere(e.x[low:high]), y=None if e.y is None else e.y[low:high]) if e.aligned else e
        for k, e in data.extras.items()
    }
    return replace(data, **own, bounds=data.bounds[[i]] - low, ids=data.ids[[i]], extras=extras)


def arrived(sent: Message) -> Message:
    """As it comes out of a frame."""
    return to_message(*unpack(pack_message(sent, Header("train"))))


@pytest.mark.parametrize("names", COMBINATIONS, ids="-".join)
def test_a_site_answers_with_the_bits_of_a_simulation(names, library):
    method = build(*names)
    data, sent = example(method.adapter)[1], message(method)
    same_bits(method, data, sent)


@pytest.mark.parametrize("classes", [2, 5, 300])
@pytest.mark.parametrize("dim", [33, 256])
@pytest.mark.parametrize("adapter", ["linear", "mlp", "head"])
def test_other_sizes_as_well(adapter, dim, classes):
    """Where few rows meet a wide weight, MKL's products depend on the place of both in memory."""
    chosen = small_parts(adapter, "sgd", "mean")
    task = random_task(classes, dim)
    method = Method.build(*chosen, task, seed=5)
    same_bits(method, random_data(task), message(method))


def same_bits(method: Method, data: Data, sent: Message) -> None:
    together = Stacked(method, data, 1)
    for step in STEPS:
        for i in ABLE:
            alone = Stacked(method, at_site(data, i), 1)
            (one,) = together.run(step, np.array([i]), sent, 1, 0)
            (other,) = alone.run(step, np.array([0]), arrived(sent), 1, 0)
            assert one.values.keys() == other.values.keys() and one.shared.keys() == other.shared.keys()
            for part, found in ((one.values, other.values), (one.shared, other.shared)):
                for name, value in part.items():
                    assert torch.equal(value.nan_to_num(), found[name].nan_to_num()), (step, i, name)


def test_what_is_read_lies_where_torch_puts_it(images, tmp_path):
    """Frames, saved states, private rows and parts of a pool."""
    odd = elsewhere(torch.arange(12.0).view(3, 4))
    assert aligned(odd).data_ptr() % ALIGNMENT == 0 and torch.equal(aligned(odd), odd)
    assert aligned(fresh := torch.ones(5)) is fresh
    shared = {f"p{k}": torch.ones(k) for k in range(1, 20)}
    for value in arrived(Message(shared)).shared.values():
        assert value.data_ptr() % ALIGNMENT == 0
    rows = Rows({f"r{k}": torch.ones(k) for k in range(1, 9)}, 3, tmp_path / "rows.bin")
    for value in rows.read(np.array([1]), 0).values():
        assert value.data_ptr() % ALIGNMENT == 0
    run = train_small(images, tmp_path / "run", "fedot", rounds=1)
    for part in run.load()[0]:
        assert all(v.data_ptr() % ALIGNMENT == 0 for v in part.values())
    data = Data(odd, torch.zeros(3, dtype=torch.long), np.array([[0, 1, 2, 3]]), np.array([0]))
    assert data.part(1, 3).data_ptr() % ALIGNMENT == 0
    assert all(x.data_ptr() % ALIGNMENT == 0 for x, *_ in data.blocks(2))
