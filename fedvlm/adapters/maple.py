"""MaPLe (Khattak et al., 2023), federated (FedMaPLe): the context before a class name is learned, and the image tower gets
tokens that are linear images of it.

Text: [start] v₁ … vₙ NAME . [end]; image: class token, patches and W v₁ + b … W vₙ + b. The first `depth` layers of each
tower get vectors of their own, with a W and b of their own, in place of what became of the last ones. logits = scale · cos.
Parameters, all shared: `context` [1, n, width], `deep` [depth − 1, n, width], `couple.weight` [depth, image width, width],
`couple.bias` [depth, image width].

As in the paper two vectors start as the first words of "a photo of a", deeper ones at N(0, 0.02). The paper's depth is 9 of
12 layers; ours is 3, and image tokens join behind the tower's first norm (our reading). layers=n lets them join at the last
n layers only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import Task
from fedvlm.adapters.layered import Layered, towers_of
from fedvlm.adapters.prompt import plan
from fedvlm.backbones.text import TextTower
from fedvlm.core import FedvlmError, Params
from fedvlm.seeds import generator


@dataclass(frozen=True)
class Maple(Layered):
    context: int = 2  # vectors
    depth: int = 3  # layers of each tower that get vectors of their own
    phrase: str = "a photo of a"  # words to start from; none: noise

    def init(self, task: Task, seed: int) -> Params:
        reader, top = towers_of(task).text, towers_of(task).image.last(self.layers)
        most, n, width = min(len(top.layers), len(reader.layers)), self.context, reader.width
        if not 1 <= self.depth <= most:
            raise FedvlmError(f"depth={self.depth}: the towers have {most} layers for it; use depth=1 to {most}")
        draw = generator(seed, 61)
        deep = 0.02 * torch.randn(self.depth, n, width, generator=draw)  # the first where there are no words
        words = first_words(reader, self.phrase, deep[0])
        weight, bias = (2 * torch.rand(self.depth, top.width, k, generator=draw) - 1 for k in (width, 1))
        coupled = {"couple.weight": weight / width**0.5, "couple.bias": bias[..., 0] / width**0.5}
        more = {"deep": deep[1:]} if self.depth > 1 else {}
        return {"context": words[None], **more, **coupled}

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        vectors = torch.cat([params["context"], *([params["deep"]] if "deep" in params else [])], 1)
        tokens = vectors @ params["couple.weight"].mT + params["couple.bias"][:, :, None]
        top = towers_of(task, self.precision).image.last(self.layers)
        return F.normalize(top.features(x, tokens=tokens).to(tokens.dtype), dim=-1)

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        reader, context = towers_of(task, self.precision).text, params["context"]
        prompts = plan(reader, task.classes, context.shape[2], "end")
        return reader.features(prompts, context, deep=params.get("deep"))


def first_words(reader: TextTower, phrase: str, noise: Tensor) -> Tensor:
    """As many vectors as there are of noise [n, width]: the first words of the phrase, or the noise where there is none."""
    n, words = len(noise), reader.phrase(phrase).to(noise) if phrase else noise
    if len(words) < n or n < 1:
        raise FedvlmError(f"context={n}: phrase='{phrase}' has {len(words)} words to start from; phrase= is noise")
    return words[:n]
