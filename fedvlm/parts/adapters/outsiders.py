"""FOCoOp's prompts (Liao et al., ICML 2025, §3.2): global, private and outsider contexts, one of each kind per name.

A class's prompt is t_c = (1 − ρ) t^l_c + ρ t^g_c, ρ = 0.2, with t^l private and t^g shared. U outsider prompts t^o,
shared, belong to nouns far from every class (data/nouns.py); they are trained to match no training image. p is a
softmax over C + U: loss = −log p(y|x) − log p(ID|x), p(ID|x) = Σ_c p(c|x).  Detection: the largest p of a class, with
the softmax over C + U. All contexts start from draws of their own. A context stays before its noun: the server chooses
among the clients' versions of each (parts/merge/transport.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.adapter import TEXT_FEATURES, Task
from fedvlm.core.data import Batch
from fedvlm.core.detection import mcm, scores_of
from fedvlm.core.ranges import Count, Share, Whole
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params
from fedvlm.core.tasks import Objective
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.prompt import Prompt, prompt_plan


@dataclass(frozen=True)
class Outsiders(Prompt):
    private: tuple[str, ...] = ("own",)
    specific: bool = True  # each class has its own context; false: one context for all classes
    fusion: Share = 0.2  # ρ, share of the global context in a class's prompt; the rest is the private one
    count: Count = 100  # U, outsider prompts
    separate: bool = True  # −log p(ID|x) in the loss; false: cross-entropy over classes and outsiders only
    candidates: Whole = 0  # WordNet nouns, evenly spaced, from which outsiders are chosen; 0: all

    diagnostics: ClassVar[Mapping[str, str]] = {
        "global_share": "share of the fused prompts' squared norm that comes from the global contexts"
    }

    def init(self, task: Task, seed: int) -> Params:
        if len(task.nouns) < self.count:
            raise FedvlmError(f"count={self.count} outsider prompts, and there are {len(task.nouns)} nouns for them")
        start = super().init(task, seed)["context"]
        sizes = {"context": len(start), "own": len(start), "outsiders": self.count}
        if self.phrase:
            return {k: start[:1].repeat(n, 1, 1) for k, n in sizes.items()}
        draw = generator(seed, 47)
        return {k: 0.02 * torch.randn(n, *start.shape[1:], generator=draw).to(start) for k, n in sizes.items()}

    def diagnose(self, task: Task, params: Params, x: Tensor) -> Params:
        own, shared = (params[k].flatten(1) for k in ("own", "context"))
        fused = own + self.fusion * (shared - own)
        return {"global_share": self.fusion * (fused * shared).sum(1) / fused.square().sum(1)}

    def shared_only(self, params: Params) -> Params:
        return params | {"own": params["context"]}

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        own, shared = params["own"], params["context"]
        return super().class_vectors(task, {"context": own + self.fusion * (shared - own)})

    def encode(self, task: Task, params: Params) -> Params:
        """The encoded prompts of the classes and of the outsiders, by the name of their shared context."""
        tower, context = self.tower(task), params["outsiders"]
        nouns = tower.features(prompt_plan(tower, task.nouns[: self.count], context.shape[2], self.position), context)
        return {"context": self.class_vectors(task, params), "outsiders": nouns}

    def logits_of(self, task: Task, encoded: Params, batch: Batch) -> Tensor:
        return task.scale * batch.x @ together(encoded).mT

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        if not (before and torch.equal(before["outsiders"], params["outsiders"])):
            return params | {TEXT_FEATURES: together(self.encode(task, params))}
        # outsider prompts are shared, so the encoded ones of the other model are used again
        classes, nouns = self.class_vectors(task, params), before[TEXT_FEATURES][:, len(task.classes) :]
        return params | {TEXT_FEATURES: torch.cat([classes, nouns.expand(len(classes), -1, -1)], dim=1)}

    def train_logits(self, task: Task, params: Params, batch: Batch) -> Tensor:
        return self.logits_of(task, self.encode(task, params), batch)

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        encoded = self.encode(task, params)
        return self.logits_of(task, encoded, batch), encoded["context"]

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        each = super().losses(logits, y)
        if not self.separate:
            return each
        return each + logits.logsumexp(-1) - logits[..., : logits.shape[-1] - self.count].logsumexp(-1)

    def loss(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        if objective != "cross-entropy":
            raise FedvlmError(f"objective={objective}: adapter=outsiders has a loss of its own; leave objective out")
        return batch.mean(self.losses(logits, batch.y))

    def detection_scores(self, task: Task, params: Params, x: Tensor) -> dict[str, Tensor]:
        text = params[TEXT_FEATURES] if TEXT_FEATURES in params else together(self.encode(task, params))
        logits, classes = task.scale * x @ text.mT, len(task.classes)
        return scores_of(logits[..., :classes]) | {"mcm": mcm(logits, classes=classes)}


def together(encoded: Params) -> Tensor:
    """The classes' encoded prompts, then the outsiders': [clients, C + U, dim]."""
    parts = encoded["context"], encoded["outsiders"]
    clients = max(map(len, parts))
    return torch.cat([part.expand(clients, -1, -1) for part in parts], dim=1)
