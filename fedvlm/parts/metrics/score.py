"""The score of the task type: accuracy, or the Dice coefficient of an image."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedvlm.core.metric import Additive
from fedvlm.core.model import Model
from fedvlm.core.tasks import CLASSIFICATION, NEXT_CHARACTER, SEGMENTATION, TaskType


@dataclass(frozen=True)
class Score(Additive):
    task_types: ClassVar[tuple[TaskType, ...]] = (CLASSIFICATION, NEXT_CHARACTER, SEGMENTATION)
    limits: ClassVar[tuple[float, float]] = (0, 1)

    def each(self, model: Model, logits: Tensor, y: Tensor) -> Tensor:
        return model.adapter.task_type.score(logits, y)
