"""The small CNN of the contest between simulators: clients side by side are plain PyTorch, one client at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import message
from torch import nn

from fedvlm.config.config import resolve
from fedvlm.core.adapter import Task
from fedvlm.core.data import Data
from fedvlm.engines.stacked import Stacked
from fedvlm.parts.adapters import cnn
from fedvlm.parts.adapters.cnn import Cnn
from fedvlm.parts.adapters.network import pixels_to_float
from fedvlm.parts.local.sgd import Sgd
from fedvlm.parts.merge.mean import Mean
from fedvlm.rounds.method import Method

TASK = Task(("a", "b", "c"), None, 0, 1.0)


def plain(params: dict[str, torch.Tensor], width: int) -> nn.Sequential:
    """pfl-research's layers in their order, without dropout."""
    model = nn.Sequential(
        nn.Conv2d(3, width, 3),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 14 * 14, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, 3),
    )
    model.load_state_dict(dict(zip(model.state_dict(), params.values(), strict=True)))
    return model


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, 3, 32, 32), generator=draw, dtype=torch.uint8)
    return x, torch.randint(3, (count,), generator=draw)


@pytest.mark.parametrize("by_products", [False, True])
def test_clients_side_by_side_are_plain_pytorch(double, monkeypatch, by_products):
    """A round of training, ragged clients included, in float64."""
    if by_products:  # what a GPU uses
        monkeypatch.setattr(cnn, "by_groups", cnn.by_products)
    x, y = images(16)
    data = Data(x, y, np.array([[0, 7, 7, 7], [7, 12, 12, 12], [12, 16, 16, 16]]), np.arange(3), seed=3, round=1)
    method = Method.build(Cnn(width=2), Sgd(lr=0.1, batch=3), Mean(), TASK, 5)
    (reply,) = Stacked(method, data, chunk=3).run("train", np.arange(3), message(method), 1, 0)
    for place, client in enumerate(reply.ids.tolist()):
        model = plain(message(method).shared, 2)
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        alone = Data(x, y, data.bounds[[client]], data.ids[[client]], seed=3, round=1)
        for batch in alone.batches(3):
            real = batch.weight[0] > 0
            loss = nn.functional.cross_entropy(model(pixels_to_float(batch.x[0][real], "imagenet")), batch.y[0][real])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        for found, expected in zip(reply.shared.values(), model.state_dict().values(), strict=True):
            assert torch.allclose(found[place], expected, rtol=0, atol=1e-12)


def test_parameters_of_one_client_or_of_all_broadcast(double):
    """As in an evaluation: shared examples, shared layers, own layers."""
    x, _ = images(4)
    own = [Cnn(width=2).init(TASK, seed) for seed in (1, 2)]
    both = {k: torch.stack([o[k] for o in own]) for k in own[0]}
    alone = [Cnn(width=2).logits(TASK, {k: v[None] for k, v in o.items()}, x[None])[0] for o in own]
    assert torch.allclose(Cnn(width=2).logits(TASK, both, x[None]), torch.stack(alone), atol=1e-12)
    mixed = both | {"conv1.weight": both["conv1.weight"][:1], "fc2.bias": both["fc2.bias"][:1]}
    assert torch.allclose(Cnn(width=2).logits(TASK, mixed, x[None])[0], alone[0], atol=1e-12)


def test_half_precision_is_near():
    x, _ = images(4)
    params = {k: v[None] for k, v in Cnn(width=4).init(TASK, 1).items()}
    full, half = (Cnn(width=4, precision=p).logits(TASK, params, x[None]) for p in ("full", "half"))
    assert half.dtype == torch.float32 and not torch.equal(full, half) and torch.allclose(full, half, atol=0.05)


def test_the_cnn_is_a_preset_of_the_published_size():
    setup = resolve("fedavg", {"on": "cnn"})
    assert setup.config.backbone == "pixels:32" and setup.parts["adapter"].name == "cnn"
    params = Cnn().init(Task(tuple("abcdefghij"), None, 0, 1.0), 0)
    assert sum(v.numel() for v in params.values()) == 1_626_442
    assert (setup.local.lr, setup.local.batch, setup.local.epochs) == (0.1, 10, 1)
