"""What a metric is: a statistic that every client sends, and the number that it means.

A metric whose statistic adds up over examples (accuracy, calibration error, F1) derives from `Additive` and describes one
example. Any other (AUROC, average precision) derives from `PerClient` and sees all predictions of a client at once. In
both cases `result` turns statistics into numbers; it need not be a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.model import Model
from fedvlm.core.tasks import CLASSIFICATION, NEXT_CHARACTER, TaskType


@dataclass(frozen=True)
class Metric:
    """A statistic of each client, and the number that it means; derive from `Additive` or `PerClient`."""

    lower_is_better: ClassVar[bool] = False
    percent: ClassVar[bool] = True  # tables show 100 × the value
    # measured where the data has extra examples of this name (outsiders=, corrupt=); "" always
    extra: ClassVar[str] = ""
    limits: ClassVar[tuple[float, float]] = (-math.inf, math.inf)  # of a statistic (additive ones: of one example);
    # a client that sends one outside is refused
    task_types: ClassVar[tuple[TaskType, ...]] = (CLASSIFICATION, NEXT_CHARACTER)

    def shape(self, model: Model) -> tuple[int, ...]:
        """The shape of one client's statistic on one split; () is a number."""
        return ()

    def result(self, statistic: np.ndarray, count: np.ndarray) -> np.ndarray:
        """The values [n] from statistics [n, *shape] over `count` [n] examples; NaN where there is none. Called with the
        statistics of each client, and for additive metrics also with their sum over clients."""
        raise NotImplementedError


@dataclass(frozen=True)
class Additive(Metric):
    """A metric whose statistic adds up over examples: it describes one example."""

    def each(self, model: Model, logits: Tensor, y: Tensor) -> Tensor:
        """The statistic of each example, [clients, examples, *shape], of logits [clients, examples, ...]."""
        raise NotImplementedError

    def result(self, statistic: np.ndarray, count: np.ndarray) -> np.ndarray:
        """The mean over examples."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(statistic / count)


@dataclass(frozen=True)
class PerClient(Metric):
    """A metric that sees all predictions of a client at once."""

    def client(self, view: ClientView) -> Tensor:
        """The statistic of one client, [*shape], finite: encode a missing value (say, as −1) and decode it in `result`."""
        raise NotImplementedError


@dataclass(frozen=True)
class ClientView:
    """One model and one client's data, for metrics that need all predictions at once. `data` is a split ("train", "val",
    "test": the client's own examples) or the name of extra examples ("outsiders")."""

    model: Model
    logits_of: Callable[[str], Tensor]
    labels_of: Callable[[str], Tensor]
    scores_of: Callable[[str], dict[str, Tensor]]

    def logits(self, data: str = "test") -> Tensor:
        """[examples, ...]."""
        return self.logits_of(data)

    def labels(self, data: str = "test") -> Tensor:
        return self.labels_of(data)

    def detection_scores(self, data: str = "test") -> dict[str, Tensor]:
        """Detection scores (see core/detection.py) by name, [examples]; higher is more in-distribution."""
        return self.scores_of(data)


def one_hot_statistic(which: Tensor, values: Tensor, size: int) -> Tensor:
    """Statistics for binned metrics: `values` [..., k] at position `which` [...] of `size` bins, zero elsewhere;
    [..., size, k]."""
    return torch.nn.functional.one_hot(which, size).to(values.dtype)[..., None] * values[..., None, :]
