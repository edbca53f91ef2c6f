"""The interface of a merge: how the server turns the clients' replies into the next state.

Most merges need all replies of a round at once: `gather` asks for them, and `finish` writes the records and returns the
new state. Merges that only need a weighted sum can stream instead (parts/merge/mean.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data
from fedvlm.core.marks import Mark
from fedvlm.core.model import Model
from fedvlm.core.observers import Observed
from fedvlm.core.schema import Fields
from fedvlm.core.state import Params, Reply, State
from fedvlm.errors import FedvlmError

any_device = Mark("any_device")  # on a `round` that works on replies wherever they are, such as a GPU


class Start(NamedTuple):
    """What a server has before the first round."""

    server: Params  # server-only state, never sent
    task: Params = {}  # class embeddings that it sends; {}: clients use the frozen ones


@dataclass(frozen=True)
class Merge(Observed):
    """What the server does in a round: it asks clients, and makes the next state of their replies."""

    requires: ClassVar[tuple[str, ...]] = ("n", "loss")  # what clients must send beside the shared parameters
    requires_parameters: ClassVar[tuple[str, ...]] = ()  # names of shared parameters that the adapter must have
    reveals: ClassVar[str] = ""  # in words, private data that clients send beside parameters and numbers; "": none
    partner: ClassVar[str] = ""  # the only local rule it works with; "" any
    # What clients may be asked in a round, whatever a server says: the step of each exchange, in their order, and the names
    # in their messages' `extra` (by parameter: those of the shared parameters)
    asks: ClassVar[tuple[str, ...]] = ("train",)
    tells: ClassVar[tuple[str, ...]] = ()
    tells_by_parameter: ClassVar[bool] = False
    # What its mechanism does in a round, by name, with the meaning in words; told by `cohort.acted(name=number)`
    effects: ClassVar[Mapping[str, str]] = {}

    def incompatible(self, adapter: Adapter) -> str:
        """Why it cannot be used with this adapter; "" where it can."""
        return ""

    def uploads(self, task: Task) -> Fields:
        """What clients send for this merge beside what their local rule sends."""
        return {}

    def client_values(self, model: Model, params: Params, data: Data) -> tuple[Params, dict[str, Tensor]]:
        """The values of `uploads`, computed on the clients from the trained model; and, for values with an axis of any
        length (padded to the longest client), their lengths, [clients] each."""
        return {}, {}

    def init(self, model: Model, clients: int, seed: int) -> Start:
        """The server's state before the first round; `clients` is the size of the population."""
        return Start({})

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        raise NotImplementedError

    def gather(self, state: State, cohort: Cohort) -> Replies:
        """Train; return all replies."""
        return Replies(*cohort.ask("train", state.message()))

    def finish(
        self,
        state: State,
        cohort: Cohort,
        replies: Replies,
        shared: Params,
        weight: Tensor,
        loss: float,
        server: Params | None = None,
    ) -> State:
        """The next state; `weight` [clients], the weight of each reply, and `loss` are only recorded."""
        cohort.notes |= {"weights": by_client(replies.ids, weight), "loss": loss}
        return state._replace(shared=shared, server=state.server | (server or {}))


class Replies(Reply):
    """The replies of a round, with what merges compute from them."""

    def sum(self, weight: Tensor) -> Params:
        """Σ aᵢ wᵢ over the clients, a = weight."""
        return {k: torch.tensordot(weight.to(v.dtype), v, dims=1) for k, v in self.shared.items()}

    def uniform(self) -> Tensor:
        return torch.full((len(self.ids),), 1 / len(self.ids), dtype=torch.float64)

    def sizes(self, weights: str) -> Tensor:
        """Each client's weight before normalisation: its number of examples (weights=size), or 1 (weights=uniform)."""
        return self.values["n"].double() if weights == "size" else torch.ones(len(self.ids), dtype=torch.float64)

    def mean_loss(self) -> float:
        return float(self.values["loss"].mean())

    def median_loss(self) -> float:
        return float(self.values["loss"].median())


def by_client(ids: np.ndarray, values: Tensor) -> dict[int, float]:
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def require_gaps(merge: Merge) -> None:
    if not merge.gaps:
        raise FedvlmError("gaps=false: this merge is computed from the gaps; leave gaps out, or use merge=mean")
