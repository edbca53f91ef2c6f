"""The loss of the task type on each example: cross-entropy, or the mask loss."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedvlm.core.metric import Additive
from fedvlm.core.model import Model
from fedvlm.core.schema import VALIDATION
from fedvlm.core.tasks import CLASSIFICATION, NEXT_CHARACTER, SEGMENTATION, TaskType


@dataclass(frozen=True)
class Loss(Additive):
    lower_is_better: ClassVar[bool] = True
    percent: ClassVar[bool] = False
    task_types: ClassVar[tuple[TaskType, ...]] = (CLASSIFICATION, NEXT_CHARACTER, SEGMENTATION)
    limits: ClassVar[tuple[float, float]] = (VALIDATION.low, VALIDATION.high)

    def each(self, model: Model, logits: Tensor, y: Tensor) -> Tensor:
        return model.adapter.task_type.loss(logits, y)
