"""What secure=true asks of a merge: which tensors are summed over clients, and what the server makes of the sums."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch

from fedvlm.core.cohort import Cohort
from fedvlm.core.marks import Mark
from fedvlm.core.merge import Merge
from fedvlm.core.model import Model
from fedvlm.core.state import Params, Reply, State
from fedvlm.errors import VoidRound

FINE = 2.0**-24  # the coarsest step of an update: the resolution of float32 near 1
UPDATE = "update/"  # prefix of a shared parameter's update among summands
MOST = 2.0**20  # the largest weight in secure sums: more examples count as so many

sums_only = Mark("sums_only")  # on the `round` of a merge that sees only sums with secure=true


class Summand(NamedTuple):
    """A tensor that is summed over clients."""

    shape: tuple[int, ...]  # of one client
    high: float  # values are clipped to ± high
    step: float = FINE  # the coarsest fixed-point step that will do; 1: whole numbers
    weight: str = ""  # the summand (whole numbers) by which it is multiplied, along the first axes; "": none


@runtime_checkable
class Summable(Protocol):
    """A merge that needs nothing but sums over clients; its `round` is marked `sums_only`."""

    def ranges(self, model: Model, sent: Params, limit: float) -> dict[str, Summand]:
        """What is summed, with the ranges of one client's values; numbers of an update are clipped to ± limit."""
        ...

    def summands(self, reply: Reply, sent: Params) -> Params:
        """What clients contribute to the sums, by the names of `ranges`, [clients, ...]; computed on the client."""
        ...


def needs_replies(merge: Merge) -> str:
    """Why sums over clients are not enough for a merge; "" where they are."""
    if not (isinstance(merge, Summable) and sums_only.is_on(type(merge).round)):
        return "works on the replies of single clients; use merge=mean or merge=classwise"
    if merge.observers:
        key = "cosine" if merge.cosine else "gaps"
        return f"compares single clients with {key}=true; give {key}=false"
    return ""


def sums_of(merge: Summable, model: Model, state: State, cohort: Cohort) -> Params:
    """The sums of a round of training; the mean loss is recorded."""
    sums = cohort.sums(merge, model, state.message())
    if not sums["weight"] > 0:
        raise VoidRound(f"round {cohort.round}: the clients' weights add up to nothing; the model stays as it was")
    cohort.notes["loss"] = float(sums["loss"] / sums["weight"])
    return sums


def weight_and_loss(weights: str) -> dict[str, Summand]:
    """The ranges of a client's weight (weights=size or uniform) and its loss."""
    weight = Summand((), MOST if weights == "size" else 1.0, 1.0)
    return {"weight": weight, "loss": Summand((), 2.0**10, 2.0**-10, "weight")}


def summed_updates(reply: Reply, sent: Params, weights: str) -> Params:
    """A client's weight, its loss, and how far each shared parameter moved: the differences need a smaller range than the
    parameters."""
    n = reply.values["n"]
    known = {"weight": n if weights == "size" else torch.ones_like(n), "loss": reply.values["loss"]}
    return known | {UPDATE + k: v.double() - sent[k].double() for k, v in reply.shared.items()}
