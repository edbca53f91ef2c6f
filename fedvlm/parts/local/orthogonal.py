"""ProDA's semantic orthogonality (Lu et al., CVPR 2022): a term that keeps prompts from saying the same.

loss + λ · mean over pairs of prompts |cos(u_i, u_j)|, with u the features of the prompts without a class name; λ = 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, by_autograd, optimise
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative
from fedvlm.core.state import Message, Params
from fedvlm.parts.local.means import Means


@runtime_checkable
class HasNamelessPrompts(Protocol):
    """It has several prompts, which can be encoded without a class name."""

    def nameless(self, task: Task, params: Params) -> Tensor:
        """[clients, prompts, dim]."""
        ...


@dataclass(frozen=True)
class Orthogonal(Local):
    orthogonality: NotNegative = 0.1  # λ, weight of the prompts' mean |cosine| in the loss; 0: none

    effects: ClassVar[Mapping[str, str]] = {"overlap": "mean |cosine| between prompts without a class name"}

    def incompatible(self, adapter: Adapter) -> str:
        return "" if isinstance(adapter, HasNamelessPrompts) else "compares several prompts; use adapter=proda"

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        def loss(now: Params, batch: Batch) -> Tensor:
            term = overlap(model, now) if self.orthogonality else 0.0
            return model.loss(self.objective, now, batch) + self.orthogonality * term

        return by_autograd(loss)

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        means, plain = Means(data), self.gradients(model, message, own)

        def gradients(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
            if batch.step == 0:
                means.add(overlap=overlap(model, now))
            return plain(now, batch)

        return {"loss": optimise(self, params, data, gradients), **means.found("overlap")}


def overlap(model: Model, now: Params) -> Tensor:
    """The mean |cosine| over pairs of prompts, one number per client; 0 where there is one prompt."""
    assert isinstance(model.adapter, HasNamelessPrompts)  # see `incompatible`
    prompts = model.adapter.nameless(model.task, now)
    count = prompts.shape[1]
    pairs = torch.tril((prompts @ prompts.mT).abs(), diagonal=-1).sum((-2, -1))
    return pairs * 2 / max(1, count * (count - 1))
