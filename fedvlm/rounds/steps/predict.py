"""Predictions for evaluation: one model for all clients, or one per client, and sums of statistics over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.data import Data
from fedvlm.core.metric import Additive
from fedvlm.core.model import Model
from fedvlm.core.state import Params
from fedvlm.system.devices import blocks_at_once


class Predicted(NamedTuple):
    """A block of examples."""

    logits: Tensor  # [clients, examples, ...]
    y: Tensor
    cells: np.ndarray  # of each example: 3 × (position of its client) + split; −1 is padding


Predictor = Callable[[Model, Params, Data], Iterator[Predicted]]


def one_model(model: Model, params: Params, data: Data) -> Iterator[Predicted]:
    """All examples with the same parameters."""
    for x, y, cells in data.blocks(examples_at_once(model, data.x)):
        yield Predicted(model.logits(params, x), y[None], cells)


def one_per_client(model: Model, params: Params, data: Data) -> Iterator[Predicted]:
    """Each client's examples with its own parameters."""
    for x, y, cells in data.lanes(2 * examples_at_once(model, data.x)):
        yield Predicted(model.logits({k: v[: len(y)] for k, v in params.items()}, x), y, cells)


def examples_at_once(model: Model, x: Tensor) -> int:
    """The number of examples at a time: the adapter's limit, or a multiple on a large GPU."""
    return model.adapter.limits.examples * blocks_at_once(x.device)


def sums(model: Model, predictions: Iterator[Predicted], metrics: Sequence[Additive], cells: int) -> list[Tensor]:
    """The sums of each metric's statistic by client and split, [clients, 3, *shape]."""
    shapes = [m.shape(model) for m in metrics]
    totals = [np.zeros((cells + 1, int(np.prod(shape)))) for shape in shapes]
    for block in predictions:
        where = block.cells.reshape(-1) + 1  # 0 collects padding
        for metric, total, shape in zip(metrics, totals, shapes, strict=True):
            each = metric.each(model, block.logits, block.y)
            if shape:
                rows = each.double().cpu().reshape(len(where), -1)
                torch.from_numpy(total).index_add_(0, torch.from_numpy(where), rows)
            else:
                total[:, 0] += np.bincount(where, each.double().cpu().numpy().reshape(-1), cells + 1)
    dtype = torch.get_default_dtype()
    return [torch.from_numpy(t[1:]).view(-1, 3, *s).to(dtype) for t, s in zip(totals, shapes, strict=True)]


def model_at(params: Params, i: int) -> Params:
    """The parameters of one client of several; parameters that are the same for all have a client axis of one."""
    return {k: v[i % len(v)][None] for k, v in params.items()}
