"""PerFedAvg, first order (Fallah et al., 2020): trains a model that adapts to a client in one gradient step.

w′ = w − α ∇L(w; first half of the batch);  w ← w − η ∇L(w′; second half).  At test time a client takes `steps` such
inner steps from the shared model on its own training data. A newcomer has no labels to adapt with and uses the shared
model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core import Batch, Data, Message, Params
from fedvlm.keys import Count, NotNegative
from fedvlm.local.base import Local
from fedvlm.local.descent import Gradients, gradient_step
from fedvlm.local.model import Model


@dataclass(frozen=True)
class PerFedAvg(Local):
    inner: NotNegative = 0.01  # α, learning rate of the inner step
    steps: Count = 1  # inner steps at test time, 1 or more

    adapts: ClassVar[bool] = True

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        plain = super().gradients(model, message, own)
        return meta_gradients(plain, plain, self.inner)

    def adapt(self, model: Model, own: Params, shared: Params, data: Data) -> Params:
        params = {k: v.expand(len(data), *v.shape[1:]) for k, v in self.personal(own, shared).items()}
        plain = model.gradients(self.objective)
        if not params:
            return params
        size = max(1, int(data.counts("train").max(initial=1)))  # one batch holds all of a client's data
        for batch in data.batches(size, self.steps):
            now = {k: v[: len(batch.y)] for k, v in params.items()}
            _, found = plain(now, batch)
            stepped = gradient_step(now, found, self.inner)
            params = {k: torch.cat([stepped[k], v[len(batch.y) :]]) for k, v in params.items()}
        return params


def meta_gradients(inner: Gradients, outer: Gradients, rate: float) -> Gradients:
    """The gradient `outer` on one half of the batch, at the parameters after a step of `inner` on the other half."""

    def meta(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        first, second = split_batch(batch)
        _, found = inner(now, first)
        return outer(gradient_step(now, found, rate), second)

    return meta


def split_batch(batch: Batch) -> tuple[Batch, Batch]:
    """Even and odd examples; a client with one example uses it for both."""
    real = (batch.weight > 0).to(batch.weight.dtype)
    position = torch.arange(batch.y.shape[1], device=batch.y.device)
    parts = []
    for odd in (0, 1):
        chosen = real * (position % 2 == odd)
        chosen = torch.where(chosen.sum(-1, keepdim=True) > 0, chosen, real)
        parts.append(batch._replace(weight=chosen / chosen.sum(-1, keepdim=True)))
    return parts[0], parts[1]
