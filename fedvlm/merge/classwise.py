"""The mean by class (FOCoOp 2025, §3.3): what belongs to a class is averaged by how many examples of it each client has.

t_c = Σ_k |D_kc| t_kc / Σ_k |D_kc|; a class that nobody has this time stays as it was. What belongs to no class is averaged
by all examples, as in the plain mean. Clients tell how many examples of each class they hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedvlm.adapters.base import Task
from fedvlm.core import Cohort, Data, Params, State
from fedvlm.local.model import Model
from fedvlm.merge.mean import Mean, combine

BY_CLASS = ("context", "head")  # parameters whose first axis is the classes (where it is as long)


@dataclass(frozen=True)
class Classwise(Mean):
    def collects(self, task: Task) -> dict[str, tuple[int, ...]]:
        return {"holds": (len(task.classes),)}

    def collect(self, model: Model, params: Params, data: Data) -> Params:
        return {"holds": data.holds(len(model.task.classes))}

    def round(self, state: State, cohort: Cohort) -> State:
        ids, up = cohort.ask("train", state.shared)
        gaps = self.watch(state, cohort, ids, up)
        n = up["n"].double() if self.weights == "size" else torch.ones(len(ids), dtype=torch.float64)
        weight = n / n.sum()
        cohort.notes["weights"] = dict(zip(ids.tolist(), weight.tolist(), strict=True))
        cohort.notes["loss"] = float(np.average(up["loss"].double().numpy(), weights=weight.numpy()))
        shared = combine(up, state.shared, weight)
        shared |= {
            k: by_class(up[k], up["holds"], v) for k, v in state.shared.items() if has_classes(k, v, up["holds"])
        }
        return state._replace(shared=self.settle(shared, up, cohort), server=state.server | gaps.kept)

    def settle(self, shared: Params, up: Params, cohort: Cohort) -> Params:
        """What the server does with the mean: nothing. The place for a merge of your own to go on."""
        return shared


def has_classes(name: str, value: Tensor, holds: Tensor) -> bool:
    return name in BY_CLASS and len(value) == holds.shape[1]


def by_class(replies: Tensor, holds: Tensor, before: Tensor) -> Tensor:
    """Replies [clients, classes, …] by holdings [clients, classes]."""
    weight = holds.double() / holds.double().sum(0).clamp(min=1)
    mean = torch.einsum("kc,kc...->c...", weight, replies.double())
    known = (holds.sum(0) > 0).view(-1, *[1] * (before.dim() - 1))
    return torch.where(known, mean, before.double()).to(before.dtype)
