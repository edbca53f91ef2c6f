"""MaPLe (Khattak et al., 2023), federated (FedMaPLe): a learned context, and image tokens computed from it.

Text: [start] v₁ … vₙ NAME . [end]; image: class token, patches and the tokens W v₁ + b … W vₙ + b. Each of the first
`depth` layers of each tower has its own vectors v, with their own W and b; they replace the output of the layer below
for the previous ones. logits = scale · cos.
Parameters, all shared: `context` [1, n, width], `deep` [depth − 1, n, width], `couple.weight` [depth, image width,
width], `couple.bias` [depth, image width].

As in the paper two vectors start as the first words of "a photo of a", deeper ones at N(0, 0.02), and the depth is 9;
towers with fewer layers have vectors in all of them. Image tokens enter after the tower's first norm (our reading). With
layers=n they enter at the last n layers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.ranges import Count
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.layered import Layered, towers_of
from fedvlm.parts.adapters.prompt import prompt_plan
from fedvlm.system import console
from fedvlm.towers.text import TextTower


@dataclass(frozen=True)
class Maple(Layered):
    context: Count = 2  # n, learned vectors before a class name
    depth: Count = 9  # layers of each tower that have their own vectors, or all where a tower has fewer
    phrase: str = "a photo of a"  # words that the context starts from; "": noise

    def init(self, task: Task, seed: int) -> Params:
        text_tower, image_layers = towers_of(task).text, towers_of(task).image.last(self.layers)
        n, width = self.context, text_tower.width
        depth = clamped(self.depth, min(len(image_layers.layers), len(text_tower.layers)))
        rng = generator(seed, 61)
        deep = 0.02 * torch.randn(depth, n, width, generator=rng)  # deep[0] is the context where phrase=""
        context = initial_context(text_tower, self.phrase, deep[0])
        weight, bias = (2 * torch.rand(depth, image_layers.width, k, generator=rng) - 1 for k in (width, 1))
        coupling = {"couple.weight": weight / width**0.5, "couple.bias": bias[..., 0] / width**0.5}
        further = {"deep": deep[1:]} if depth > 1 else {}
        return {"context": context[None], **further, **coupling}

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor:
        vectors = torch.cat([params["context"], *([params["deep"]] if "deep" in params else [])], 1)
        tokens = vectors @ params["couple.weight"].mT + params["couple.bias"][:, :, None]
        image_layers = towers_of(task, self.precision).image.last(self.layers)
        return image_layers.features(x, tokens=tokens).to(tokens.dtype)

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        text_tower, context = towers_of(task, self.precision).text, params["context"]
        prompts = prompt_plan(text_tower, task.classes, context.shape[2], "end")
        return text_tower.features(prompts, context, deep=params.get("deep"))


@lru_cache
def clamped(depth: int, layers: int) -> int:
    """The depth, at most the number of layers; a warning is given once in a process."""
    if depth > layers:
        console.warn(
            f"depth={depth}: the smaller tower has {layers} layers for it, and all of them get their own vectors"
        )
    return min(depth, layers)


def initial_context(text_tower: TextTower, phrase: str, noise: Tensor) -> Tensor:
    """The context's start [n, width]: the token embeddings of the phrase's first n words, or `noise` where phrase=""."""
    n, words = len(noise), text_tower.phrase(phrase).to(noise) if phrase else noise
    if len(words) < n or n < 1:
        raise FedvlmError(f"context={n}: phrase='{phrase}' has {len(words)} words to start from; phrase= is noise")
    return words[:n]
