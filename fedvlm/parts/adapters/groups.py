"""FedMGP's prompts (Bo et al., NeurIPS 2025): groups of a text context and image tokens, of which some are shared.

Group g has a context of n vectors before the class names and n tokens beside the image's patches, both at the first layer;
logits = scale · mean over groups of cos(image_g, text_g). Of G = 5 groups s = 2 are shared, the others private. Shared:
`context` [s, n, width], `tokens` [s, n, image width]; private: `own.context`, `own.tokens`, [G − s, …] each. The groups
start from different draws. A newcomer, who has no private groups, has the shared ones in their place, in turn.

local=groups chooses in every round which groups are sent (the paper); under another rule these are always the same.
Our reading: the mean is over logits. The paper's s = 2 and n = 2 are 5,120 numbers up for ViT-B/16, as it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import TEXT_FEATURES, Limits, Task
from fedvlm.core.data import Batch
from fedvlm.core.ranges import Count
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params
from fedvlm.parts.adapters.layered import Layered, towers_of
from fedvlm.parts.adapters.prompt import prompt_plan


@dataclass(frozen=True)
class Groups(Layered):
    private: tuple[str, ...] = ("own.context", "own.tokens")
    context: Count = 2  # n, learned vectors before a class name, and tokens beside the image's patches, of each group
    shared_groups: Count = 2  # s, groups that are averaged
    own_groups: Count = 3  # G − s, groups that stay with the client

    limits: ClassVar[Limits] = Limits(examples=256, clients=2, gpu=True)
    exchangeable: ClassVar[tuple[tuple[str, str], ...]] = (("context", "own.context"), ("tokens", "own.tokens"))

    def init(self, task: Task, seed: int) -> Params:
        towers, count = towers_of(task), self.shared_groups + self.own_groups
        widths = {"context": towers.text.width, "tokens": towers.image.last(self.layers).width}
        params: Params = {}
        for at, (shared, own) in enumerate(self.exchangeable):
            drawn = 0.02 * torch.randn(count, self.context, widths[shared], generator=generator(seed, 97, at))
            params |= {shared: drawn[: self.shared_groups], own: drawn[self.shared_groups :]}
        return params

    def shared_only(self, params: Params) -> Params:
        in_turn = torch.arange(self.own_groups) % self.shared_groups
        return params | {own: params[shared][:, in_turn].expand_as(params[own]) for shared, own in self.exchangeable}

    def every(self, params: Params, at: int) -> Tensor:
        """All groups' contexts (0) or tokens (1), the shared ones first: [clients, G, n, width]."""
        shared, own = (params[k] for k in self.exchangeable[at])
        clients = max(len(shared), len(own))
        return torch.cat([shared.expand(clients, -1, -1, -1), own.expand(clients, -1, -1, -1)], 1)

    def texts(self, task: Task, params: Params) -> Tensor:
        """[clients, G, classes, dim]."""
        tower, contexts = towers_of(task, self.precision).text, self.every(params, 0)
        text = tower.features(prompt_plan(tower, task.classes, self.context, "end"), contexts.flatten(0, 1)[:, None])
        return torch.unflatten(text, 0, contexts.shape[:2])

    def images(self, task: Task, params: Params, x: Tensor) -> Tensor:
        """[clients, G, examples, dim], normalised."""
        tower, tokens = towers_of(task, self.precision).image.last(self.layers), self.every(params, 1)
        found = [tower.features(x, tokens=tokens[:, g : g + 1]) for g in range(tokens.shape[1])]
        return F.normalize(torch.stack(found, 1).to(tokens.dtype), dim=-1)

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        return F.normalize(self.texts(task, params).mean(1), dim=-1)

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return self.images(task, params, x).mean(1)

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        return params | {TEXT_FEATURES: self.texts(task, params)}

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        text = params[TEXT_FEATURES] if TEXT_FEATURES in params else self.texts(task, params)
        return task.scale * (self.images(task, params, x) @ text.mT).mean(1)

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        images = self.images(task, params, batch.x)
        return task.scale * (images @ self.texts(task, params).mT).mean(1), images.mean(1)
