"""Numbers over clients, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import build, example

from fedvlm.core.cohort import Cohort
from fedvlm.engines.stacked import Stacked
from fedvlm.evaluation.views import fairness


def test_fairness_of_forty_clients():
    """0, 1/40, … 39/40: the worst tenth are the first four, and the variance of n equal steps of 1/n is (n² − 1)/12n²."""
    expected = {"worst": 1.5 / 40, "best": 37.5 / 40, "variance": (40**2 - 1) / (12 * 40**2)}
    assert fairness(np.arange(40)[::-1] / 40) == pytest.approx(expected, abs=1e-6)
    with_unknown = np.array([0.2, np.nan, 0.4])
    assert fairness(with_unknown) == pytest.approx({"worst": 0.2, "best": 0.4, "variance": 0.01})


def test_training_images_are_not_scored():
    """Other training images change no score, and sums over them are 0; other test images do."""
    method, data = build("head", "sgd", "mean"), example("head")[1]
    message = method.init(len(data)).message()

    def scores(x: torch.Tensor) -> dict[str, torch.Tensor]:
        engine = Stacked(method, replace(data, x=x), 2)
        return Cohort(engine, np.arange(len(data)), 0).ask("score", message).values

    before = scores(data.x)
    for split, low, high in (("train", 0, 1), ("test", 2, 3)):
        x = data.x.clone()
        for bounds in data.bounds:
            x[bounds[low] : bounds[high]] *= -1
        same = torch.equal(scores(x)["shared.loss"], before["shared.loss"])
        assert same == (split == "train")
    assert not before["shared.loss"][:, 0].any() and before["shared.loss"][:, 1:].any()
