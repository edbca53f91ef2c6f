"""An adapter on its task: logits, losses and their slopes, for a few clients side by side."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedvlm.adapters.base import Adapter, Task
from fedvlm.core import Batch, Params
from fedvlm.local.descent import Slopes, by_autograd
from fedvlm.tasks import Objective


@dataclass(frozen=True)
class Model:
    adapter: Adapter
    task: Task

    def logits(self, params: Params, x: Tensor) -> Tensor:
        return self.adapter.logits(self.task, params, x)

    def loss(self, objective: Objective, params: Params, batch: Batch) -> Tensor:
        """In training, one number a client."""
        return self.adapter.loss(objective, self.adapter.training(self.task, params, batch), batch)

    def losses(self, params: Params, batch: Batch) -> Tensor:
        """In training, one number an example."""
        return self.adapter.losses(self.adapter.training(self.task, params, batch), batch.y)

    def slopes(self, objective: Objective, held: Params | None = None) -> Slopes:
        """The loss and its slope in the parameters that are trained; those `held` beside them stay. By hand where the
        adapter knows its own transpose (under half the time of a small step, benchmarks/steps.py), by autograd otherwise."""

        def beside(now: Params, batch: Batch) -> Params:
            return now | {k: v[: len(batch.y)] for k, v in (held or {}).items()}

        def by_hand(now: Params, batch: Batch) -> tuple[Tensor, list[Tensor]]:
            params = beside(now, batch)
            each, residual = cross_entropy_slope(self.logits(params, batch.x), batch)
            found = self.adapter.transpose(self.task, params, batch.x, residual)
            return each, [found[k] for k in now]

        if objective == "cross-entropy" and self.adapter.transposes:
            return by_hand
        return by_autograd(lambda now, batch: self.loss(objective, beside(now, batch), batch))


def cross_entropy_slope(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss, and its slope in the logits: (softmax − one-hot) × weight."""
    y, total = batch.y[..., None], logits.logsumexp(-1, keepdim=True)
    loss = batch.mean((total - logits.gather(-1, y))[..., 0])
    weight = batch.weight[..., None]
    return loss, (logits - total).exp_().mul_(weight).scatter_add_(-1, y, -weight)
