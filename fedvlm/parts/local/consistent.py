"""PromptSRC's client (Khattak et al., ICCV 2023): features and predictions stay near those of the frozen model.

loss + λ_f |f − f₀| + λ_g |g − g₀| + λ_p KL(p₀ ‖ p) with image features f, class features g and predictions p, and f₀, g₀, p₀
the frozen model's; λ_f = 10, λ_g = 25, λ_p = 1. As in the public code |·| is the mean over a feature's numbers, and KL is
divided by the number of classes. g₀ is the mean over several phrases per class with template=clip (the paper: 60).
Where only text is learned f = f₀. PromptSRC's mean over the course of training is merge=trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter, class_vectors
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, by_autograd
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative
from fedvlm.core.state import Message, Params
from fedvlm.parts.adapters.layered import Layered, towers_of
from fedvlm.parts.adapters.prompt import Prompt
from fedvlm.parts.local.term import PULL, fit_with_term


@dataclass(frozen=True)
class Consistent(Local):
    image_weight: NotNegative = 10.0  # λ_f, weight of the difference from the frozen image features; 0: none
    text_weight: NotNegative = 25.0  # λ_g, weight of the difference from the frozen class features; 0: none
    logit_weight: NotNegative = 1.0  # λ_p, weight of the divergence from the frozen predictions; 0: none

    effects: ClassVar[Mapping[str, str]] = PULL

    def incompatible(self, adapter: Adapter) -> str:
        kind = type(adapter)
        plain = kind.logits in (Prompt.logits, Layered.logits) and kind.loss is Adapter.loss
        return "" if plain else "compares features with the frozen model's towers; use adapter=independent or prompt"

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        adapter, task = model.adapter, model.task
        names = task.names()

        def loss(now: Params, batch: Batch) -> Tensor:
            text = class_vectors(adapter, task, now)
            features = adapter.features(task, now, batch.x)
            logits = task.scale * features @ text.mT
            with torch.no_grad():
                frozen = frozen_features(model, features, batch.x)
                frozen_p = (task.scale * frozen @ names.to(frozen).mT).log_softmax(-1)
            image = batch.mean((features - frozen).abs().mean(-1))
            classes = (text - names).abs().mean((-2, -1))
            divergence = batch.mean((frozen_p.exp() * (frozen_p - logits.log_softmax(-1))).mean(-1))
            terms = self.image_weight * image + self.text_weight * classes + self.logit_weight * divergence
            return adapter.loss(self.objective, logits, batch) + terms

        return by_autograd(loss)

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        return fit_with_term(self, model, params, data, self.gradients(model, message, own))


def frozen_features(model: Model, features: Tensor, x: Tensor) -> Tensor:
    """The frozen model's image features; the learned ones where only text is learned."""
    adapter = model.adapter
    if not isinstance(adapter, Layered):
        return features.detach()
    tower = towers_of(model.task, adapter.precision).image.last(adapter.layers)
    return F.normalize(tower.features(x).to(features.dtype), dim=-1)
