"""Mean per class (FOCoOp 2025, §3.3): a class's parameters are averaged by how many of its examples each client has.

t_c = Σ_k |D_kc| t_kc / Σ_k |D_kc|; a class that no answering client has stays as it was. Other parameters are averaged
by all examples, as in the plain mean. Clients send their number of training examples per class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data
from fedvlm.core.merge import Merge, Replies
from fedvlm.core.model import Model
from fedvlm.core.ranges import default
from fedvlm.core.schema import SIZE, Fields
from fedvlm.core.state import Params, Reply, State
from fedvlm.core.tasks import SEGMENTATION
from fedvlm.privacy.secure.sums import MOST, UPDATE, Summand, summed_updates, sums_of, sums_only, weight_and_loss

BY_CLASS = ("context", "head")  # parameters with one row per class, where their first axis has that length


@dataclass(frozen=True)
class Classwise(Merge):
    weights: Literal["size", "uniform"] = default("size", "effort")  # by training examples, or the same for all clients

    def incompatible(self, adapter: Adapter) -> str:
        if adapter.task_type is not SEGMENTATION:
            return ""
        return "averages by class, and masks have no classes; use merge=mean"

    def uploads(self, task: Task) -> Fields:
        return {"class_counts": SIZE._replace(shape=(len(task.classes),), low=0)}

    def client_values(self, model: Model, params: Params, data: Data) -> tuple[Params, dict[str, Tensor]]:
        return {"class_counts": data.class_counts(len(model.task.classes))}, {}

    @sums_only
    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        if cohort.secure:
            return state._replace(shared=mean_of_sums(state.shared, sums_of(self, model, state, cohort)))
        return self.finish_by_class(state, cohort, self.gather(state, cohort))

    def finish_by_class(self, state: State, cohort: Cohort, replies: Replies) -> State:
        """The next state, with the mean by class."""
        n = replies.sizes(self.weights)
        weight = n / n.sum()
        counts, shared = replies.values["class_counts"], replies.sum(weight)
        shared |= {
            k: mean_by_class(replies.shared[k], counts, v)
            for k, v in state.shared.items()
            if is_by_class(k, v, counts.shape[1])
        }
        loss = float(np.average(replies.values["loss"].double().numpy(), weights=weight.numpy()))
        return self.finish(state, cohort, replies, shared, weight, loss)

    def ranges(self, model: Model, sent: Params, limit: float) -> dict[str, Summand]:
        classes = len(model.task.classes)
        found = weight_and_loss(self.weights) | {"class_counts": Summand((classes,), MOST, 1.0)}
        for name, value in sent.items():
            weight = "class_counts" if is_by_class(name, value, classes) else "weight"
            found[UPDATE + name] = Summand(tuple(value.shape), limit, weight=weight)
        return found

    def summands(self, reply: Reply, sent: Params) -> Params:
        return summed_updates(reply, sent, self.weights) | {"class_counts": reply.values["class_counts"]}


def is_by_class(name: str, value: Tensor, classes: int) -> bool:
    return name in BY_CLASS and len(value) == classes


def mean_of_sums(before: Params, sums: Params) -> Params:
    """The same means from sums over clients of updates times weights or counts."""
    counts, shared = sums["class_counts"], dict[str, Tensor]()
    for name, value in before.items():
        by_class = is_by_class(name, value, len(counts))
        total = counts.clamp(min=1).view(-1, *[1] * (value.dim() - 1)) if by_class else sums["weight"]
        shared[name] = (value.double() + sums[UPDATE + name] / total).to(value.dtype)  # unknown classes: + 0
    return shared


def mean_by_class(replies: Tensor, counts: Tensor, before: Tensor) -> Tensor:
    """The mean over clients of replies [clients, classes, …], weighted by counts [clients, classes]."""
    weight = counts.double() / counts.double().sum(0).clamp(min=1)
    mean = torch.einsum("kc,kc...->c...", weight, replies.double())
    known = (counts.sum(0) > 0).view(-1, *[1] * (before.dim() - 1))
    return torch.where(known, mean, before.double()).to(before.dtype)
