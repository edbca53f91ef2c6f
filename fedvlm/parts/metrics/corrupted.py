"""Accuracy on corrupted versions of the test images (corrupt=): the mean over all versions."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedvlm.core.metric import Additive
from fedvlm.core.model import Model


@dataclass(frozen=True)
class Corrupted(Additive):
    extra: ClassVar[str] = "corrupted"
    limits: ClassVar[tuple[float, float]] = (0, 1)

    def each(self, model: Model, logits: Tensor, y: Tensor) -> Tensor:
        return model.adapter.task_type.score(logits, y)
