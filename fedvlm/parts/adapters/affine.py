"""A linear classifier with a bias on frozen image embeddings: logits = scale · (W h + b), both shared.

`fourier` > 0 appends so many random Fourier features cos(Ω h + u)·√(2/fourier) (Rahimi and Recht, 2007), Ω normal with
standard deviation `bandwidth`, u uniform, both the same for everybody: the classifier is then that of a Gaussian kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter, Task, initial_classifier
from fedvlm.core.ranges import Positive, Whole
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params, linear

FREQUENCIES = 9  # the purpose of the draw; the same in every run, so that nobody has to send them


@dataclass(frozen=True)
class Affine(Adapter):
    init_from: Literal["text", "random"] = "text"  # initial classifier: embeddings of the class names, or random
    fourier: Whole = 0  # random Fourier features beside the embedding; 0: none
    bandwidth: Positive = 1.0  # of the Fourier features: the standard deviation of their frequencies

    linear_head: ClassVar[bool] = True

    def init(self, task: Task, seed: int) -> Params:
        head = initial_classifier(task, self.init_from, seed)
        head = torch.cat([head, head.new_zeros(len(head), self.fourier)], dim=1)
        return {"head": head, "bias": head.new_zeros(len(head))}

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        if not self.fourier:
            return x
        frequencies, phases = random_features(task.dim, self.fourier, self.bandwidth)
        waves = torch.cos(x @ frequencies.to(x) + phases.to(x)) * math.sqrt(2 / self.fourier)
        return torch.cat([x, waves], dim=-1)

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * linear(self.features(task, params, x), params["head"], params["bias"])

    def gradient(self, task: Task, params: Params, x: Tensor, residual: Tensor) -> Params:
        head = torch.bmm(residual.mT, self.features(task, params, x))
        return {"head": task.scale * head, "bias": task.scale * residual.sum(-2)}


@lru_cache(maxsize=4)
def random_features(dim: int, count: int, width: float) -> tuple[Tensor, Tensor]:
    """Ω [dim, count] and u [count]."""
    rng = generator(0, FREQUENCIES)
    frequencies = width * torch.randn(dim, count, generator=rng, dtype=torch.float64)
    return frequencies, 2 * math.pi * torch.rand(count, generator=rng, dtype=torch.float64)
