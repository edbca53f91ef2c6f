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

from fedvlm.adapters.base import Adapter, Task
from fedvlm.core import Cohort, Data, Params, State
from fedvlm.local.model import Model
from fedvlm.merge.base import Merge, Replies
from fedvlm.schema import SIZE, Fields
from fedvlm.tasks import SEGMENTATION

BY_CLASS = ("context", "head")  # parameters with one row per class, where their first axis has that length


@dataclass(frozen=True)
class Classwise(Merge):
    weights: Literal["size", "uniform"] = "size"  # of a client: its number of training examples, or the same for all

    def incompatible(self, adapter: Adapter) -> str:
        if adapter.task_type is not SEGMENTATION:
            return ""
        return "averages by class, and masks have no classes; use merge=mean"

    def uploads(self, task: Task) -> Fields:
        return {"class_counts": SIZE._replace(shape=(len(task.classes),), low=0)}

    def client_values(self, model: Model, params: Params, data: Data) -> tuple[Params, dict[str, Tensor]]:
        return {"class_counts": data.class_counts(len(model.task.classes))}, {}

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        replies = self.gather(state, cohort)
        n = replies.sizes(self.weights)
        weight = n / n.sum()
        counts, shared = replies.values["class_counts"], replies.sum(weight)
        shared |= {
            k: mean_by_class(replies.shared[k], counts, v)
            for k, v in state.shared.items()
            if k in BY_CLASS and len(v) == counts.shape[1]
        }
        loss = float(np.average(replies.values["loss"].double().numpy(), weights=weight.numpy()))
        return self.finish(state, cohort, replies, self.calibrated(shared, replies, cohort), weight, loss)

    def calibrated(self, shared: Params, replies: Replies, cohort: Cohort) -> Params:
        """The final shared parameters from the means; merges that post-process them override this."""
        return shared


def mean_by_class(replies: Tensor, counts: Tensor, before: Tensor) -> Tensor:
    """The mean over clients of replies [clients, classes, …], weighted by counts [clients, classes]."""
    weight = counts.double() / counts.double().sum(0).clamp(min=1)
    mean = torch.einsum("kc,kc...->c...", weight, replies.double())
    known = (counts.sum(0) > 0).view(-1, *[1] * (before.dim() - 1))
    return torch.where(known, mean, before.double()).to(before.dtype)
