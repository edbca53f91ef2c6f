"""CLIP whole: both encoders are trained and averaged, which is FedAvg and FedProx on CLIP in FedCLIP's tables.

logits = scale · cos(image tower(pixels), text tower(class name in the run's template)), with the backbone's own scale.
Training starts from the backbone's weights, so round 0 is zero-shot. With mask=true FedCLIP's mask weights the image
embedding and is trained, too (Figure 3b: adapter and backbone); round 0 is FedCLIP's then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedvlm.core.adapter import TEXT_FEATURES, Task
from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.attention import Attention
from fedvlm.parts.adapters.layered import require_phrases
from fedvlm.parts.adapters.network import single_clients
from fedvlm.parts.adapters.tower import Tower
from fedvlm.towers.whole import WholeModel

MASK = "mask."  # prefix of the mask's parameters


@dataclass(frozen=True)
class BothTowers(Tower):
    mask: bool = False  # also train FedCLIP's mask of the image embedding

    requires: ClassVar[str] = "whole model"

    def module(self, task: Task) -> WholeModel:
        if not isinstance(task.tower, WholeModel):
            raise FedvlmError("adapter=both_towers trains a CLIP whole, and this backbone has none to give")
        return task.tower

    def init(self, task: Task, seed: int) -> Params:
        require_phrases(task)
        mask = {MASK + k: v for k, v in Attention().init(task, seed).items()} if self.mask else {}
        return super().init(task, seed) | mask

    def encode(
        self, task: Task, params: Params, x: Tensor | None, phrases: Sequence[str] = ()
    ) -> tuple[Tensor, Tensor]:
        """Image and text embeddings of each client, [clients, …, dim]; empty without images or phrases."""
        module = self.module(task)
        tokens = tokens_of(module, tuple(phrases)) if phrases else None
        weights = {k: v for k, v in params.items() if not k.startswith((MASK, TEXT_FEATURES))}
        clients = max([1 if x is None else len(x), *map(len, weights.values())])
        models = single_clients(weights, clients)
        with self.autocast(next(iter(weights.values())).device):
            found = [
                functional_call(module, models[i], (None if x is None else x[i % len(x)], tokens))
                for i in range(clients)
            ]
        images, text = (self.widened(torch.stack(each)) for each in zip(*found, strict=True))
        if self.mask and x is not None:
            images = task.dim * Attention().masked({k: params[MASK + k] for k in ("w1", "b1", "w2", "b2")}, images)
        return images, text

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        text = F.normalize(self.encode(task, params, None, require_phrases(task))[1], dim=-1)
        return params | {TEXT_FEATURES: text}

    def logits_and_features(
        self, task: Task, params: Params, x: Tensor, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The features are the image embedding before normalisation."""
        known = params.get(TEXT_FEATURES)
        images, text = self.encode(task, params, x, () if known is not None else require_phrases(task))
        text = F.normalize(text, dim=-1) if known is None else known
        return task.scale * F.normalize(images, dim=-1) @ text.mT, images

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return F.normalize(self.encode(task, params, x)[0], dim=-1)


@lru_cache(maxsize=8)
def tokens_of(module: WholeModel, phrases: tuple[str, ...]) -> Tensor:
    return module.tokens(phrases)
