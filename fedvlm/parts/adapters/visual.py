"""Visual prompt tuning (VPT, Jia et al., 2022): learned tokens enter the image tower beside the image's; it is frozen.

Shallow: `tokens` vectors are added to the class token and the patches at the input of the image tower, and pass through
it with them. Deep: at each layer new vectors replace the output of the layer below for the previous ones.
logits = scale · cos(image, class name). With layers=n the tokens enter at the last n layers only, so that the
activations below are computed once and stored; 0 is the whole tower.
Parameters, shared: `tokens` [1 or layers, tokens, width] ~ N(0, 0.02).

Our reading: tokens enter after the tower's first norm, not before it; the paper itself starts from a uniform
distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.ranges import Count
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params
from fedvlm.parts.adapters.layered import Layered, towers_of


@dataclass(frozen=True)
class Visual(Layered):
    tokens: Count = 8  # learned tokens beside the image's patches
    deep: bool = False  # new tokens at each layer; false: at the first only

    def init(self, task: Task, seed: int) -> Params:
        task.names()
        image_layers = towers_of(task).image.last(self.layers)
        depth = len(image_layers.layers) if self.deep else 1
        return {"tokens": 0.02 * torch.randn(depth, self.tokens, image_layers.width, generator=generator(seed, 59))}

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor:
        tokens = params["tokens"]
        image_layers = towers_of(task, self.precision).image.last(self.layers)
        return image_layers.features(x, tokens=tokens).to(tokens.dtype)
