"""Base-to-novel: how many test examples of each base and of each novel class a model gets right.

The examples are public (extras "base" and "novel"). The shared model is the same for all clients, so one client's answer
to novel.shared serves for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.data import Data, Extra
from fedvlm.core.model import Model
from fedvlm.core.schema import Field, Schema
from fedvlm.core.state import Answer, Message, Params
from fedvlm.rounds.steps.base import Step
from fedvlm.rounds.steps.predict import model_at

if TYPE_CHECKING:
    from fedvlm.rounds.method import Method


class Novel(Step):
    def __init__(self, view: str):
        self.view = view

    def schema(self, method: Method, extras: Mapping[str, Extra]) -> Schema:
        return Schema(
            {
                half: Field((len(task.classes),), low=0, high=len(extras[half].x), whole=True)
                for half, task in method.base_and_novel.items()
            }
        )

    @torch.no_grad()
    def run(self, method: Method, own: Params, message: Message, data: Data, prepared: Params) -> Answer:
        shared = self.view == "shared"
        params = method.shared_model(message) if shared else method.personal_models(own, message, data)
        values: Params = {}
        for half, task in method.base_and_novel.items():
            ready, model = method.adapter.prepare(task, params, {}), Model(method.adapter, task)
            rows = [correct_by_class(model, task, model_at(ready, i), data.extras[half]) for i in range(len(data))]
            values[half] = torch.stack(rows)
        return Answer(own, values)


def correct_by_class(model: Model, task: Task, params: Params, examples: Extra) -> Tensor:
    assert examples.y is not None
    right, block = [], model.adapter.limits.examples
    for x, y in zip(torch.split(examples.x, block), torch.split(examples.y, block), strict=True):
        right.append(model.adapter.task_type.score(model.logits(params, x[None]), y[None])[0])
    counts = torch.bincount(examples.y[torch.cat(right)].cpu(), minlength=len(task.classes))
    return counts.to(torch.get_default_dtype())
