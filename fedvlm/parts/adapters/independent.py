"""Independent prompts in both towers (IVLP), the prompts of PromptSRC (Khattak et al., ICCV 2023).

Text: [start] v₁ … vₙ NAME . [end]; image: class token, patches and tokens t₁ … tₙ. Each of the first `depth` layers of each
tower has vectors of its own, as in MaPLe, but the image's are parameters and no map of the text's. logits = scale · cos.
Parameters, all shared: `context` [1, n, width], `deep` [depth − 1, n, width], `tokens` [depth, n, image width].

As in the paper four vectors start as "a photo of a", the others at N(0, 0.02), in nine layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.ranges import Count
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params
from fedvlm.parts.adapters.layered import towers_of
from fedvlm.parts.adapters.maple import Maple


@dataclass(frozen=True)
class Independent(Maple):
    context: Count = 4  # n, learned vectors before a class name, and tokens beside the image's patches

    def init(self, task: Task, seed: int) -> Params:
        coupled = super().init(task, seed)
        depth, width, _ = coupled["couple.weight"].shape
        tokens = 0.02 * torch.randn(depth, self.context, width, generator=generator(seed, 79))
        return {k: v for k, v in coupled.items() if not k.startswith("couple.")} | {"tokens": tokens}

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor:
        image_layers = towers_of(task, self.precision).image.last(self.layers)
        return image_layers.features(x, tokens=params["tokens"]).to(params["tokens"].dtype)
