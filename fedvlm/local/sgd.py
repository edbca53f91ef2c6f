"""Plain local training, FedAvg's client (McMahan et al., 2017): down comes the shared model, up goes the trained one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvlm.adapters.base import Adapter, Task
from fedvlm.core import Batch, Data, Params, lift, only, spread
from fedvlm.local.descent import Pace, descend


@dataclass(frozen=True)
class Model:
    """An adapter on its task."""

    adapter: Adapter
    task: Task

    def logits(self, params: Params, x: Tensor) -> Tensor:
        return self.adapter.logits(self.task, params, x)


@dataclass(frozen=True)
class Sgd(Pace):
    objective: Literal["cross-entropy", "contrastive"] = "cross-entropy"

    sends: ClassVar[tuple[str, ...]] = ("n", "loss")  # what goes up beside the shared parameters: one number each

    def rows(self, shared: Params) -> Params:
        """What this rule keeps on a client beside the adapter's private names: the newcomer's row."""
        return {}

    def loss(self, model: Model, params: Params, batch: Batch, anchor: Params) -> Tensor:
        logits = model.logits(params, batch.x)
        return cross_entropy(logits, batch) if self.objective == "cross-entropy" else contrastive(logits, batch)

    def train(self, model: Model, own: Params, down: Params, data: Data) -> tuple[Params, Params]:
        params, anchor = spread(down, len(data)) | own, lift(down)
        loss = descend(self, params, data, lambda now, batch: self.loss(model, now, batch, anchor))
        return only(params, own), only(params, down) | {"n": data.sizes(), "loss": loss}

    def personal(self, own: Params, down: Params) -> Params:
        """The model a client uses for itself."""
        return down | own


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    each = logits.logsumexp(-1) - logits.gather(-1, batch.y[..., None])[..., 0]
    return batch.mean(each)


def contrastive(logits: Tensor, batch: Batch) -> Tensor:
    """The public FedCLIP code's loss: each image against the names of the batch's labels, and the reverse."""
    real = batch.weight > 0
    pairs = logits.gather(-1, batch.y[:, None].expand(-1, logits.shape[1], -1))
    pairs = pairs.masked_fill(~real[:, None, :], torch.finfo(logits.dtype).min)
    across = pairs.log_softmax(-1).diagonal(dim1=-2, dim2=-1)
    back = pairs.mT.masked_fill(~real[:, None, :], torch.finfo(logits.dtype).min)
    down = back.log_softmax(-1).diagonal(dim1=-2, dim2=-1)
    return -batch.mean((across + down) / 2 * real)
