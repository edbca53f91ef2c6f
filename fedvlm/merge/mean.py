"""FedAvg's server (McMahan et al., 2017): the mean of the replies, by number of examples or uniform."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedvlm.adapters.base import Adapter, Task
from fedvlm.core import Cohort, Data, FedvlmError, Params, State, tracked
from fedvlm.local.model import Model

Hear = Callable[[np.ndarray, Params], None]  # some clients' ids and replies


@dataclass(frozen=True)
class Mean:
    weights: Literal["size", "uniform"] = "size"
    cosine: bool = False  # also record the mean cosine between clients' updates (FedOT's Table 2)
    gaps: bool = False  # also record what averaging costs each client: loss of the mean − loss of its own model

    wants: ClassVar[tuple[str, ...]] = ()  # shared parameters it works on by name
    reveals: ClassVar[str] = ""  # what of private data goes up beside parameters and numbers, in words
    partner: ClassVar[str] = ""  # the one local rule it works with, where it is only one

    @property
    def needs(self) -> tuple[str, ...]:
        """What must come up beside the shared parameters."""
        return ("n", "loss", "before", "after") if self.gaps else ("n", "loss")

    def init(self, clients: int) -> Params:
        return {"after": torch.full((clients,), torch.nan)} if self.gaps else {}

    def refuses(self, adapter: Adapter) -> str:
        """Why it does not go with this adapter; "" where it does."""
        return ""

    def collects(self, task: Task) -> dict[str, tuple[int, ...]]:
        """What clients send for this merge beside what their rule sends: shapes, as in a rule's `sends`."""
        return {}

    def collect(self, model: Model, params: Params, data: Data) -> Params:
        """That, on the client, of the model as it was trained."""
        return {}

    def begin(self, model: Model, seed: int) -> tuple[Params, Params]:
        """What the server sends down beside the adapter's parameters, and keeps for itself, before the first round."""
        return {}, {}

    def serve(self, model: Model, state: State, cohort: Cohort) -> State:
        """A round, for a server that also has a model of its own to train."""
        return self.round(state, cohort)

    def round(self, state: State, cohort: Cohort) -> State:
        total, _, kept = self.gather(state, cohort, state.shared)
        shared = {k: total[k].to(v.dtype) for k, v in state.shared.items()}
        return state._replace(shared=shared, server=state.server | kept)

    def gather(
        self,
        state: State,
        cohort: Cohort,
        down: Params,
        plain: Params | None = None,
        beside: Params | None = None,
        hear: Hear = lambda ids, up: None,
    ) -> tuple[Params, int, Params]:
        """Trains, a few clients at a time: the weighted means of what comes back (of the names in `plain`, the sums),
        how many answered, and what the server keeps for its records. `beside` goes down and does not come back; `hear`
        is shown every reply."""
        total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in down.items()}
        weights: dict[int, float] = {}
        agreement, gaps = Agreement(self.cosine), Gaps(state.server)
        losses = 0.0
        for ids, up in cohort.stream("train", down | (beside or {})):
            hear(ids, up)
            weight = up["n"] if self.weights == "size" else torch.ones_like(up["n"])
            for k, v in total.items():
                v += up[k].double().sum(0) if k in (plain or {}) else torch.tensordot(weight, up[k], dims=1)
            weights |= zip(ids.tolist(), weight.tolist(), strict=True)
            losses += float(weight @ up["loss"])
            agreement.add(up, {k: v for k, v in state.shared.items() if k in down})
            gaps.add(ids, up)
        scale = sum(weights.values())
        cohort.notes |= {"weights": {i: w / scale for i, w in weights.items()}, "loss": losses / scale}
        cohort.notes |= gaps.notes() | agreement.notes()
        return {k: v if k in (plain or {}) else v / scale for k, v in total.items()}, len(weights), gaps.kept

    def watch(self, state: State, cohort: Cohort, ids: np.ndarray, up: Params) -> Gaps:
        """For merges that have all replies at once: the same records."""
        agreement, gaps = Agreement(self.cosine), Gaps(state.server)
        agreement.add(up, state.shared)
        gaps.add(ids, up)
        cohort.notes |= gaps.notes() | agreement.notes()
        return gaps


class Gaps:
    """G_i = L_i(w_g) − L_i(w_i), on validation: what the last mean cost each client.

    A client gauges what it is sent before it trains, so the gap of a round is known one round later, and costs no
    message of its own: `before` of this round less `after` of the one before.
    """

    def __init__(self, server: Params):
        self.kept: Params = {"after": server["after"].clone()} if "after" in server else {}
        self.found: dict[int, float] = {}

    def add(self, ids: np.ndarray, up: Params) -> None:
        if not self.kept:
            return
        at = torch.from_numpy(ids)
        gap = up["before"] - self.kept["after"][at]
        self.kept["after"][at] = up["after"]
        self.found |= {i: g for i, g in zip(ids.tolist(), gap.tolist(), strict=True) if g == g}

    def notes(self) -> Params:
        if len(self.found) < 2:
            return {}
        return {"gaps": dict(self.found), "gap_variance": float(np.var(list(self.found.values())))}  # type: ignore[dict-item]


def refuse_without_gaps(merge: Mean) -> None:
    if not merge.gaps:
        raise FedvlmError("gaps=false: this merge is made of the gaps; leave gaps out, or use merge=mean")


def combine(up: Params, names: Params, weight: Tensor) -> Params:
    """Σ aᵢ wᵢ over replies [clients, ...]."""
    return {k: torch.tensordot(weight.to(up[k].dtype), up[k], dims=1) for k in names}


class Agreement:
    """Mean cosine over all pairs of updates, from the sum of unit vectors alone: (‖Σu‖² − n)/(n(n − 1))."""

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.sum: Tensor | float = 0.0
        self.clients = 0

    def add(self, up: Params, shared: Params) -> None:
        names = sorted(k for k in shared if not tracked(k))
        if not self.wanted or not names:
            return
        updates = torch.cat([(up[k] - shared[k][None]).flatten(1).double() for k in names], dim=1)
        lengths = updates.norm(dim=1, keepdim=True)
        self.sum = self.sum + (updates / lengths.clamp(min=1e-300)).sum(0)
        self.clients += int((lengths > 0).sum())

    def notes(self) -> dict[str, float]:
        return {"cosine": self.mean()} if self.clients > 1 else {}

    def mean(self) -> float:
        n = self.clients
        return float((torch.as_tensor(self.sum).square().sum() - n) / (n * (n - 1)))
