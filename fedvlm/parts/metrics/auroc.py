"""AUROC of a client's test images against outsiders (outsiders=), by three scores: MCM, max logit, energy."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.detection import SCORES, Scores, auroc
from fedvlm.core.metric import ClientView, PerClient
from fedvlm.core.model import Model


@dataclass(frozen=True)
class Auroc(PerClient):
    extra: ClassVar[str] = "outsiders"
    limits: ClassVar[tuple[float, float]] = (-1, 1)

    def shape(self, model: Model) -> tuple[int, ...]:
        return (len(SCORES),)

    def measure(self, inside: Scores, outside: Scores) -> float | None:
        """The area under the ROC curve for the scores of test images and of outsiders; None where there are none."""
        return auroc(inside, outside)

    def client(self, view: ClientView) -> Tensor:
        inside, outside = view.detection_scores("test"), view.detection_scores("outsiders")
        values = [self.measure(inside[score], outside[score]) for score in SCORES]
        return torch.tensor([-1.0 if v is None else v for v in values], dtype=torch.get_default_dtype())

    def result(self, statistic: np.ndarray, count: np.ndarray) -> np.ndarray:
        """The measure by the first score, MCM; −1 marks a client without test images."""
        return np.where(statistic[..., 0] < 0, np.nan, statistic[..., 0])
