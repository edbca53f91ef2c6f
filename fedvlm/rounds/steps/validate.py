"""The mean validation loss of the shared parameters that were sent, with each client's private ones.

GA and FAA weight clients by it. On training data where a client has no validation data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.data import Data, Extra
from fedvlm.core.schema import VALIDATION, Schema
from fedvlm.core.state import Answer, Message, Params, select, with_client_axis
from fedvlm.parts.metrics.loss import Loss
from fedvlm.rounds.steps.base import Step
from fedvlm.rounds.steps.predict import one_model, one_per_client, sums

if TYPE_CHECKING:
    from fedvlm.rounds.method import Method


class Validate(Step):
    def schema(self, method: Method, extras: Mapping[str, Extra]) -> Schema:
        return Schema({"val": VALIDATION})

    def run(self, method: Method, own: Params, message: Message, data: Data, prepared: Params) -> Answer:
        return Answer(own, {"val": validation_loss(method, own, with_client_axis(message.shared), data)})


@torch.no_grad()
def validation_loss(method: Method, own: Params, shared: Params, data: Data) -> Tensor:
    """One number per client, of these shared parameters and the adapter's private ones (not a rule's personal copy)."""
    low, mid, high = data.bounds[:, 0], data.bounds[:, 1], data.bounds[:, 2]
    has_validation = high > mid
    first, last = np.where(has_validation, mid, low), np.where(has_validation, high, mid)
    held_out = replace(data, bounds=np.stack([first, last, last, last], axis=1))
    params = method.adapter.prepare(method.task, shared | select(own, method.adapter.private), {})
    same_for_all = all(len(v) == 1 for v in params.values())
    predictions = (one_model if same_for_all else one_per_client)(method.model, params, held_out)
    (loss,) = sums(method.model, predictions, [Loss()], 3 * len(data))
    return loss[:, 0] / torch.from_numpy(np.maximum(last - first, 1)).to(loss.dtype)
