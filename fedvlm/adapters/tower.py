"""Full fine-tuning of a foundation model: CLIP's whole image tower is trained, the class names' embeddings stay.

logits = scale · cos(tower(pixels), class name).  The start is the backbone as it is, so round 0 is zero-shot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.adapters.base import Task
from fedvlm.adapters.network import Network
from fedvlm.core import FedvlmError, Params


@dataclass(frozen=True)
class Tower(Network):
    view: ClassVar[str] = "pixels"
    requires: ClassVar[str] = "image tower"
    open_vocabulary: ClassVar[bool] = True

    def module(self, task: Task) -> nn.Module:
        if task.tower is None:
            raise FedvlmError("adapter=tower trains a CLIP's own image tower, and this backbone has none to give")
        return task.tower  # type: ignore[no-any-return]

    def init(self, task: Task, seed: int) -> Params:
        task.names()
        kind = torch.get_default_dtype()
        return {k: v.detach().to(kind).clone() for k, v in self.module(task).named_parameters()}

    def each(self, task: Task, params: Params, x: Tensor, real: Any = None) -> tuple[Tensor, Tensor]:
        found, _ = super().each(task, params, x, real)
        features = F.normalize(found, dim=-1)
        return task.scale * features @ task.names().mT, features
