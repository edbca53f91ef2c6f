"""BGP, FFT-GP's client (Algorithm 2): a step on the task, then a step that also stays near the broadcast model's features.

w′ = w − η ∇L(batch 1);  w ← w′ − η ∇[L + λ·CORAL](w′; batch 2), first order and going on from w′, so: every second step
carries the alignment.  CORAL = mean((μ_x − μ_y)²) + mean((Cov_x − Cov_y)²) between the broadcast model's adapted image
features and the client's, on the same batch; class vectors where the features do not depend on what is trained (§3.4).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm.core import Batch, Params
from fedvlm.local.descent import Slopes, by_autograd
from fedvlm.local.model import LOSSES, Model
from fedvlm.local.sgd import Sgd


@dataclass(frozen=True)
class Bgp(Sgd):
    keep: bool = True  # the paper's personal models are the locally trained ones
    align: float = 1.0  # λ, the weight of the alignment
    phases: Literal["both", "task", "aligned"] = "both"  # ablations: never or always aligned

    def slopes(self, model: Model, anchor: Params, own: Params) -> Slopes:
        def loss(now: Params, batch: Batch) -> Tensor:
            each = LOSSES[self.objective](model.logits(now, batch.x), batch)
            if not {"both": batch.step % 2, "task": False, "aligned": True}[self.phases]:
                return each
            return each + self.align * self.distance(model, now, anchor, batch)

        return by_autograd(loss)

    def distance(self, model: Model, now: Params, anchor: Params, batch: Batch) -> Tensor:
        old = now | {k: v.expand_as(now[k]) for k, v in anchor.items()}
        if model.adapter.aligns == "classes":
            here, there = (p["head"] for p in (now, old))
            weight = torch.full(here.shape[:2], 1 / here.shape[1], dtype=here.dtype)
        else:
            here = model.adapter.features(model.task, now, batch.x)
            with torch.no_grad():
                there = model.adapter.features(model.task, old, batch.x)
            weight = batch.weight
        return coral(here, there.detach(), weight)


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
