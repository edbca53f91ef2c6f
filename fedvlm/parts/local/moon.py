"""MOON's client (Li et al., CVPR 2021): features are pulled towards those of the model that was sent, and away from those of
the client's own model of the last round.

loss + μ · mean over images of −log [e^{cos(z, z_g)/t} / (e^{cos(z, z_g)/t} + e^{cos(z, z_p)/t})]

with z, z_g, z_p an image's features by this model, the one that was sent and the one that the client trained last (in the
first round, the initial model); t = 0.5. The last model stays on the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter
from fedvlm.core.copies import COPY
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, by_autograd, optimise
from fedvlm.core.local import Local, Trained, anchor_of
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative, Positive
from fedvlm.core.state import Message, Params
from fedvlm.parts.local.means import Means

PREVIOUS = COPY + "previous."  # prefix of the model of the last round in a client's row


@dataclass(frozen=True)
class Moon(Local):
    contrast: NotNegative = 1.0  # μ, weight of the contrastive term; 0: FedAvg
    temperature: Positive = 0.5  # t, of the contrastive term

    effects: ClassVar[Mapping[str, str]] = {
        "nearer": "cosine of an image's features to the sent model's, less that to the last own model's; mean over steps"
    }

    def incompatible(self, adapter: Adapter) -> str:
        fits = adapter.alignment == "images"
        return "" if fits else "compares features of images, which this adapter does not change; use adapter=attention"

    def private_state(self, shared: Params) -> Params:
        return super().private_state(shared) | {PREVIOUS + k: v.clone() for k, v in shared.items()}

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        means = Means(data)
        loss = optimise(self, params, data, self.contrasted(model, message, own, means))
        return {"loss": loss} | means.found("nearer")

    def contrasted(self, model: Model, message: Message, own: Params, means: Means) -> Gradients:
        adapter, task, anchor = model.adapter, model.task, anchor_of(message)

        def features(now: Params, given: Params, batch: Batch) -> Tensor:
            fixed = now | {k: v[: len(batch.y)].expand_as(now[k]) for k, v in given.items()}
            with torch.no_grad():
                return adapter.logits_and_aligned(task, fixed, batch)[1]

        def loss(now: Params, batch: Batch) -> Tensor:
            logits, z = adapter.logits_and_aligned(task, now, batch)
            sent = F.cosine_similarity(z, features(now, anchor, batch), dim=-1)
            last = F.cosine_similarity(z, features(now, {k: own[PREVIOUS + k] for k in anchor}, batch), dim=-1)
            means.add(nearer=batch.mean(sent - last))
            term = batch.mean(F.softplus((last - sent) / self.temperature))
            return adapter.loss(self.objective, logits, batch) + self.contrast * term

        return by_autograd(loss)

    def train(self, model: Model, own: Params, message: Message, data: Data) -> Trained:
        trained = super().train(model, own, message, data)
        return trained._replace(own=trained.own | {PREVIOUS + k: v for k, v in trained.shared.items()})
