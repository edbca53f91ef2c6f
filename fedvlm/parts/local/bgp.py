"""BGP, FFT-GP's client (Algorithm 2): each local step is a plain update and an update that keeps features near the sent
model's.

w′ = w − η ∇L(batch 1);  w ← w′ − η ∇[L + λ·CORAL](w′; batch 2), first order and continuing from w′. FedAvg's number of
local steps, two updates each: twice its computation (§3.5). CORAL = mean((μ_x − μ_y)²) + mean((Cov_x − Cov_y)²) between
the adapted image features of the sent model and the client's, on the same batch; between class vectors where the features
do not depend on what is trained (§3.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, by_autograd, optimise
from fedvlm.core.local import Local, anchor_of
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative, default
from fedvlm.core.state import Message, Params
from fedvlm.core.tasks import Objective
from fedvlm.parts.local.means import relative_to_plain


@dataclass(frozen=True)
class Bgp(Local):
    keep: bool = True  # true: a client's personal model is the one it trained last (the paper's); false: the shared one
    align: NotNegative = 1.0  # λ, weight of the alignment (CORAL) in the loss; 0: none
    compared: Literal["raw", "normalised"] = "raw"  # features in CORAL: as the adapter gives them, or of length 1
    phases: Literal["both", "aligned"] = "both"  # both: every second update is aligned (the paper's); aligned: all are
    budget: Literal["double", "same"] = default("double", "effort")  # double: twice FedAvg's updates a round (paper's)

    effects: ClassVar[Mapping[str, str]] = {
        "aligned": "share of a client's updates that had the alignment term",
        "alignment": "length of the alignment's gradient, divided by that of the task's, in the last aligned update",
    }

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        settings = replace(self, epochs=2 * self.epochs) if self.budget == "double" else self
        updates = -(-data.counts("train") // self.batch) * settings.epochs
        # the count goes on from round to round: a client with a single update a round aligns it in every second round
        done = (data.round - 1) * updates
        plain, aligned = model.gradients(self.objective), self.aligned_gradients(model, message)
        last = updates - 1 if self.phases == "aligned" else updates - 1 - (done + updates) % 2
        ratio = torch.zeros(len(data), dtype=data.dtype, device=data.x.device)
        count = updates if self.phases == "aligned" else (done + updates) // 2 - done // 2

        def gradients(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
            n = len(batch.y)
            chosen = (done[:n] + batch.step) % 2 == 1 if self.phases == "both" else np.ones(n, bool)
            if not chosen.any():
                return plain(now, batch)
            each, found = aligned(now, batch)
            measured = last[:n] == batch.step
            if not chosen.all() or measured.any():
                loss, task = plain(now, batch)
                here = data.tensor(measured)
                ratio[:n] = torch.where(here, relative_to_plain(now, found, task).to(ratio.dtype), ratio[:n])
                who = data.tensor(chosen)
                each = torch.where(who, each, loss)
                found = [
                    torch.where(who.view(-1, *[1] * (f.dim() - 1)), f, t) for f, t in zip(found, task, strict=True)
                ]
            return each, found

        loss = optimise(settings, params, data, gradients)
        share = data.tensor(count / np.maximum(updates, 1)).to(data.dtype)
        return {"loss": loss, "aligned": share, "alignment": ratio}

    def aligned_gradients(self, model: Model, message: Message) -> Gradients:
        anchor = anchor_of(message)
        unit = self.compared == "normalised"
        return by_autograd(lambda now, batch: aligned_loss(model, self.objective, now, anchor, batch, self.align, unit))


def aligned_loss(
    model: Model, objective: Objective, now: Params, anchor: Params, batch: Batch, strength: float, unit: bool = False
) -> Tensor:
    """The loss + strength × CORAL between the features of this model and of the one that was sent, one number per client;
    with `unit`, between features of length 1.
    Both models use batch statistics: with a network's running statistics, which lag behind, features would explode."""
    adapter, sent = model.adapter, now | {k: v.expand_as(now[k]) for k, v in anchor.items() if k in now}
    logits, features = adapter.logits_and_aligned(model.task, now, batch)
    with torch.no_grad():
        _, sent_features = adapter.logits_and_aligned(model.task, sent, batch)
    if unit:
        features, sent_features = F.normalize(features, dim=-1), F.normalize(sent_features, dim=-1)
    classes = adapter.alignment == "classes"
    weight = torch.full_like(features[..., 0], 1 / features.shape[1]) if classes else batch.weight
    return adapter.loss(objective, logits, batch) + strength * coral(features, sent_features, weight)


def coral(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """CORAL between x and y [clients, rows, dim], one number per client; `weight` is 1/n on real rows, 0 on padding."""
    (mean_x, cov_x), (mean_y, cov_y) = mean_and_covariance(x, weight), mean_and_covariance(y, weight)
    return (mean_x - mean_y).square().mean(-1) + (cov_x - cov_y).square().mean((-2, -1))


def mean_and_covariance(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance (n − 1) over the real rows; the covariance of one row is 0."""
    mean = (x * weight[..., None]).sum(-2)
    count = (weight > 0).sum(-1)[:, None, None]
    centred = (x - mean[:, None]) * (weight > 0)[..., None]
    return mean, centred.mT @ centred / (count - 1).clamp(min=1)
