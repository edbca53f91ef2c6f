"""APFL (Deng et al., 2020): a client's model is a mixture of the shared one and of one of its own, α v + (1 − α) w.

w is trained and sent as in FedAvg; then v by the loss of the mixture, v ← v − η ∇_v L(α v + (1 − α) w_i), with w_i as it was
just trained (the paper takes both steps in turn, and may adapt α; here it is fixed). The personal model is the mixture with
the shared model as it is then; that of a new client is the shared model. An adapter's private parameters are trained with w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedvlm.core import copies
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import optimise
from fedvlm.core.local import Local, anchor_of
from fedvlm.core.model import Model
from fedvlm.core.ranges import Share
from fedvlm.core.state import Message, Params, is_running_statistic
from fedvlm.errors import FedvlmError


@dataclass(frozen=True)
class Apfl(Local):
    keep: bool = True  # always true: v is kept
    mixture: Share = 0.5  # α, weight of a client's own model; 0: the shared model alone, 1: training alone

    def __post_init__(self) -> None:
        if not self.keep:
            raise FedvlmError("keep=false: APFL's personal model has a private part; leave keep out, or use local=sgd")

    def mixed(self, own: Params, shared: Params) -> Params:
        return {k: self.mixture * v + (1 - self.mixture) * shared[k] for k, v in own.items()}

    def personal_copy(self, model: Model, own: Params, message: Message, trained: Params, data: Data) -> Params:
        copy = copies.load_copies(own, anchor_of(message))
        held = {k: v for k, v in trained.items() if k not in message.shared}
        plain = model.gradients(self.objective, held)

        def mixed(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
            each, found = plain(self.mixed(now, {k: trained[k][: len(batch.y)] for k in now}), batch)
            share = [1.0 if is_running_statistic(k) else self.mixture for k in now]
            return each, [s * f for s, f in zip(share, found, strict=True)]

        optimise(self, copy, data, mixed)
        return copy

    def personal(self, own: Params, shared: Params) -> Params:
        return copies.adapter_params(own) | self.mixed(copies.load_copies(own, shared), shared)
