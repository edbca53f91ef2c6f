"""Visual prompt tuning (VPT, Jia et al., 2022): learned tokens stand beside the image's own; the model stays.

Shallow: `tokens` vectors join the class token and the patches where they enter the image tower, and go through it with them.
Deep: each layer gets new ones in place of what became of the last. logits = scale · cos(image, class name).
layers=n lets the tokens join at the last n layers only, below which nothing has to be computed twice; 0 is the whole tower.
Parameters, shared: `tokens` [1 or layers, tokens, width] ~ N(0, 0.02).

Our reading: a token joins behind the tower's first norm, not before it; the paper's own start is uniform.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import Task
from fedvlm.adapters.layered import Layered, towers_of
from fedvlm.core import FedvlmError, Params
from fedvlm.seeds import generator


@dataclass(frozen=True)
class Visual(Layered):
    tokens: int = 8
    deep: bool = False  # new ones at each layer

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise FedvlmError(f"tokens={self.tokens} must be at least 1; zero-shot is the recipe without any")

    def init(self, task: Task, seed: int) -> Params:
        task.names()
        top = towers_of(task).image.last(self.layers)
        depth = len(top.layers) if self.deep else 1
        return {"tokens": 0.02 * torch.randn(depth, self.tokens, top.width, generator=generator(seed, 59))}

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        tokens = params["tokens"]
        top = towers_of(task, self.precision).image.last(self.layers)
        return F.normalize(top.features(x, tokens=tokens).to(tokens.dtype), dim=-1)
