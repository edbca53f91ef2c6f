"""FedAKT (Liu et al., 2025), as in FedOT's tables: a shared adapter between frozen embeddings and a private classifier.

The adapter is a residual two-layer network, n(h) = h + V relu(U h + u) + v (2 (d² + d) numbers, all that is sent); the
classifier W, b (K d + K numbers) stays on its client and starts at random, so that a newcomer's guesses are random, as
in FedOT's Table 1. logits = scale · W n(h)/‖n(h)‖ + b.

Knowledge transfer (our reading: FedOT's tables give the parameters above and the name, "adapter-guided knowledge
transfer", and not the loss): the classifier is trained on the embedding with and without the adapter, and each of the
two predictions also learns from the other, fixed, by how sure the other is. With p on n(h) and q on h:

    ½ [cross-entropy(p) + cross-entropy(q) + transfer · (c(q) KL(q ‖ p) + c(p) KL(p ‖ q))],   c(p) = 1 − entropy(p)/log K
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.data import Batch
from fedvlm.core.ranges import NotNegative
from fedvlm.core.state import Params, linear
from fedvlm.core.tasks import Objective
from fedvlm.parts.adapters.mlp import Mlp


@dataclass(frozen=True)
class Guided(Mlp):
    private: tuple[str, ...] = ("head", "bias")
    init_from: Literal["text", "random"] = "random"  # initial classifier: embeddings of the class names, or random
    transfer: NotNegative = 1.0  # weight of learning from the other prediction; 0: none

    def init(self, task: Task, seed: int) -> Params:
        return super().init(task, seed) | {"bias": torch.zeros(len(task.classes))}

    def classify(self, task: Task, params: Params, features: Tensor) -> Tensor:
        return task.scale * linear(features, params["head"]) + params["bias"][:, None]

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return self.classify(task, params, self.features(task, params, x))

    def train_logits(self, task: Task, params: Params, batch: Batch) -> Tensor:
        """Logits of the adapter and of the frozen model, [clients, examples, 2, classes]."""
        return torch.stack([self.logits(task, params, batch.x), self.classify(task, params, batch.x)], 2)

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.train_logits(task, params, batch), self.features(task, params, batch.x)

    def loss(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        with_adapter, without = (self.task_type.losses[objective](each, batch) for each in logits.unbind(2))
        return (with_adapter + without + self.transfer * batch.mean(transferred(*logits.unbind(2)))) / 2

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        with_adapter, without = (super(Guided, self).losses(each, y) for each in logits.unbind(2))
        return (with_adapter + without + self.transfer * transferred(*logits.unbind(2))) / 2


def transferred(one: Tensor, other: Tensor) -> Tensor:
    """What each of two predictions, given as logits [..., classes], has to learn from the other, [...]."""
    total: Tensor = torch.zeros_like(one[..., 0])
    for student, teacher in ((one, other), (other, one)):
        target = teacher.detach().log_softmax(-1)
        p = target.exp()
        sure = 1 + (p * target).sum(-1) / math.log(max(2, p.shape[-1]))
        total = total + sure * (p * (target - student.log_softmax(-1))).sum(-1)
    return total
