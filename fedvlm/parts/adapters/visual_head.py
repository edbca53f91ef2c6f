"""VPT as in FedOT's tables: private tokens in the image tower, and a shared classifier that starts as the class names.

Tokens as in adapter=visual, in the first `depth` layers (FedOT's VPT-shallow has 1, its VPT-deep 2 or 9; towers with
fewer layers have tokens in all of them); logits = scale · w_g z/‖z‖ with z the image's embedding. FedOT's Table 3 counts
w_g (K d) at the server, and w_g and the tokens on a client. Parameters: `head` [K, d], private `tokens` [depth, n, width].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.adapter import Task, initial_classifier
from fedvlm.core.ranges import Count
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params
from fedvlm.parts.adapters.layered import Layered, towers_of
from fedvlm.parts.adapters.maple import clamped


@dataclass(frozen=True)
class VisualHead(Layered):
    private: tuple[str, ...] = ("tokens",)
    tokens: Count = 2  # n, learned tokens beside the image's patches
    depth: Count = 1  # layers that have tokens of their own, or all where the tower has fewer

    open_vocabulary: ClassVar[bool] = False

    def init(self, task: Task, seed: int) -> Params:
        image_layers = towers_of(task).image.last(self.layers)
        shape = clamped(self.depth, len(image_layers.layers)), self.tokens, image_layers.width
        tokens = 0.02 * torch.randn(shape, generator=generator(seed, 79))
        return {"head": initial_classifier(task, "text", seed), "tokens": tokens}

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor:
        tokens = params["tokens"]
        image_layers = towers_of(task, self.precision).image.last(self.layers)
        return image_layers.features(x, tokens=tokens).to(tokens.dtype)

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        return params["head"]
