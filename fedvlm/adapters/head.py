"""A linear classifier on frozen image embeddings: logits = scale · w h."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvlm.adapters.base import Adapter, Task, classifier
from fedvlm.core import Params, linear


@dataclass(frozen=True)
class Head(Adapter):
    init_from: Literal["text", "random"] = "text"  # where the classifier starts

    transposes: ClassVar[bool] = True
    aligns: ClassVar[str] = "classes"

    def init(self, task: Task, seed: int) -> Params:
        return {"head": classifier(task, self.init_from, seed)}

    def classes(self, task: Task, params: Params) -> Tensor:
        return params["head"]

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * linear(x, params["head"])

    def transpose(self, task: Task, params: Params, x: Tensor, residual: Tensor) -> Params:
        return {"head": task.scale * torch.bmm(residual.mT, x)}

    def fold(self, task: Task, params: Params) -> Tensor | None:
        return task.scale * params["head"]
