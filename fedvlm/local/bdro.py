"""BDRO, FOCoOp's client (Liao et al., ICML 2025, Algorithm 2): training at worst-case perturbations of shared prompts.

For the shared contexts, then for the outsiders': start at ε ~ N(0, σ) and take N ascent steps along
∇_ε [L(t + ε) − τ‖ε‖² − γ‖ε‖₁]. Then, with ε fixed, take one descent step on τ₂μ log mean exp(f/(τ₂μ)), where
f = (an example's loss at t + ε) − τ₁‖ε^g‖² − τ₂‖ε^o‖²: hard examples weigh more. τ₁, τ₂, μ are constants (Theorem 3.1).
The paper gives neither N, σ, the step size nor μ: ours are small. Any adapter can be trained this way; its shared
parameters are perturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.core import Batch, Data, Message, Params, is_running_statistic, select
from fedvlm.keys import NotNegative, Positive, Whole
from fedvlm.local.base import Local
from fedvlm.local.descent import Gradients, optimise
from fedvlm.local.model import Model
from fedvlm.seeds import generator

STRIDE = 7919  # noise is drawn once per round and client, and rolled by this much at each step


@dataclass(frozen=True)
class Bdro(Local):
    ascent_steps: Whole = 1  # N, ascent steps to find the worst-case perturbation; 0: random noise only
    ascent_rate: NotNegative = 0.01  # learning rate of the ascent steps
    sigma: NotNegative = 0.002  # σ of the noise that a perturbation starts from; a tenth of a context's initial σ
    penalty: NotNegative = 1.0  # τ₁, penalty on the squared size of a shared context's perturbation
    outsider_penalty: Positive = 1.0  # τ₂, penalty on the squared size of an outsider context's perturbation
    temperature: Positive = 1.0  # μ, weighting of examples: small values weigh only the hardest, large ones all equally
    l1: NotNegative = 0.0  # γ, L1 penalty on perturbations; 0: none

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        names = [k for k in message.shared if not is_running_statistic(k)]
        start = noise(select(params, names), data, self.sigma)
        return {"loss": optimise(self, params, data, self.robust_gradients(model, start))}

    def robust_gradients(self, model: Model, start: Params) -> Gradients:
        """The gradient of the robust loss; perturbations start from `start`."""
        groups = [
            ([k for k in start if k != "outsiders"], self.penalty),
            ([k for k in start if k == "outsiders"], self.outsider_penalty),
        ]

        def penalty(shift: Params, names: list[str], hold: float) -> Tensor | float:
            flat = [shift[k].flatten(1) for k in names]
            return sum(hold * v.square().sum(1) + self.l1 * v.abs().sum(1) for v in flat)

        @torch.enable_grad()
        def gradients(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
            shift: Params = {}  # ε
            for names, hold in groups:
                shift |= {k: start[k][: len(batch.y)].roll(batch.step * STRIDE, -1) for k in names}
                for _ in range(self.ascent_steps if names else 0):
                    shift |= {k: shift[k].detach().requires_grad_() for k in names}
                    perturbed = now | {k: now[k] + v for k, v in shift.items()}
                    gain = model.loss(self.objective, perturbed, batch) - penalty(shift, names, hold)
                    found = torch.autograd.grad(gain.sum(), [shift[k] for k in names])
                    shift |= {k: (shift[k] + self.ascent_rate * g).detach() for k, g in zip(names, found, strict=True)}
            leaves = {k: v.detach().requires_grad_() for k, v in now.items()}
            losses = model.losses(leaves | {k: leaves[k] + v for k, v in shift.items()}, batch)
            penalties = sum(penalty(shift, names, hold) for names, hold in groups)
            temperature = self.outsider_penalty * self.temperature  # τ₂μ
            value = temperature * (losses / temperature + batch.weight.log()).logsumexp(-1) - penalties
            return value.detach(), torch.autograd.grad(value.sum(), list(leaves.values()))

        return gradients


def noise(params: Params, data: Data, sigma: float) -> Params:
    """N(0, σ) of the parameters' shapes. Drawn by client id, so that it does not depend on which clients train together."""
    drawn = {}
    for place, (k, v) in enumerate(sorted(params.items())):
        rows = [
            torch.randn(v[0].numel(), generator=generator(data.seed, data.round, 59, place, int(i))) for i in data.ids
        ]
        drawn[k] = sigma * torch.stack(rows).to(v).view(v.shape) if rows else v
    return drawn
