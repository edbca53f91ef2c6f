"""What is recorded of a round's replies beside what a merge makes of them: the server lets every observer see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.schema import VALIDATION, Fields
from fedvlm.core.state import Note, Params, Reply, State, is_running_statistic


class Observer:
    """Sees the replies of one round; `state` is the server's at its start."""

    uploads: ClassVar[Fields] = {}  # what clients send for it

    def __init__(self, state: State) -> None:
        self.kept: Params = {}  # values for the next round, in the server's state

    @classmethod
    def init(cls, clients: int) -> Params:
        """The values in the server's state before the first round; `clients` is the size of the population."""
        return {}

    def add(self, reply: Reply) -> None:
        raise NotImplementedError

    def notes(self) -> Mapping[str, Note]:
        """What goes into the round's record."""
        raise NotImplementedError


class Gaps(Observer):
    """G_i = L_i(w_g) − L_i(w_i) on validation data: what averaging cost client i in the last round.

    A client evaluates the model it is sent before it trains, so the gap of a round is known one round later without an
    extra message: `before` of this round minus `after` of the last one.
    """

    uploads: ClassVar[Fields] = {"before": VALIDATION, "after": VALIDATION}  # validation loss around training

    def __init__(self, state: State) -> None:
        self.kept = {"after": state.server["after"].clone()}
        self.found: dict[int, float] = {}

    @classmethod
    def init(cls, clients: int) -> Params:
        return {"after": torch.full((clients,), torch.nan)}

    def add(self, reply: Reply) -> None:
        gap = gaps_of(reply.ids, reply.values, self.kept)
        self.kept["after"][torch.from_numpy(reply.ids)] = reply.values["after"]
        self.found |= {i: g for i, g in zip(reply.ids.tolist(), gap.tolist(), strict=True) if g == g}

    def notes(self) -> Mapping[str, Note]:
        if len(self.found) < 2:
            return {}
        return {"gaps": self.found, "gap_variance": float(np.var(list(self.found.values())))}


class Agreement(Observer):
    """The mean cosine over all pairs of updates, from the sum of unit vectors alone: (‖Σu‖² − n)/(n(n − 1))."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.sent = {k: state.shared[k] for k in sorted(state.shared) if not is_running_statistic(k)}
        self.sum: Tensor | float = 0.0
        self.clients = 0

    def add(self, reply: Reply) -> None:
        if not self.sent:
            return
        updates = torch.cat([(reply.shared[k] - v[None]).flatten(1).double() for k, v in self.sent.items()], dim=1)
        lengths = updates.norm(dim=1, keepdim=True)
        self.sum = self.sum + (updates / lengths.clamp(min=1e-300)).sum(0)
        self.clients += int((lengths > 0).sum())

    def notes(self) -> Mapping[str, Note]:
        return {"cosine": self.mean()} if self.clients > 1 else {}

    def mean(self) -> float:
        n = self.clients
        return float((torch.as_tensor(self.sum).square().sum() - n) / (n * (n - 1)))


@dataclass(frozen=True)
class Observed:
    """Which observers see the replies to a merge."""

    cosine: bool = False  # also record the mean cosine between clients' updates (FedOT's Table 2)
    gaps: bool = False  # also record the generalisation gap of each client: loss of the mean − loss of its own model

    @property
    def observers(self) -> tuple[type[Observer], ...]:
        return (Gaps,) * self.gaps + (Agreement,) * self.cosine


def gaps_of(ids: np.ndarray, values: Params, server: Params) -> Tensor:
    """The last round's gap of each client; NaN for clients that had not trained before."""
    return values["before"] - server["after"][torch.from_numpy(ids)]
