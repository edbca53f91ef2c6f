"""An adapter together with its task: logits, losses and their gradients, for several clients at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from fedvlm.core.adapter import Adapter, HasGradient, Task
from fedvlm.core.data import Batch
from fedvlm.core.descent import Gradients, by_autograd
from fedvlm.core.state import Params
from fedvlm.core.tasks import Objective


@dataclass(frozen=True)
class Model:
    """An adapter with its task: what metrics, local rules and merges need to compute logits and gradients."""

    adapter: Adapter
    task: Task

    def logits(self, params: Params, x: Tensor) -> Tensor:
        return self.adapter.logits(self.task, params, x)

    def loss(self, objective: Objective, params: Params, batch: Batch) -> Tensor:
        """The loss that training minimises, one number per client."""
        return self.adapter.loss(objective, self.adapter.train_logits(self.task, params, batch), batch)

    def losses(self, params: Params, batch: Batch) -> Tensor:
        """The loss that training minimises, one number per example."""
        return self.adapter.losses(self.adapter.train_logits(self.task, params, batch), batch.y)

    def gradients(self, objective: Objective, held: Params | None = None) -> Gradients:
        """The loss and its gradient in the trained parameters; `held` parameters stay fixed. In closed form where the
        adapter has one (a small step then takes under half the time, benchmarks/steps.py), by autograd otherwise."""

        def complete(now: Params, batch: Batch) -> Params:
            return now | {k: v[: len(batch.y)] for k, v in (held or {}).items()}

        if objective == "cross-entropy" and has_own_gradient(type(self.adapter)):
            gradient = cast(HasGradient, self.adapter).gradient

            def closed_form(now: Params, batch: Batch) -> tuple[Tensor, list[Tensor]]:
                params = complete(now, batch)
                each, residual = cross_entropy_gradient(self.logits(params, batch.x), batch)
                found = gradient(self.task, params, batch.x, residual)
                return each, [found[k] for k in now]

            return closed_form
        return by_autograd(lambda now, batch: self.loss(objective, complete(now, batch), batch))


def has_own_gradient(adapter: type[Adapter]) -> bool:
    """Whether `gradient` is that of the adapter's loss: an adapter that inherits it but changes its logits or its loss
    uses autograd."""
    for kind in adapter.__mro__:
        if vars(kind).keys() & {"gradient", "logits", "train_logits", "loss"}:
            return "gradient" in vars(kind)
    return False


def cross_entropy_gradient(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient in the logits: (softmax − one-hot) × weight."""
    y, total = batch.y[..., None], logits.logsumexp(-1, keepdim=True)
    loss = batch.mean((total - logits.gather(-1, y))[..., 0])
    weight = batch.weight[..., None]
    return loss, (logits - total).exp_().mul_(weight).scatter_add_(-1, y, -weight)
