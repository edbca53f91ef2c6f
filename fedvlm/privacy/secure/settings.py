"""What a run asks of secure aggregation, and what one exchange of it is. Nothing here needs `cryptography`."""

from __future__ import annotations

import hashlib
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from fedvlm.core.state import Message, Params, Reply
from fedvlm.privacy.secure.fixed import SumPlan
from fedvlm.privacy.secure.graph import SMALLEST
from fedvlm.privacy.secure.messages import Integers, traffic

if TYPE_CHECKING:
    from fedvlm.config.config import Config
    from fedvlm.core.model import Model
    from fedvlm.privacy.secure.sums import Summable


class Secure(NamedTuple):
    threshold: float  # share of the asked clients that must be in a sum
    limit: float  # each number of an update is clipped to ± this

    @classmethod
    def of(cls, config: Config) -> Secure | None:
        return cls(config.threshold, config.secure_range) if config.secure else None

    def summation(self, merge: Summable, model: Model, sent: Params, clients: int) -> Summation:
        plan = SumPlan.of(merge.ranges(model, sent, self.limit), clients)
        return Summation(merge, sent, plan, max(SMALLEST, ceil(self.threshold * clients)), self.limit)


class Summation(NamedTuple):
    """One exchange in which contributions are only added up: what is summed, and how."""

    merge: Summable
    sent: Params  # the shared model that clients start from
    plan: SumPlan
    threshold: int  # clients that must be in the sum
    limit: float

    def contributions(self, reply: Reply) -> Integers:
        """The contributions of the clients of a reply, [clients, length]."""
        return self.plan.encode(self.merge.summands(reply, self.sent))

    def zero(self) -> Integers:
        return np.zeros(self.plan.length, self.plan.dtype)

    def traffic(self) -> tuple[int, int]:
        """Bytes down to a client beside the model, and up from it, where nobody drops out."""
        down, up = traffic(self.plan.clients, self.threshold)
        return down, up + self.plan.nbytes


class Summed(NamedTuple):
    """What an engine brings back from a summation."""

    total: Integers
    ids: np.ndarray  # of the clients in it


def message_fingerprint(message: Message, *told: object) -> bytes:
    """A hash of what clients train on and of what else they were told (the plan, the round, …), for Parameters.model. A
    server that tells one client something else than all others could otherwise make the sum tell of that client alone
    (Pasquini et al., 2022)."""
    found = hashlib.sha256(repr((message.stage, *told)).encode())
    for part, params in message.parts().items():
        for name, value in sorted(params.items()):
            found.update(f"\0{part}/{name} {value.dtype} {tuple(value.shape)}\0".encode())
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()
