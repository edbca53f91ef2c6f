"""LAPT (Zhang et al., ECCV 2024): one context before the class names, another before names of no class.

Distribution-aware prompts are v₁ … vₙ NAME for the C classes and w₁ … wₙ NOUN for U negative labels, nouns far from every
class (data/nouns.py); specific=true gives each name a context of its own. p runs over C + U. loss = −log p(y) of the image
+ −log p(y) of a mixture across modalities, λ · image + (1 − λ) · text of its class's name, normalised, one λ ~ U(0, ½) a
step. Detection (NegLabel's score, in the place of MCM): Σ_c p(c) over the classes, as log odds, which do not saturate.

The paper trains on images that are generated or retrieved for every name. A client has images of classes only, so what
needs others is left out: images of negative labels (their context learns by being pushed away alone) and the mixing across
distributions. The paper has 10,000 negative labels; each is a prompt in every step, so ours are 100.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import TEXT_FEATURES, Task
from fedvlm.adapters.prompt import Prompt, plan
from fedvlm.core import Batch, FedvlmError, Params
from fedvlm.metrics.detection import scores_of
from fedvlm.seeds import generator, key
from fedvlm.tasks import Objective


@dataclass(frozen=True)
class Lapt(Prompt):
    mixing: float = 1.0  # the weight of the loss on mixtures
    count: int = 100  # U, negative labels
    candidates: int = 0  # nouns to choose them from, spread over WordNet's; 0 is all

    def __post_init__(self) -> None:
        if self.count < 1 or self.mixing < 0:
            raise FedvlmError(f"count={self.count} must be at least 1, mixing={self.mixing:g} not negative")

    def init(self, task: Task, seed: int) -> Params:
        if len(task.nouns) < self.count:
            raise FedvlmError(f"count={self.count} negative labels, and there are {len(task.nouns)} nouns for them")
        inner, outer = (super(Lapt, self).init(task, s)["context"] for s in (seed, key(seed, 71)))
        return {"context": inner, "negatives": outer[:1].repeat(self.count if self.specific else 1, 1, 1)}

    def prompts(self, task: Task, params: Params) -> Tensor:
        """Of the classes, then of the negative labels: [clients, C + U, dim]."""
        tower, outer = self.tower(task), params["negatives"]
        nouns = tower.features(plan(tower, task.nouns[: self.count], outer.shape[2], self.position), outer)
        return torch.cat([self.class_vectors(task, params), nouns], 1)

    def train_logits(self, task: Task, params: Params, batch: Batch) -> Tensor:
        return self.logits_and_aligned(task, params, batch)[0]

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [clients, examples, 2, C + U], of images and mixtures."""
        text, x = self.prompts(task, params), batch.x
        part = float(torch.rand((), generator=generator(73, batch.step), dtype=torch.float64)) / 2
        mixed = F.normalize(part * x + (1 - part) * task.names().to(x)[batch.y], dim=-1)
        logits = task.scale * torch.einsum("knsd,kcd->knsc", torch.stack([x, mixed], 2), text)
        return logits, text[:, : len(task.classes)]

    def loss(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        image, mixture = (self.task_type.losses[objective](one, batch) for one in logits.unbind(2))
        return image + self.mixing * mixture

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        image, mixture = (super(Lapt, self).losses(one, y) for one in logits.unbind(2))
        return image + self.mixing * mixture

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        return (
            params | {TEXT_FEATURES: self.prompts(task, params)}
            if task.nouns
            else super().prepare(task, params, before)
        )

    def detection_scores(self, task: Task, params: Params, x: Tensor) -> dict[str, Tensor]:
        every = params[TEXT_FEATURES] if TEXT_FEATURES in params else self.prompts(task, params)
        logits, classes = task.scale * x @ every.mT, len(task.classes)
        odds = logits[..., :classes].logsumexp(-1) - logits[..., classes:].logsumexp(-1)
        return scores_of(logits[..., :classes]) | {"mcm": odds}
