"""A linear classifier on frozen image embeddings: logits = scale · W h, with W shared."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter, Task, initial_classifier
from fedvlm.core.state import Params, linear


@dataclass(frozen=True)
class Head(Adapter):
    """A linear classifier on the embedding, one vector for each class."""

    init_from: Literal["text", "random"] = "text"  # initial classifier: embeddings of the class names, or random

    alignment: ClassVar[Literal["images", "classes"]] = "classes"
    linear_head: ClassVar[bool] = True

    def init(self, task: Task, seed: int) -> Params:
        return {"head": initial_classifier(task, self.init_from, seed)}

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        return params["head"]

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * linear(x, params["head"])

    def gradient(self, task: Task, params: Params, x: Tensor, residual: Tensor) -> Params:
        return {"head": task.scale * torch.bmm(residual.mT, x)}

    def to_linear(self, task: Task, params: Params) -> Tensor:
        return task.scale * params["head"]
