"""FOCoOp's prompts (Liao et al., ICML 2025, §3.2): global, private and outsider contexts, one of each kind per name.

A class's prompt is t_c = (1 − ρ) t^l_c + ρ t^g_c, ρ = 0.2, with t^l private and t^g shared. U outsider prompts t^o,
shared, belong to nouns far from every class (data/nouns.py); they are trained to match no training image. p is a
softmax over C + U: loss = −log p(y|x) − log p(ID|x), p(ID|x) = Σ_c p(c|x).  Detection: the largest p of a class, with
the softmax over C + U. An outsider's noun belongs to its index: where the server moves contexts between indices, nouns
stay (the paper is silent).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.adapters.base import TEXT_FEATURES, Task
from fedvlm.adapters.prompt import Prompt, plan
from fedvlm.core import Batch, FedvlmError, Params
from fedvlm.keys import Count, Share, Whole
from fedvlm.metrics.detection import mcm, scores_of
from fedvlm.tasks import Objective


@dataclass(frozen=True)
class Outsiders(Prompt):
    private: tuple[str, ...] = ("own",)
    specific: bool = True  # each class has its own context; false: one context for all classes
    fusion: Share = 0.2  # ρ, share of the global context in a class's prompt; the rest is the private one
    count: Count = 100  # U, outsider prompts
    candidates: Whole = 0  # WordNet nouns, evenly spaced, from which outsiders are chosen; 0: all

    def init(self, task: Task, seed: int) -> Params:
        if len(task.nouns) < self.count:
            raise FedvlmError(f"count={self.count} outsider prompts, and there are {len(task.nouns)} nouns for them")
        context = super().init(task, seed)["context"]
        outsiders = context[:1].expand(self.count, *context.shape[1:])
        return {"context": context, "own": context.clone(), "outsiders": outsiders.clone()}

    def shared_only(self, params: Params) -> Params:
        return params | {"own": params["context"]}

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        own, shared = params["own"], params["context"]
        return super().class_vectors(task, {"context": own + self.fusion * (shared - own)})

    def prompts(self, task: Task, params: Params) -> Tensor:
        """The encoded prompts of the classes, then of the outsiders: [clients, C + U, dim]."""
        tower, context = self.tower(task), params["outsiders"]
        nouns = tower.features(plan(tower, task.nouns[: self.count], context.shape[2], self.position), context)
        classes = self.class_vectors(task, params)
        return torch.cat([part.expand(max(len(nouns), len(classes)), -1, -1) for part in (classes, nouns)], dim=1)

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        if not (before and torch.equal(before["outsiders"], params["outsiders"])):
            return params | {TEXT_FEATURES: self.prompts(task, params)}
        # outsider prompts are shared, so the encoded ones of the other model are used again
        classes, nouns = self.class_vectors(task, params), before[TEXT_FEATURES][:, len(task.classes) :]
        return params | {TEXT_FEATURES: torch.cat([classes, nouns.expand(len(classes), -1, -1)], dim=1)}

    def train_logits(self, task: Task, params: Params, batch: Batch) -> Tensor:
        return task.scale * batch.x @ self.prompts(task, params).mT

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        text = self.prompts(task, params)
        return task.scale * batch.x @ text.mT, text[:, : len(task.classes)]

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        inside = logits[..., : logits.shape[-1] - self.count].logsumexp(-1)
        return super().losses(logits, y) + logits.logsumexp(-1) - inside

    def loss(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        if objective != "cross-entropy":
            raise FedvlmError(f"objective={objective}: adapter=outsiders has a loss of its own; leave objective out")
        return batch.mean(self.losses(logits, batch.y))

    def detection_scores(self, task: Task, params: Params, x: Tensor) -> dict[str, Tensor]:
        text = params[TEXT_FEATURES] if TEXT_FEATURES in params else self.prompts(task, params)
        logits, classes = task.scale * x @ text.mT, len(task.classes)
        return scores_of(logits[..., :classes]) | {"mcm": mcm(logits, classes=classes)}
