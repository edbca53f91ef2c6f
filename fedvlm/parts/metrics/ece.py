"""Expected calibration error (Naeini et al., 2015): the mean distance between confidence and accuracy, over 15 equal bins.

ECE = Σ_b |Σ_{i in b} (correct_i − confidence_i)| / n, so that it is not a mean over examples: clients send sums by bin.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.metric import Additive, one_hot_statistic
from fedvlm.core.model import Model
from fedvlm.core.ranges import Count


@dataclass(frozen=True)
class Ece(Additive):
    bins: Count = 15  # of equal width, from confidence 0 to 1

    lower_is_better: ClassVar[bool] = True
    limits: ClassVar[tuple[float, float]] = (-1, 1)

    def shape(self, model: Model) -> tuple[int, ...]:
        return (self.bins, 1)

    def each(self, model: Model, logits: Tensor, y: Tensor) -> Tensor:
        confidence, predicted = logits.softmax(-1).max(-1)
        which = (confidence * self.bins).long().clamp(max=self.bins - 1)
        difference = (predicted == y).to(confidence.dtype) - confidence
        return one_hot_statistic(which, torch.stack([difference], -1), self.bins)

    def result(self, statistic: np.ndarray, count: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.abs(statistic[..., 0]).sum(-1) / count)
