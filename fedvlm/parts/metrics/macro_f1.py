"""Macro F1: the mean over classes of 2·TP / (2·TP + FP + FN); classes neither present nor predicted are left out."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.metric import Additive
from fedvlm.core.model import Model


@dataclass(frozen=True)
class MacroF1(Additive):
    limits: ClassVar[tuple[float, float]] = (0, 1)

    def shape(self, model: Model) -> tuple[int, ...]:
        return (len(model.task.classes), 3)

    def each(self, model: Model, logits: Tensor, y: Tensor) -> Tensor:
        classes = len(model.task.classes)
        present = torch.nn.functional.one_hot(y, classes)
        predicted = torch.nn.functional.one_hot(logits.max(-1).indices, classes)
        counts = torch.stack([present * predicted, present, predicted], -1)  # TP, TP + FN, TP + FP
        return counts.to(logits.dtype)

    def result(self, statistic: np.ndarray, count: np.ndarray) -> np.ndarray:
        hit, total = statistic[..., 0], statistic[..., 1] + statistic[..., 2]
        with np.errstate(invalid="ignore", divide="ignore"):
            f1 = np.where(total > 0, 2 * hit / total, np.nan)
            known = (total > 0).sum(-1)
            return np.where(known > 0, np.nansum(f1, -1) / known, np.nan)
