"""CoCoOp (Zhou et al., CVPR 2022): PromptFL with a context that depends on the image.

A small network sees the image embedding h and shifts every context vector: vⱼ(h) = vⱼ + B relu(A h + a) + b, with a hidden
layer a sixteenth of the embedding's width; logits = scale · cos(h, text(prompt(h))). Everything is shared and starts at
random. Every image has prompts of its own, so an image costs what a whole batch costs in PromptFL (the paper's batch is 1,
our recipe's 4).

What an alignment compares are the class vectors as the batch's images had them, on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import Task
from fedvlm.adapters.prompt import Prompt, text_tower
from fedvlm.core import Batch, Params, linear
from fedvlm.seeds import generator


@dataclass(frozen=True)
class Conditional(Prompt):
    reads_words: ClassVar[bool] = False  # beforehand: every image has its own
    block: ClassVar[int] = 64  # a larger one would not save a prompt
    most: ClassVar[int] = 2

    def init(self, task: Task, seed: int) -> Params:
        hidden, width, draw = max(1, task.dim // 16), text_tower(task).token.shape[1], generator(seed, 67)

        def uniform(inputs: int, *shape: int) -> Tensor:
            """As torch starts a linear layer."""
            return (torch.rand(*shape, generator=draw) * 2 - 1) * inputs**-0.5

        network = {"a": uniform(task.dim, hidden, task.dim), "a0": uniform(task.dim, hidden)}
        network |= {"b": uniform(hidden, width, hidden), "b0": uniform(hidden, width)}
        return super().init(task, seed) | {k: v.to(torch.get_default_dtype()) for k, v in network.items()}

    def prompts(self, task: Task, params: Params, x: Tensor) -> Tensor:
        """The class vectors of each image, [clients, examples, classes, dim]; the tower takes images for clients."""
        shift = linear(torch.relu(linear(x, params["a"], params["a0"])), params["b"], params["b0"])
        context = params["context"][:, None] + shift[:, :, None, None]
        return super().classes(task, {"context": context.flatten(0, 1)}).unflatten(0, context.shape[:2])

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return matched(task, self.prompts(task, params, x), x)

    def both(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        text = self.prompts(task, params, batch.x)
        mean = torch.einsum("kn,kncd->kcd", batch.weight, text)
        return matched(task, text, batch.x), F.normalize(mean, dim=-1)


def matched(task: Task, text: Tensor, x: Tensor) -> Tensor:
    return task.scale * torch.einsum("knd,kncd->knc", x, text)
