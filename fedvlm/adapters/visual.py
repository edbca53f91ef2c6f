"""Visual prompt tuning (VPT, Jia et al., 2022): learned tokens stand beside the image's own; the model stays.

Shallow: `tokens` vectors join the class token and the patches where they enter the image tower, and go through it with them.
Deep: each layer gets new ones in place of what became of the last. logits = scale · cos(image, class name).
layers=n lets the tokens join at the last n layers only, below which nothing has to be computed twice; 0 is the whole tower.
Parameters, shared: `tokens` [1 or layers, tokens, width] ~ N(0, 0.02).

Our reading: a token joins behind the tower's first norm, not before it; the paper's own start is uniform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import Adapter, Task
from fedvlm.adapters.lora import Precision, towers_of
from fedvlm.core import Batch, FedvlmError, Params
from fedvlm.seeds import generator


@dataclass(frozen=True)
class Visual(Adapter):
    tokens: int = 8
    layers: int = 0  # of the image tower, the last, that see them; 0 is all
    deep: bool = False  # new ones at each layer
    precision: Precision = "full"

    needs: ClassVar[str] = "both towers"
    heavy: ClassVar[bool] = True
    most: ClassVar[int] = 4
    block: ClassVar[int] = 256

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise FedvlmError(f"tokens={self.tokens} must be at least 1; zero-shot is the recipe without any")

    @property
    def reads(self) -> str:  # type: ignore[override]
        return f"hidden@{-self.layers}"

    @property
    def opens(self) -> bool:
        return True

    def init(self, task: Task, seed: int) -> Params:
        task.names()
        top = towers_of(task).image.last(self.layers)
        depth = len(top.layers) if self.deep else 1
        return {"tokens": 0.02 * torch.randn(depth, self.tokens, top.width, generator=generator(seed, 59))}

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        tokens = params["tokens"]
        top = towers_of(task, self.precision).image.last(self.layers)
        return F.normalize(top.features(x, tokens=tokens).to(tokens.dtype), dim=-1)

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return against_names(task, self.features(task, params, x))

    def both(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        features = self.features(task, params, batch.x)
        return against_names(task, features), features


def against_names(task: Task, features: Tensor) -> Tensor:
    return task.scale * features @ task.names().to(features).mT
