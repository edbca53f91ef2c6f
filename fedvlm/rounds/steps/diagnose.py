"""Diagnostics that an adapter declares, such as the condition number of FedOT's map: one number per client, from its own
model and a few of its training examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.adapter import HasDiagnostics
from fedvlm.core.data import Data, Extra
from fedvlm.core.schema import Field, Schema
from fedvlm.core.state import Answer, Message, Params, with_client_axis
from fedvlm.rounds.steps.base import Step

if TYPE_CHECKING:
    from fedvlm.rounds.method import Method


EXAMPLES = 16  # of each client


class Diagnose(Step):
    def schema(self, method: Method, extras: Mapping[str, Extra]) -> Schema:
        adapter = method.adapter
        return Schema(dict.fromkeys(adapter.diagnostics, Field()) if isinstance(adapter, HasDiagnostics) else {})

    @torch.no_grad()
    def run(self, method: Method, own: Params, message: Message, data: Data, prepared: Params) -> Answer:
        if not isinstance(method.adapter, HasDiagnostics):
            return Answer(own, {})
        params = method.local.personal(own, with_client_axis(message.shared))
        found = method.adapter.diagnose(method.task, params, few_examples(data))
        return Answer(own, {k: v.expand(len(data)) for k, v in found.items()})  # shared parameters have one row for all


def few_examples(data: Data) -> Tensor:
    """The first training examples of each client, [clients, EXAMPLES, …]; where there are fewer, they are repeated. Only
    clients that train are asked, so that each has one."""
    place = np.arange(EXAMPLES) % np.maximum(data.counts("train"), 1)[:, None]
    return data.take(data.tensor(np.minimum(data.bounds[:, :1] + place, len(data.x) - 1)))
