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
from fedvlm.core.model import Model
from fedvlm.core.schema import Fields
from fedvlm.core.state import Params, Reply, State, is_running_statistic
from fedvlm.errors import FedvlmError, VoidRound

FINE = 2.0**-24  # the coarsest step of an update: the resolution of float32 near 1


class Summand(NamedTuple):
    """A tensor that is summed over clients."""

    shape: tuple[int, ...]  # of one client
    high: float  # values are clipped to ± high
    step: float = FINE  # the coarsest fixed-point step that will do; 1: whole numbers
    weight: str = ""  # the summand (whole numbers) by which it is multiplied, along the first axes; "": none


UPDATE = "update/"  # prefix of a shared parameter's update among summands
MOST = 2.0**20  # the largest weight in secure sums: more examples count as so many


class Start(NamedTuple):
    """What a server has before the first round."""

    server: Params  # server-only state, never sent
    task: Params = {}  # class embeddings that it sends; {}: clients use the frozen ones


@dataclass(frozen=True)
class Merge:
    """What the server does in a round: it asks clients, and makes the next state of their replies."""

    cosine: bool = False  # also record the mean cosine between clients' updates (FedOT's Table 2)
    gaps: bool = False  # also record the generalisation gap of each client: loss of the mean − loss of its own model

    requires_parameters: ClassVar[tuple[str, ...]] = ()  # names of shared parameters that the adapter must have
    reveals: ClassVar[str] = ""  # in words, private data that clients send beside parameters and numbers; "": none
    any_device: ClassVar[bool] = False  # its round works on replies wherever they are, such as a GPU; not inherited
    partner: ClassVar[str] = ""  # the only local rule it works with; "" any
    # What its mechanism does in a round, by name, with the meaning in words; told by `cohort.acted(name=number)`
    effects: ClassVar[Mapping[str, str]] = {}

    @property
    def requires(self) -> tuple[str, ...]:
        """What clients must send beside the shared parameters."""
        return ("n", "loss", "before", "after") if self.gaps else ("n", "loss")

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

    def adjusts(self, task: Task) -> Fields:
        """What clients answer to the step `adjust`, where this merge asks for it."""
        return {}

    def init(self, model: Model, clients: int, seed: int) -> Start:
        """The server's state before the first round; `clients` is the size of the population."""
        return Start({"after": torch.full((clients,), torch.nan)} if self.gaps else {})

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        raise NotImplementedError

    def needs_replies(self) -> str:
        """Why sums over clients are not enough for it (secure=true); "" where they are. `summands` is not inherited here: a
        subclass may look at single replies."""
        if "summands" not in vars(type(self)):
            return "works on the replies of single clients; use merge=mean or merge=classwise"
        if self.cosine or self.gaps:
            return f"compares single clients with {'cosine' if self.cosine else 'gaps'}=true; leave it out"
        return ""

    def ranges(self, model: Model, sent: Params, limit: float) -> dict[str, Summand]:
        """What is summed over clients (secure=true), with the ranges of one client's values; numbers of an update are
        clipped to ± limit."""
        raise NotImplementedError

    def summands(self, reply: Reply, sent: Params) -> Params:
        """What clients contribute to the sums, by the names of `ranges`, [clients, ...]; computed on the client."""
        raise NotImplementedError

    def from_sums(self, state: State, sums: Params) -> Params:
        """The next shared parameters."""
        raise NotImplementedError

    def round_of_sums(self, model: Model, state: State, cohort: Cohort) -> State:
        """A round in which the server sees sums only."""
        sums = cohort.sums(self, model, state.message())
        if not sums["weight"] > 0:
            raise VoidRound(f"round {cohort.round}: the clients' weights add up to nothing; the model stays as it was")
        cohort.notes["loss"] = float(sums["loss"] / sums["weight"])
        return state._replace(shared=self.from_sums(state, sums))

    def gather(self, state: State, cohort: Cohort) -> Replies:
        """Train; return all replies, and record what `cosine` and `gaps` ask for."""
        reply = cohort.ask("train", state.message())
        agreement, gaps = Agreement(self.cosine), Gaps(state.server)
        agreement.add(reply, state.shared)
        gaps.add(reply)
        cohort.notes |= gaps.notes() | agreement.notes()
        return Replies(*reply, gaps)

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
        return state._replace(shared=shared, server=state.server | replies.gaps.kept | (server or {}))


class Replies(NamedTuple):
    """A Reply, and the generalisation gaps computed from it."""

    ids: np.ndarray
    values: Params
    shared: Params
    gaps: Gaps

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


class Gaps:
    """G_i = L_i(w_g) − L_i(w_i) on validation data: what averaging cost client i in the last round.

    A client evaluates the model it is sent before it trains, so the gap of a round is known one round later without an
    extra message: `before` of this round minus `after` of the last one.
    """

    def __init__(self, server: Params):
        self.kept: Params = {"after": server["after"].clone()} if "after" in server else {}
        self.found: dict[int, float] = {}

    def add(self, reply: Reply) -> None:
        if not self.kept:
            return
        at = torch.from_numpy(reply.ids)
        gap = reply.values["before"] - self.kept["after"][at]
        self.kept["after"][at] = reply.values["after"]
        self.found |= {i: g for i, g in by_client(reply.ids, gap).items() if g == g}

    def notes(self) -> dict[str, float | str | dict[int, float]]:
        if len(self.found) < 2:
            return {}
        return {"gaps": dict(self.found), "gap_variance": float(np.var(list(self.found.values())))}


class Agreement:
    """The mean cosine over all pairs of updates, from the sum of unit vectors alone: (‖Σu‖² − n)/(n(n − 1))."""

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.sum: Tensor | float = 0.0
        self.clients = 0

    def add(self, reply: Reply, shared: Params) -> None:
        names = sorted(k for k in shared if not is_running_statistic(k))
        if not self.wanted or not names:
            return
        updates = torch.cat([(reply.shared[k] - shared[k][None]).flatten(1).double() for k in names], dim=1)
        lengths = updates.norm(dim=1, keepdim=True)
        self.sum = self.sum + (updates / lengths.clamp(min=1e-300)).sum(0)
        self.clients += int((lengths > 0).sum())

    def notes(self) -> dict[str, float | str | dict[int, float]]:
        return {"cosine": self.mean()} if self.clients > 1 else {}

    def mean(self) -> float:
        n = self.clients
        return float((torch.as_tensor(self.sum).square().sum() - n) / (n * (n - 1)))


def weight_and_loss(weights: str) -> dict[str, Summand]:
    """The ranges of a client's weight (weights=size or uniform) and its loss."""
    weight = Summand((), MOST if weights == "size" else 1.0, 1.0)
    return {"weight": weight, "loss": Summand((), 2.0**10, 2.0**-10, "weight")}


def updates(reply: Reply, sent: Params) -> Params:
    """How far each shared parameter moved: the differences need a smaller range than the parameters."""
    return {UPDATE + k: v.double() - sent[k].double() for k, v in reply.shared.items()}


def by_client(ids: np.ndarray, values: Tensor) -> dict[int, float]:
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def require_gaps(merge: Merge) -> None:
    if not merge.gaps:
        raise FedvlmError("gaps=false: this merge is computed from the gaps; leave gaps out, or use merge=mean")
