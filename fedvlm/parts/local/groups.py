"""FedMGP's client (Bo et al., NeurIPS 2025): prompt groups that differ, of which those like the shared ones are sent.

Training adds λ · (mean cosine between two groups' class features + the same of their image features). Afterwards the
client draws s of its G groups without replacement, group g in proportion to exp(cos(g, shared groups as received)/τ), and
sends them; the others are its private groups until a later round sends them. In the next round the mean over clients takes
the place of those sent. So **any group may be sent in the end**; at any time G − s stay private.

Our reading: λ = 1, τ = 1; the cosine is the mean over the shared groups, and over text and image prompts; a shared group
that is sent again keeps its place in the mean, and a private one takes the place of a shared one that is not sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, by_autograd, optimise
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative, Positive
from fedvlm.core.seeds import generator
from fedvlm.core.state import Message, Params
from fedvlm.parts.adapters.several import mean_cosine

DRAW = 101  # the purpose of the draw among groups


@runtime_checkable
class HasGroups(Protocol):
    """It has groups of prompts, shared and private ones of the same kind."""

    exchangeable: ClassVar[tuple[tuple[str, str], ...]]  # names of a shared parameter [s, …] and its private [G − s, …]

    def texts(self, task: Task, params: Params) -> Tensor: ...

    def images(self, task: Task, params: Params, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class GroupSampling(Local):
    diversity: NotNegative = 1.0  # λ, weight of the groups' mean cosine in the loss; 0: none
    temperature: Positive = 1.0  # τ, of the choice of groups to send; large: any, small: the most similar to the shared

    effects: ClassVar[Mapping[str, str]] = {
        "exchanged": "share of the groups sent that were private before the round",
        "group_cosine": "mean cosine between the class features of two groups, after training",
    }

    def incompatible(self, adapter: Adapter) -> str:
        return "" if isinstance(adapter, HasGroups) else "chooses among groups of prompts; use adapter=groups"

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        adapter, task = model.adapter, model.task
        assert isinstance(adapter, HasGroups)  # see `incompatible`

        def loss(now: Params, batch: Batch) -> Tensor:
            texts, images = adapter.texts(task, now), adapter.images(task, now, batch.x)
            logits = task.scale * (images @ texts.mT).mean(1)
            real = images * (batch.weight > 0)[:, None, :, None]
            share = batch.weight.shape[1] / (batch.weight > 0).sum(1)
            term = mean_cosine(texts) + masked_cosine(real, share)
            return model.adapter.loss(self.objective, logits, batch) + self.diversity * term

        return by_autograd(loss)

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        adapter = model.adapter
        assert isinstance(adapter, HasGroups)
        loss = optimise(self, params, data, self.gradients(model, message, own))
        cosine = mean_cosine(adapter.texts(model.task, params)).to(data.dtype)
        count = len(next(iter(message.shared.values())))
        order = self.order(adapter, params, message, data)
        for pair in adapter.exchangeable:
            every = torch.cat([params[k] for k in pair], 1)
            moved = every.gather(1, order.view(*order.shape, *[1] * (every.dim() - 2)).expand_as(every))
            for name, part in zip(pair, moved.split([count, every.shape[1] - count], 1), strict=True):
                params[name].copy_(part)
        exchanged = (order[:, :count] >= count).to(data.dtype).mean(1)
        return {"loss": loss, "exchanged": exchanged, "group_cosine": cosine}

    def order(self, adapter: HasGroups, params: Params, message: Message, data: Data) -> Tensor:
        """The groups by number, those to be sent first: [clients, G]."""
        similar = torch.stack([similarity(params, message.shared, *pair) for pair in adapter.exchangeable]).mean(0)
        count = len(message.shared[adapter.exchangeable[0][0]])
        drawn = similar / self.temperature + gumbel(data, similar.shape[1]).to(similar)
        sent = torch.zeros_like(similar, dtype=torch.bool).scatter(1, drawn.topk(count).indices, True)
        order = torch.arange(similar.shape[1], device=similar.device).repeat(len(similar), 1)
        for row, chosen in zip(order, sent, strict=True):
            left, joined = (~chosen[:count]).nonzero()[:, 0], count + chosen[count:].nonzero()[:, 0]
            row[left], row[joined] = joined, left
        return order


def similarity(params: Params, received: Params, shared: str, own: str) -> Tensor:
    """The mean cosine of each group to the shared groups as received, [clients, G]."""
    every = F.normalize(torch.cat([params[shared], params[own]], 1).flatten(2), dim=-1)
    return (every @ F.normalize(received[shared].flatten(1), dim=-1).mT).mean(-1)


def masked_cosine(images: Tensor, share: Tensor) -> Tensor:
    """mean_cosine of features [clients, G, examples, dim] in which padding is 0; `share` is examples / real examples."""
    count = images.shape[1]
    total = images.sum(1).square().sum(-1).mean(-1) * share
    return (total - count) / (count * (count - 1))


def gumbel(data: Data, groups: int) -> Tensor:
    """Noise [clients, groups]: the largest s of log p + noise are a draw of s without replacement in proportion to p."""
    each = [torch.rand(groups, generator=generator(data.seed, DRAW, data.round, i)) for i in data.ids.tolist()]
    return -(-torch.stack(each).double().clamp(min=1e-12).log()).log()
