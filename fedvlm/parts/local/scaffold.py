"""SCAFFOLD's client (Karimireddy et al., 2020): control variates correct every gradient for the client's drift.

g − c_i + c instead of g;  after K steps c_i⁺ = c_i − c + (w_g − w_i)/(K η) (option II), and c_i⁺ − c_i goes up.
c_i is private; c comes with the message. K η assumes plain SGD: use optimiser=sgd, momentum=0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.copies import COPY
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients
from fedvlm.core.local import Local, Trained
from fedvlm.core.model import Model
from fedvlm.core.schema import Field, Fields
from fedvlm.core.state import Message, Params, is_running_statistic

CONTROL = "control."  # prefix of c_i⁺ − c_i in the reply
DRIFT = COPY + "drift."  # prefix of c_i in a client's row


@dataclass(frozen=True)
class Scaffold(Local):
    partner: ClassVar[str] = "scaffold"

    def uploads(self, task: Task, shared: Params) -> Fields:
        return super().uploads(task, shared) | {
            CONTROL + k: Field(tuple(v.shape), update=True) for k, v in shared.items()
        }

    def private_state(self, shared: Params) -> Params:
        return super().private_state(shared) | {DRIFT + k: torch.zeros_like(v) for k, v in shared.items()}

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        plain = super().gradients(model, message, own)
        correction = {k: message.extra[k][None] - own[DRIFT + k] for k in message.shared}  # c − c_i

        def corrected(now: Params, batch: Batch) -> tuple[Tensor, list[Tensor]]:
            each, found = plain(now, batch)
            n = len(batch.y)
            return each, [f + correction[k][:n] if k in correction else f for k, f in zip(now, found, strict=True)]

        return corrected

    def train(self, model: Model, own: Params, message: Message, data: Data) -> Trained:
        trained = super().train(model, own, message, data)
        steps = np.maximum(1, -(-data.counts("train") // self.batch) * self.epochs)
        distance = data.tensor(steps * self.rate(data)).to(data.dtype)  # K η
        change = {}
        for k, v in message.shared.items():
            drift = (v - trained.shared[k]) / distance.view(-1, *[1] * v.dim()) - message.extra[k]
            change[k] = torch.zeros_like(drift) if is_running_statistic(k) else drift  # statistics need no correction
        own = trained.own | {DRIFT + k: own[DRIFT + k] + c for k, c in change.items()}
        return trained._replace(own=own, values=trained.values | {CONTROL + k: c for k, c in change.items()})
