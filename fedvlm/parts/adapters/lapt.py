"""LAPT (Zhang et al., ECCV 2024): one learned context for the class names, another for negative labels.

The distribution-aware prompts are v₁ … vₙ NAME for the C classes and w₁ … wₙ NOUN for U negative labels, which are
nouns far from every class (data/nouns.py); specific=true gives each name its own context. p is a softmax over C + U.
loss = −log p(y) of the image + −log p(y) of a cross-modal mixture: λ · image + (1 − λ) · text of its class's name,
normalised, with one λ ~ U(0, ½) per round and step, the same for all clients. Detection (NegLabel's score, in place of
MCM): Σ_c p(c) over the classes, as log odds, which do not saturate.

The paper trains on images that are generated or retrieved for every name. A client only has images of its classes, so
two parts are left out: images of negative labels (their context is trained only by the denominator of p) and mixing
across distributions. The paper has 10,000 negative labels; each is a prompt that every step encodes, so ours are 100.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import TEXT_FEATURES, Task
from fedvlm.core.data import Batch
from fedvlm.core.detection import scores_of
from fedvlm.core.ranges import Count, NotNegative, Whole
from fedvlm.core.seeds import generator, key
from fedvlm.core.state import Params
from fedvlm.core.tasks import Objective
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.prompt import Prompt, prompt_plan


@dataclass(frozen=True)
class Lapt(Prompt):
    mixing: NotNegative = 1.0  # weight of the loss on image-text mixtures; 0: images only
    count: Count = 100  # U, negative labels
    candidates: Whole = 0  # WordNet nouns, evenly spaced, from which negative labels are chosen; 0: all

    def init(self, task: Task, seed: int) -> Params:
        if len(task.nouns) < self.count:
            raise FedvlmError(f"count={self.count} negative labels, and there are {len(task.nouns)} nouns for them")
        context, negatives = (super(Lapt, self).init(task, s)["context"] for s in (seed, key(seed, 71)))
        return {"context": context, "negatives": negatives[:1].repeat(self.count if self.specific else 1, 1, 1)}

    def prompts(self, task: Task, params: Params) -> Tensor:
        """The encoded prompts of the classes, then of the negative labels: [clients, C + U, dim]."""
        tower, context = self.tower(task), params["negatives"]
        nouns = tower.features(prompt_plan(tower, task.nouns[: self.count], context.shape[2], self.position), context)
        return torch.cat([self.class_vectors(task, params), nouns], 1)

    def train_logits(self, task: Task, params: Params, batch: Batch) -> Tensor:
        return self.logits_and_aligned(task, params, batch)[0]

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [clients, examples, 2, C + U]: of the images and of the mixtures."""
        text, x = self.prompts(task, params), batch.x
        share = float(torch.rand((), generator=generator(*batch.drawn, 73, batch.step), dtype=torch.float64)) / 2  # λ
        mixed = F.normalize(share * x + (1 - share) * task.names().to(x)[batch.y], dim=-1)
        logits = task.scale * torch.einsum("knsd,kcd->knsc", torch.stack([x, mixed], 2), text)
        return logits, text[:, : len(task.classes)]

    def loss(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        image, mixture = (self.task_type.losses[objective](one, batch) for one in logits.unbind(2))
        return image + self.mixing * mixture

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        image, mixture = (super(Lapt, self).losses(one, y) for one in logits.unbind(2))
        return image + self.mixing * mixture

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        if not task.nouns:  # novel classes come without nouns
            return super().prepare(task, params, before)
        return params | {TEXT_FEATURES: self.prompts(task, params)}

    def detection_scores(self, task: Task, params: Params, x: Tensor) -> dict[str, Tensor]:
        text = params[TEXT_FEATURES] if TEXT_FEATURES in params else self.prompts(task, params)
        logits, classes = task.scale * x @ text.mT, len(task.classes)
        log_odds = logits[..., :classes].logsumexp(-1) - logits[..., classes:].logsumexp(-1)
        return scores_of(logits[..., :classes]) | {"mcm": log_odds}
