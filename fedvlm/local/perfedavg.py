"""PerFedAvg, first order (Fallah et al., 2020): learn a start from which one step adapts.

w′ = w − α ∇L(w; first half of the batch);  w ← w − η ∇L(w′; second half).  At test a client takes `steps` such inner
steps from the shared model on its own training data. A newcomer has no labels to adapt with and takes the shared model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core import Batch, Data, Message, Params
from fedvlm.local.base import Local
from fedvlm.local.descent import Gradients, gradient_step
from fedvlm.local.model import Model


@dataclass(frozen=True)
class PerFedAvg(Local):
    inner: float = 0.01  # α, the inner step
    steps: int = 1  # inner steps at test

    adapts: ClassVar[bool] = True

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        plain = super().gradients(model, message, own)
        return meta_gradients(plain, plain, self.inner)

    def adapt(self, model: Model, own: Params, shared: Params, data: Data) -> Params:
        params = {k: v.expand(len(data), *v.shape[1:]) for k, v in self.personal(own, shared).items()}
        plain = model.gradients(self.objective)
        if not params:
            return params
        whole = max(1, int(data.counts("train").max(initial=1)))  # all of a client's data is one batch, one step
        for batch in data.batches(whole, self.steps):
            now = {k: v[: len(batch.y)] for k, v in params.items()}
            _, found = plain(now, batch)
            moved = gradient_step(now, found, self.inner)
            params = {k: torch.cat([moved[k], v[len(batch.y) :]]) for k, v in params.items()}
        return params


def meta_gradients(first: Gradients, then: Gradients, inner: float) -> Gradients:
    """The slope `then` has on half of the batch, one step of `first` on the other half ahead."""

    def meta(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        one, other = halves(batch)
        _, found = first(now, one)
        return then(gradient_step(now, found, inner), other)

    return meta


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Even and odd examples; a client with one example uses it for both."""
    real = (batch.weight > 0).to(batch.weight.dtype)
    lane = torch.arange(batch.y.shape[1], device=batch.y.device)
    parts = []
    for odd in (0, 1):
        mine = real * (lane % 2 == odd)
        mine = torch.where(mine.sum(-1, keepdim=True) > 0, mine, real)
        parts.append(batch._replace(weight=mine / mine.sum(-1, keepdim=True)))
    return parts[0], parts[1]
