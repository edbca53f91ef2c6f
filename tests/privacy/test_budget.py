"""What a budget is of where it is not given: δ, and how the noise is shared between the update and the count."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedvlm.config.config import resolve
from fedvlm.core.data import Data
from fedvlm.privacy.mechanism import Privacy
from fedvlm.training.privacy_plan import planned

pytest.importorskip("dp_accounting")


@pytest.mark.parametrize(("level", "n"), [("client", 3), ("example", 10)])
def test_delta_is_of_the_clients_or_of_the_examples_of_the_smallest(level, n):
    bounds = np.array([[0, 40, 40, 40], [40, 50, 50, 50], [50, 70, 70, 70]])
    data = Data(torch.zeros(70, 4), torch.zeros(70, dtype=torch.long), bounds, np.arange(3))
    federation = SimpleNamespace(seen=np.arange(3), data=data)
    setup = resolve("fedavg", {"dp": level, "noise_multiplier": 1.0, "rounds": 1})
    assert planned(setup, federation).account.delta == pytest.approx(n**-1.1)


@pytest.mark.parametrize(("cohort", "noise", "of_count"), [(100, 1.0, 5.0), (100, 8.0, 8.0), (4, 1.0, 1.0)])
def test_update_and_count_together_have_the_noise_of_one_sum(cohort, noise, of_count):
    """Andrew et al. (2021), Theorem 1: 1/z² = 1/z_Δ² + 1/(2 σ_b)², with σ_b a twentieth of the cohort or z."""
    privacy = Privacy("client", noise, 1.0, cohort, quantile=0.5)
    assert privacy.count_noise == pytest.approx(of_count)
    assert privacy.update_noise**-2 + (2 * of_count) ** -2 == pytest.approx(noise**-2)
    assert Privacy("client", noise, 1.0, cohort).update_noise == noise
