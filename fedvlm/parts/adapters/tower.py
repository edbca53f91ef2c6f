"""Full fine-tuning: CLIP's whole image tower is trained and shared, the embeddings of the class names are frozen.

logits = scale · cos(tower(pixels), class name).  Training starts from the backbone's weights, so round 0 is zero-shot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.core.adapter import Task
from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.network import Network


@dataclass(frozen=True)
class Tower(Network):
    view: ClassVar[str] = "pixels"
    requires: ClassVar[str] = "image tower"
    open_vocabulary: ClassVar[bool] = True

    def module(self, task: Task) -> nn.Module:
        if not isinstance(task.tower, nn.Module):
            raise FedvlmError("adapter=tower trains a CLIP's own image tower, and this backbone has none to give")
        return task.tower

    def init(self, task: Task, seed: int) -> Params:
        task.names()
        dtype = torch.get_default_dtype()
        return {k: v.detach().to(dtype).clone() for k, v in self.module(task).named_parameters()}

    def logits_and_features(
        self, task: Task, params: Params, x: Tensor, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The features are the embedding before normalisation, where differences are not scaled down (CORAL)."""
        embedding, _ = super().logits_and_features(task, params, x, real)
        return task.scale * F.normalize(embedding, dim=-1) @ task.names().mT, embedding

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return F.normalize(super().features(task, params, x), dim=-1)
