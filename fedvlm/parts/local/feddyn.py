"""FedDyn's client (Acar et al., ICLR 2021): its loss changes so that a minimum of its own is one of the mean loss.

loss(w) − ⟨g_i, w⟩ + α/2 ‖w − w_g‖²;  after training g_i ← g_i − α (w_i − w_g).  g_i is private and starts at 0: it is the
gradient of the client's own loss where its last training ended. Clients and server then agree where the mean gradient is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.copies import COPY
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, with_proximal_term
from fedvlm.core.local import Local, Trained, anchor_of
from fedvlm.core.model import Model
from fedvlm.core.ranges import Positive
from fedvlm.core.state import Message, Params, is_running_statistic

OWN = COPY + "gradient."  # prefix of g_i in a client's row


@dataclass(frozen=True)
class FedDyn(Local):
    mu: Positive = 0.1  # α, weight of the distance to the model that was sent

    partner: ClassVar[str] = "feddyn"

    def private_state(self, shared: Params) -> Params:
        return super().private_state(shared) | {OWN + k: torch.zeros_like(v) for k, v in shared.items()}

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        near = with_proximal_term(super().gradients(model, message, own), anchor_of(message), self.mu)

        def corrected(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
            each, found = near(now, batch)
            linear = [
                own[OWN + k][: len(batch.y)] if k in message.shared else torch.zeros_like(v) for k, v in now.items()
            ]
            return each, [f - g for f, g in zip(found, linear, strict=True)]

        return corrected

    def train(self, model: Model, own: Params, message: Message, data: Data) -> Trained:
        trained = super().train(model, own, message, data)
        moved = {OWN + k: own[OWN + k] - self.mu * (trained.shared[k] - v) for k, v in message.shared.items()}
        moved |= {OWN + k: own[OWN + k] for k in message.shared if is_running_statistic(k)}
        return trained._replace(own=trained.own | moved)
