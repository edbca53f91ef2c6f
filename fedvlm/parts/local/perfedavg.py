"""PerFedAvg, first order (Fallah et al., 2020): trains a model that adapts to a client in one gradient step.

w′ = w − α ∇L(w; first half of the batch);  w ← w − η ∇L(w′; second half).  At test time a client takes `steps` such
inner steps from the shared model on its own training data; with keep=true its personal model is the one it trained last,
as with other rules. A newcomer has no labels to adapt with and uses the shared model.
The inner step is a plain gradient step with any optimiser. Adam divides a gradient by its size and its learning rates are
small, so that an inner step with the same rate may do little: the effects tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, gradient_step, optimise
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.ranges import Count, NotNegative
from fedvlm.core.state import Message, Params
from fedvlm.parts.local.means import relative_to_plain

META_EFFECTS = {
    "inner_step": "length of the inner step, divided by that of the parameters, in the first batch",
    "gradient_change": "how far the inner step changes the gradient, relative to its length, in the first batch",
}


@dataclass(frozen=True)
class PerFedAvg(Local):
    inner: NotNegative = 0.0  # α, learning rate of the inner step; 0: that of lr=
    steps: Count = 1  # inner steps at test time, 1 or more

    adapts: ClassVar[bool] = True
    effects: ClassVar[Mapping[str, str]] = META_EFFECTS

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        acted: Params = {}
        plain = self.gradients(model, message, own)
        loss = optimise(self, params, data, meta_gradients(plain, plain, self.inner or self.rate(data), acted))
        return {"loss": loss} | for_every_client(acted, data)

    def adapt(self, model: Model, own: Params, shared: Params, data: Data) -> Params:
        params = {k: v.expand(len(data), *v.shape[1:]) for k, v in self.personal(own, shared).items()}
        plain, rate = model.gradients(self.objective), self.inner or self.rate(data)
        if not params or self.keep:
            return params
        size = max(1, int(data.counts("train").max(initial=1)))  # one batch holds all of a client's data
        for batch in data.batches(size, self.steps):
            now = {k: v[: len(batch.y)] for k, v in params.items()}
            stepped = gradient_step(now, plain(now, batch)[1], rate)
            params = {k: torch.cat([stepped[k], v[len(batch.y) :]]) for k, v in params.items()}
        return params


def meta_gradients(inner: Gradients, outer: Gradients, rate: float, acted: Params) -> Gradients:
    """The gradient `outer` on one half of the batch, at the parameters after a step along `inner` on the other half. What
    the step does in the first batch is written to `acted`."""

    def meta(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        first, second = split_batch(batch)
        moved = gradient_step(now, inner(now, first)[1], rate)
        each, found = outer(moved, second)
        if batch.step == 0:
            acted["inner_step"] = relative_to_plain(now, list(moved.values()), list(now.values()))
            acted["gradient_change"] = relative_to_plain(now, found, outer(now, second)[1])
        return each, found

    return meta


def for_every_client(acted: Params, data: Data) -> Params:
    """Fill in every client; 0 for one that took no step."""
    found = {k: torch.zeros(len(data), dtype=data.dtype, device=data.x.device) for k in META_EFFECTS}
    for name, value in acted.items():
        found[name][: len(value)] = value
    return found


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
