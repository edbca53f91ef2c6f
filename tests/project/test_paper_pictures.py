"""Pictures of trained models (benchmarks/papers/models.py), and the questions that `reproduce.py` asks finished runs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import small_setup
from papers import models, similarity, surface, tsne, weights
from torch.nn import functional as F

from fedvlm.data.corruptions import FURTHER, KINDS, NAMES, corrupt
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.predict.finished import Finished
from fedvlm.training import train
from fedvlm.training.planned_run import PlannedRun


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory):
    """A linear classifier of two clients and a held-out one."""
    setup = small_setup(images, "fedavg", keep=True)
    pool = Pools().load(setup)
    run = train.train(PlannedRun(setup, pool, tmp_path_factory.mktemp("runs") / "head"))
    return Finished.of(run, setup, pool)


def accuracy_loss(model, shared, client: int, split: slice) -> float:
    data = model.federation.data
    low, high = data.bounds[client, split]
    logits = model.method.task.scale * data.x[low:high] @ shared["head"].T
    return float(F.cross_entropy(logits, data.y[low:high]))


def test_the_loss_surface_has_the_models_losses(trained):
    at, losses, places = surface.surface(trained, points=5)
    assert losses.shape == (5, 5) and places.shape == (2, 2) and np.abs(places).max() * 1.3 == pytest.approx(at[-1])
    (held,) = trained.federation.unseen
    assert losses[2, 2] == pytest.approx(accuracy_loss(trained, trained.state.shared, held, slice(2, 4)), abs=1e-5)
    axes, where = surface.plane(trained)
    centre = models.one_row(trained.state.shared)
    own = models.flat(models.client_models(trained))
    torch.testing.assert_close(centre + where @ axes, own)  # two clients and their mean lie in one plane
    torch.testing.assert_close(axes @ axes.T, torch.eye(2, dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_gap_follows_the_weight(trained):
    even = np.array([0.5, 0.3, 0.2])
    for change in weights.CHANGES:
        new = weights.moved(even, 1, change)
        assert new.sum() == pytest.approx(1) and new[1] == pytest.approx(0.3 + change)
        assert new[0] / new[2] == pytest.approx(2.5)
    found = weights.gaps(trained)
    own = models.client_models(trained)
    client = models.trained(trained)[0]
    share = 0.5 + weights.CHANGES[-1]
    mixed, mean = ({k: a * v[0] + (1 - a) * v[1] for k, v in own.items()} for a in (share, 0.5))
    expected = accuracy_loss(trained, mixed, client, slice(1, 3)) - accuracy_loss(trained, mean, client, slice(1, 3))
    assert found[trained.federation.names[client]][-1] == pytest.approx(expected, abs=1e-5)


def test_similarities_are_mean_cosines(trained):
    found = similarity.similarities(trained)
    data, head = trained.federation.data, F.normalize(trained.state.shared["head"], dim=-1)
    test = np.concatenate([np.arange(low, high) for low, high in data.bounds[:, 2:]])
    for c in range(len(found)):
        rows = test[data.y[test].numpy() == c]
        expected = (data.x[rows] @ head.T).mean(0).numpy()
        np.testing.assert_allclose(found[c], expected, atol=1e-5)


def test_every_picture_is_drawn(trained, images, tmp_path):
    pytest.importorskip("sklearn")
    places, unseen = tsne.embedding(trained, most=8)
    assert places.shape == (len(unseen), 2) and 0 < unseen.sum() <= 8 and np.isfinite(places).all()
    for kind in (similarity, surface, tsne, weights):
        picture = models.draw(kind.panel, [models.Named("one", trained), models.Named("two", trained)])
        assert [ax.get_title(loc="left") for ax in picture.axes[:2]] == ["one", "two"]
    alone = small_setup(images, "fedavg", keep=False)
    pool = Pools().load(alone)
    plain = Finished.of(train.train(PlannedRun(alone, pool, tmp_path / "plain")), alone, pool)
    with pytest.raises(FedvlmError, match="needs each client's own model"):
        surface.surface(plain)


@pytest.mark.parametrize("kind", FURTHER)
def test_further_corruptions(kind):
    from PIL import Image

    assert (*KINDS, *FURTHER) == NAMES and len(KINDS) == 15  # corrupt=N is of these 15
    pixels = np.random.default_rng(3).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((224, 224), Image.Resampling.BICUBIC)
    changed = [np.asarray(corrupt(image, kind, severity, 5), dtype=float) for severity in range(1, 6)]
    distance = [np.square(x - np.asarray(image, dtype=float)).mean() for x in changed]
    assert distance[0] > 1 and all(a < b for a, b in pairwise(distance)), distance
    np.testing.assert_array_equal(changed[0], np.asarray(corrupt(image, kind, 1, 5), dtype=float))
