"""LoCoOp (Miyai et al., NeurIPS 2023): PromptFL that also learns from the background, which is of no class.

A patch is background where its true class is not among its `rank` likeliest ones. loss = cross-entropy on the whole image
− λ · the mean entropy H(p) of the batch's background patches (none of them: 0), λ = 0.25, so that the background comes to
look like no class at all. p is the softmax of scale · cos(patch, text). The paper's rank is 200 of ImageNet's 1,000
classes; ours is a fifth of the classes, at least one. Where a rule weighs examples, each counts its own patches' mean.

For detection the paper has MCM on the whole image, and GL-MCM (patchwise=true): + the largest probability that any patch
gives any class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.adapters.base import Task
from fedvlm.adapters.prompt import Prompt
from fedvlm.core import Batch, FedvlmError, Params
from fedvlm.tasks import Objective


@dataclass(frozen=True)
class Background(Prompt):
    entropy: float = 0.25  # λ, the weight of the background's entropy
    rank: int = 0  # of the true class in a patch, below which it is background; 0 is a fifth of the classes
    patchwise: bool = False  # outsiders are told by GL-MCM in place of MCM

    reads: ClassVar[str] = "patches"
    block: ClassVar[int] = 512

    def __post_init__(self) -> None:
        if self.rank < 0 or self.entropy < 0:
            raise FedvlmError(f"rank={self.rank} and entropy={self.entropy:g} must not be negative")

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return x[:, :, 0].to(params["context"])

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return super().logits(task, params, self.features(task, params, x))

    def training(self, task: Task, params: Params, batch: Batch) -> Tensor:
        return self.both(task, params, batch)[0]

    def both(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        text = self.classes(task, params)
        return everywhere(task, text, batch.x), text

    def background(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Of each example, how many patches are background and the sum of their entropies, [clients, examples]."""
        patches, own = logits[:, :, 1:], y[:, :, None, None].expand(-1, -1, logits.shape[2] - 1, 1)
        before = (patches > patches.gather(-1, own)).sum(-1)  # classes that come before the true one
        chosen = before >= (self.rank or max(1, logits.shape[-1] // 5))
        log = patches.log_softmax(-1)
        return chosen.sum(-1), -((log.exp() * log).sum(-1) * chosen).sum(-1)

    def loss(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        real = batch.weight > 0
        count, sum = ((each * real).sum(-1) for each in self.background(logits, batch.y))
        return self.learns.losses[objective](logits[:, :, 0], batch) - self.entropy * sum / count.clamp(min=1)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        count, sum = self.background(logits, y)
        return super().losses(logits[:, :, 0], y) - self.entropy * sum / count.clamp(min=1)

    def inside(self, task: Task, params: Params, x: Tensor) -> dict[str, Tensor]:
        found = super().inside(task, params, x)
        if self.patchwise:
            logits = everywhere(task, self.known(task, params), x[:, :, 1:])
            found["mcm"] = found["mcm"] + logits.softmax(-1).amax((-2, -1))
        return found


def everywhere(task: Task, text: Tensor, x: Tensor) -> Tensor:
    """The logits of the image and of each of its patches, [clients, examples, 1 + patches, classes]."""
    return task.scale * torch.einsum("knpd,kcd->knpc", x.to(text), text)
