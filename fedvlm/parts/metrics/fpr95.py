"""FPR95 of outsiders (outsiders=), by three scores: MCM, max logit, energy.

The share of outsiders accepted by the threshold that accepts 95 % of a client's test images.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedvlm.core.detection import Scores, fpr_at
from fedvlm.parts.metrics.auroc import Auroc


@dataclass(frozen=True)
class Fpr95(Auroc):
    lower_is_better: ClassVar[bool] = True

    def measure(self, inside: Scores, outside: Scores) -> float | None:
        return fpr_at(inside, outside)
