"""BGP, FFT-GP's client (Algorithm 2): alternates plain steps with steps that keep features near the sent model's.

w′ = w − η ∇L(batch 1);  w ← w′ − η ∇[L + λ·CORAL](w′; batch 2), first order and continuing from w′: every second step
has the alignment term.  CORAL = mean((μ_x − μ_y)²) + mean((Cov_x − Cov_y)²) between the adapted image features of the
sent model and the client's, on the same batch; between class vectors where the features do not depend on what is
trained (§3.4).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm.core import Batch, Message, Params
from fedvlm.keys import NotNegative
from fedvlm.local.base import Local, anchor_of
from fedvlm.local.descent import Gradients, by_autograd
from fedvlm.local.model import Model
from fedvlm.tasks import Objective


@dataclass(frozen=True)
class Bgp(Local):
    keep: bool = True  # true: a client's personal model is the one it trained last (the paper's); false: the shared one
    align: NotNegative = 1.0  # λ, weight of the alignment (CORAL) in the loss; 0: none
    phases: Literal["both", "task", "aligned"] = "both"  # both: every second step is aligned; task: none; aligned: all

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        anchor = anchor_of(message)

        def loss(now: Params, batch: Batch) -> Tensor:
            aligned = {"both": bool(batch.step % 2), "task": False, "aligned": True}[self.phases]
            if aligned:
                return aligned_loss(model, self.objective, now, anchor, batch, self.align)
            return model.loss(self.objective, now, batch)

        return by_autograd(loss)


def aligned_loss(
    model: Model, objective: Objective, now: Params, anchor: Params, batch: Batch, strength: float
) -> Tensor:
    """The loss + strength × CORAL between the features of this model and of the one that was sent, one number per client.
    Both models use batch statistics: with a network's running statistics, which lag behind, features would explode."""
    adapter, sent = model.adapter, now | {k: v.expand_as(now[k]) for k, v in anchor.items() if k in now}
    logits, features = adapter.logits_and_aligned(model.task, now, batch)
    with torch.no_grad():
        _, sent_features = adapter.logits_and_aligned(model.task, sent, batch)
    classes = adapter.alignment == "classes"
    weight = torch.full_like(features[..., 0], 1 / features.shape[1]) if classes else batch.weight
    return adapter.loss(objective, logits, batch) + strength * coral(features, sent_features, weight)


def coral(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """CORAL between x and y [clients, rows, dim], one number per client; `weight` is 1/n on real rows, 0 on padding."""
    (mean_x, cov_x), (mean_y, cov_y) = moments(x, weight), moments(y, weight)
    return (mean_x - mean_y).square().mean(-1) + (cov_x - cov_y).square().mean((-2, -1))


def moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance (n − 1) over the real rows; the covariance of one row is 0."""
    mean = (x * weight[..., None]).sum(-2)
    count = (weight > 0).sum(-1)[:, None, None]
    centred = (x - mean[:, None]) * (weight > 0)[..., None]
    return mean, centred.mT @ centred / (count - 1).clamp(min=1)
