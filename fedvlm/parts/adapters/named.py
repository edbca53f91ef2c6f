"""A linear map of image embeddings, compared with the class names: logits = scale · T (M h + b), T the names' embeddings.

M and b are shared and the same for all classes, so that it also classifies among classes that nobody has examples of.
Starts as zero-shot: M = I, b = 0.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.state import Params, linear


@dataclass(frozen=True)
class Named(Adapter):
    open_vocabulary: ClassVar[bool] = True
    linear_head: ClassVar[bool] = True

    def init(self, task: Task, seed: int) -> Params:
        return {"head": torch.eye(task.dim), "bias": torch.zeros(task.dim)}

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * linear(x, params["head"], params["bias"]) @ task.names().mT
