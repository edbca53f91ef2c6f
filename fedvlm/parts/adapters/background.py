"""LoCoOp (Miyai et al., NeurIPS 2023): PromptFL with an entropy loss on background patches, which belong to no class.

A patch is background where its image's class is not among its `rank` likeliest classes. loss = cross-entropy on the
whole image − λ · the mean entropy H(p) over the background patches of the batch (0 where there are none), λ = 0.25, so
that background becomes similar to no class. p is the softmax of scale · cos(patch, text). The paper's rank is 200 of
ImageNet's 1,000 classes; ours is a fifth of the classes, at least one. For rules that weight examples, each example has
the mean over its own patches.

For detection the paper uses MCM on the whole image, or GL-MCM (patchwise=true), which adds the largest probability that
any patch gives any class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.adapter import Limits, Task, class_vectors
from fedvlm.core.data import Batch
from fedvlm.core.detection import scores_of
from fedvlm.core.ranges import NotNegative, Whole
from fedvlm.core.state import Params
from fedvlm.core.tasks import Objective
from fedvlm.parts.adapters.prompt import Prompt


@dataclass(frozen=True)
class Background(Prompt):
    entropy: NotNegative = 0.25  # λ, weight of the background's entropy in the loss; 0: none
    rank: Whole = 0  # a patch whose true class ranks below this is background; 0: a fifth of the classes
    patchwise: bool = False  # detect outsiders by GL-MCM (image and patches); false: by MCM (image only)

    view: ClassVar[str] = "patches"
    limits: ClassVar[Limits] = Limits(examples=512, clients=8, gpu=True)

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return x[:, :, 0].to(params["context"])

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return super().logits(task, params, self.features(task, params, x))

    def train_logits(self, task: Task, params: Params, batch: Batch) -> Tensor:
        return self.logits_and_aligned(task, params, batch)[0]

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        text = self.class_vectors(task, params)
        return token_logits(task, text, batch.x), text

    def background_entropy(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Per example, the number of background patches and the sum of their entropies, [clients, examples] each."""
        patches, labels = logits[:, :, 1:], y[:, :, None, None].expand(-1, -1, logits.shape[2] - 1, 1)
        rank = (patches > patches.gather(-1, labels)).sum(-1)  # how many classes are likelier than the true one
        background = rank >= (self.rank or max(1, logits.shape[-1] // 5))
        log_p = patches.log_softmax(-1)
        return background.sum(-1), -((log_p.exp() * log_p).sum(-1) * background).sum(-1)

    def loss(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        real = batch.weight > 0
        count, total = ((each * real).sum(-1) for each in self.background_entropy(logits, batch.y))
        return self.task_type.losses[objective](logits[:, :, 0], batch) - self.entropy * total / count.clamp(min=1)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        count, total = self.background_entropy(logits, y)
        return super().losses(logits[:, :, 0], y) - self.entropy * total / count.clamp(min=1)

    def detection_scores(self, task: Task, params: Params, x: Tensor) -> dict[str, Tensor]:
        scores = scores_of(self.logits(task, params, x))
        if self.patchwise:
            patches = token_logits(task, class_vectors(self, task, params), x[:, :, 1:])
            scores["mcm"] = scores["mcm"] + patches.softmax(-1).amax((-2, -1))
        return scores


def token_logits(task: Task, text: Tensor, x: Tensor) -> Tensor:
    """The logits of every token of x (the image, then its patches), [clients, examples, tokens, classes]."""
    return task.scale * torch.einsum("knpd,kcd->knpc", x.to(text), text)
