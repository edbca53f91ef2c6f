"""BGP, FFT-GP's client (Algorithm 2): a step on the task, then a step that also stays near the broadcast model's features.

w′ = w − η ∇L(batch 1);  w ← w′ − η ∇[L + λ·CORAL](w′; batch 2), first order and going on from w′, so: every second step
carries the alignment.  CORAL = mean((μ_x − μ_y)²) + mean((Cov_x − Cov_y)²) between the broadcast model's adapted image
features and the client's, on the same batch; class vectors where the features do not depend on what is trained (§3.4).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm.core import Batch, Message, Params
from fedvlm.local.base import Local, anchor_of
from fedvlm.local.descent import Gradients, by_autograd
from fedvlm.local.model import Model
from fedvlm.tasks import Objective


@dataclass(frozen=True)
class Bgp(Local):
    keep: bool = True  # the paper's personal models are the locally trained ones
    align: float = 1.0  # λ, the weight of the alignment
    phases: Literal["both", "task", "aligned"] = "both"  # ablations: never or always aligned

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        anchor = anchor_of(message)

        def loss(now: Params, batch: Batch) -> Tensor:
            near = {"both": bool(batch.step % 2), "task": False, "aligned": True}[self.phases]
            if near:
                return aligned(model, self.objective, now, anchor, batch, self.align)
            return model.loss(self.objective, now, batch)

        return by_autograd(loss)


def aligned(model: Model, objective: Objective, now: Params, anchor: Params, batch: Batch, strength: float) -> Tensor:
    """The loss + strength × CORAL between the features of this model and of the one that was sent, one number a client.
    Both see the batch as in training: a network's running statistics lag behind, and there the features would explode."""
    adapter, old = model.adapter, now | {k: v.expand_as(now[k]) for k, v in anchor.items() if k in now}
    logits, here = adapter.logits_and_aligned(model.task, now, batch)
    with torch.no_grad():
        _, there = adapter.logits_and_aligned(model.task, old, batch)
    weight = torch.full_like(here[..., 0], 1 / here.shape[1]) if adapter.alignment == "classes" else batch.weight
    return adapter.loss(objective, logits, batch) + strength * coral(here, there, weight)


def coral(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """One number a client; `weight` is 1/n on real rows and 0 on padding."""
    (mean_x, cov_x), (mean_y, cov_y) = moments(x, weight), moments(y, weight)
    return (mean_x - mean_y).square().mean(-1) + (cov_x - cov_y).square().mean((-2, -1))


def moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance (n − 1) over the real rows; the covariance of one row is 0."""
    mean = (x * weight[..., None]).sum(-2)
    count = (weight > 0).sum(-1)[:, None, None]
    centred = (x - mean[:, None]) * (weight > 0)[..., None]
    return mean, centred.mT @ centred / (count - 1).clamp(min=1)
