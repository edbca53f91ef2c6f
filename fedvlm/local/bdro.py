"""BDRO, FOCoOp's client (Liao et al., ICML 2025, Algorithm 2): training against the worst prompts near the shared ones.

Shared contexts, then outsiders': ε ~ N(0, σ) and N steps up ∇_ε [L(t + ε) − τ‖ε‖² − γ‖ε‖₁]; then, with ε held, one step
down τ₂μ log mean exp(f/(τ₂μ)), f an example's loss there − τ₁‖ε^g‖² − τ₂‖ε^o‖²: hard examples weigh more. τ₁, τ₂, μ are
constants (Theorem 3.1). The paper gives neither N, σ, the step nor μ: ours are small. Any adapter can be trained so; its
shared parameters are what is perturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.core import Batch, Data, FedvlmError, Message, Params, is_running_statistic, select
from fedvlm.local.base import Local
from fedvlm.local.descent import Gradients, optimise
from fedvlm.local.model import Model
from fedvlm.seeds import generator

STRIDE = 7919  # noise is drawn once a round and client, and shifted by so much each step


@dataclass(frozen=True)
class Bdro(Local):
    explore: int = 1  # N, steps up
    ascent: float = 0.01  # their length
    sigma: float = 0.002  # σ, of the noise they start from: a tenth of a context's own
    hold: float = 1.0  # τ₁, what distance costs a shared context
    hold_outsiders: float = 1.0  # τ₂, and an outsider's
    evenness: float = 1.0  # μ: small looks at the hardest examples only, large at their mean
    sparse: float = 0.0  # γ

    def __post_init__(self) -> None:
        if not (self.hold_outsiders > 0 and self.evenness > 0):
            raise FedvlmError(
                f"hold_outsiders={self.hold_outsiders:g} and evenness={self.evenness:g} must be above 0: both divide"
            )

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        names = [k for k in message.shared if not is_running_statistic(k)]
        return {
            "loss": optimise(self, params, data, self.robust(model, noise(select(params, names), data, self.sigma)))
        }

    def robust(self, model: Model, start: Params) -> Gradients:
        groups = [
            ([k for k in start if k != "outsiders"], self.hold),
            ([k for k in start if k == "outsiders"], self.hold_outsiders),
        ]

        def cost(away: Params, names: list[str], hold: float) -> Tensor | float:
            return sum(
                hold * away[k].flatten(1).square().sum(1) + self.sparse * away[k].flatten(1).abs().sum(1) for k in names
            )

        @torch.enable_grad()
        def gradients(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
            away: Params = {}
            for names, hold in groups:
                away |= {k: start[k][: len(batch.y)].roll(batch.step * STRIDE, -1) for k in names}
                for _ in range(self.explore if names else 0):
                    away |= {k: away[k].detach().requires_grad_() for k in names}
                    moved = now | {k: now[k] + v for k, v in away.items()}
                    gain = model.loss(self.objective, moved, batch) - cost(away, names, hold)
                    up = torch.autograd.grad(gain.sum(), [away[k] for k in names])
                    away |= {k: (away[k] + self.ascent * u).detach() for k, u in zip(names, up, strict=True)}
            leaves = {k: v.detach().requires_grad_() for k, v in now.items()}
            there = leaves | {k: leaves[k] + v for k, v in away.items()}
            each = model.losses(there, batch)
            apart = sum(cost(away, names, hold) for names, hold in groups)
            soft = self.hold_outsiders * self.evenness
            value = soft * (each / soft + batch.weight.log()).logsumexp(-1) - apart
            return value.detach(), torch.autograd.grad(value.sum(), list(leaves.values()))

        return gradients


def noise(params: Params, data: Data, sigma: float) -> Params:
    """N(0, σ) for each client by its id, the same whoever stands beside it."""
    drawn = {}
    for place, (k, v) in enumerate(sorted(params.items())):
        rows = [
            torch.randn(v[0].numel(), generator=generator(data.seed, data.round, 59, place, int(i))) for i in data.ids
        ]
        drawn[k] = sigma * torch.stack(rows).to(v).view(v.shape) if rows else v
    return drawn
