"""FedAvg's server (McMahan et al., 2017): the mean of the replies, by number of examples or uniform.

w_g ← Σ a_i w_i over the clients that answered, a_i = n_i / Σ n_j (weights=size) or 1 / their number (weights=uniform).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Merge, any_device, by_client
from fedvlm.core.model import Model
from fedvlm.core.ranges import default
from fedvlm.core.state import Message, Params, Reply, State
from fedvlm.privacy.secure.sums import UPDATE, Summand, summed_updates, sums_of, sums_only, weight_and_loss

OnReply = Callable[[Reply], None]


class Averaged(NamedTuple):
    mean: Params  # weighted, of the shared parameters
    sums: Params  # unweighted, of the values named in `sums`
    answered: int  # clients


@dataclass(frozen=True)
class Mean(Merge):
    """The weighted mean of the replies, added up as they arrive."""

    weights: Literal["size", "uniform"] = default("size", "effort")  # by training examples, or the same for all clients

    @any_device
    @sums_only
    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        if cohort.secure:
            sums = sums_of(self, model, state, cohort)
            moved = {k: sums[UPDATE + k] / sums["weight"] for k in state.shared}
            return state._replace(shared={k: (v.double() + moved[k]).to(v.dtype) for k, v in state.shared.items()})
        return state._replace(shared=self.average(state, cohort, state.message()).mean)

    def ranges(self, model: Model, sent: Params, limit: float) -> dict[str, Summand]:
        moved = {UPDATE + k: Summand(tuple(v.shape), limit, weight="weight") for k, v in sent.items()}
        return weight_and_loss(self.weights) | moved

    def summands(self, reply: Reply, sent: Params) -> Params:
        return summed_updates(reply, sent, self.weights)

    def average(
        self,
        state: State,
        cohort: Cohort,
        message: Message,
        sums: Params | None = None,
        on_reply: OnReply | None = None,
    ) -> Averaged:
        """Train, and average replies as they arrive, so that memory does not grow with the cohort. Values of the
        replies that are named in `sums` are added up too; `on_reply` is called with every reply."""
        total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in message.shared.items()}
        plain = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in (sums or {}).items()}
        weights: dict[int, float] = {}
        losses = 0.0
        for reply in cohort.stream("train", message):
            if on_reply:
                on_reply(reply)
            n = reply.values["n"]
            weight = n if self.weights == "size" else torch.ones_like(n)
            for k, v in total.items():
                v += torch.tensordot(weight.to(v.device), reply.shared[k], dims=1)
            for k, v in plain.items():
                v += reply.values[k].double().sum(0)
            weights |= by_client(reply.ids, weight)
            losses += float(weight @ reply.values["loss"])
        scale = sum(weights.values())
        cohort.notes |= {"weights": {i: w / scale for i, w in weights.items()}, "loss": losses / scale}
        mean = {k: (v / scale).to(message.shared[k].dtype) for k, v in total.items()}
        return Averaged(mean, plain, len(weights))
