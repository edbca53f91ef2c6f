"""PromptSRC's aggregation over training (Khattak et al., ICCV 2023): after the last round the model is a mean over rounds.

w = Σ_t a_t w_t / Σ_t a_t with a_t = exp(−(t − μ)²/2σ²) and w_t the mean of the clients' replies in round t; clients go on
from w_t. Our reading: the paper's epochs are rounds here, and μ, σ shares of their number (μ = 15 and σ = 1 of 20 epochs).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedvlm.core.cohort import Cohort
from fedvlm.core.model import Model
from fedvlm.core.ranges import Positive, Share
from fedvlm.core.state import Params, State
from fedvlm.parts.merge.mean import Mean

MEAN = "trajectory."  # prefix of the mean over rounds so far, in the server's state
TOTAL = "trajectory"  # the logarithm of Σ a_t


@dataclass(frozen=True)
class Trajectory(Mean):
    middle: Share = 0.75  # μ, the round that counts most, as a share of all rounds
    spread: Positive = 0.05  # σ, how many rounds around it count, as a share of all rounds; large: all alike

    effects: ClassVar[Mapping[str, str]] = {"weight": "weight of this round in the mean over the rounds so far"}

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        after = super().round(model, state, cohort)
        log_weight = -((cohort.round / cohort.rounds - self.middle) ** 2) / (2 * self.spread**2)
        before = float(state.server[TOTAL]) if TOTAL in state.server else -math.inf
        total = log_sum(before, log_weight)
        share = math.exp(log_weight - total)
        mean: Params = {}
        for name, value in after.shared.items():
            old = state.server.get(MEAN + name, value)
            mean[name] = old + share * (value - old)
        cohort.acted(weight=share)
        kept = {MEAN + k: v for k, v in mean.items()} | {TOTAL: torch.tensor(total, dtype=torch.float64)}
        # a copy: a checkpoint refuses tensors that share memory
        shared = {k: v.clone() for k, v in mean.items()} if cohort.round >= cohort.rounds else after.shared
        return after._replace(shared=shared, server=after.server | kept)


def log_sum(a: float, b: float) -> float:
    """log(eᵃ + eᵇ), for exponents that would underflow."""
    most = max(a, b)
    return most + math.log(math.exp(a - most) + math.exp(b - most))
