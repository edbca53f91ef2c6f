"""Numbers over clients, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedvlm.evaluation.views import fairness


def test_fairness_of_forty_clients():
    """0, 1/40, … 39/40: the worst tenth are the first four, and the variance of n equal steps of 1/n is (n² − 1)/12n²."""
    expected = {"worst": 1.5 / 40, "best": 37.5 / 40, "variance": (40**2 - 1) / (12 * 40**2)}
    assert fairness(np.arange(40)[::-1] / 40) == pytest.approx(expected, abs=1e-6)
    with_unknown = np.array([0.2, np.nan, 0.4])
    assert fairness(with_unknown) == pytest.approx({"worst": 0.2, "best": 0.4, "variance": 0.01})
