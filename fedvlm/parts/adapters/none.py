"""Zero-shot: the frozen model without training. Logits = scale · cos(image, class name)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.state import Params


@dataclass(frozen=True)
class Nothing(Adapter):
    open_vocabulary: ClassVar[bool] = True

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * x @ task.names().mT

    def to_linear(self, task: Task, params: Params) -> Tensor:
        return task.scale * task.names()
