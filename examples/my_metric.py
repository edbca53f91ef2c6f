"""Worst-class recall: the share of correct predictions in the class where it is lowest."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedvlm.parts import Additive, Model


@dataclass(frozen=True)
class WorstClass(Additive):
    def shape(self, model: Model) -> tuple[int, ...]:
        """What a client sends for each split: correct and all examples of each class."""
        return (len(model.task.classes), 2)

    def each(self, model: Model, logits: Tensor, y: Tensor) -> Tensor:
        """The same for one example, [clients, examples, classes, 2]; sums over examples are what goes up."""
        present = one_hot(y, len(model.task.classes))
        correct = present * (logits.argmax(-1) == y)[..., None]
        return torch.stack([correct, present], -1).to(logits.dtype)

    def result(self, statistic: np.ndarray, count: np.ndarray) -> np.ndarray:
        """One value from each of n such sums [n, classes, 2]; NaN where there are no examples."""
        correct, present = statistic[..., 0], statistic[..., 1]
        recall = np.where(present > 0, correct / np.maximum(present, 1), np.inf)
        return np.where(count > 0, recall.min(-1), np.nan)
