"""CoCoOp (Zhou et al., CVPR 2022): PromptFL with a context that depends on the image.

A small network maps the image embedding h to a shift of every context vector: vⱼ(h) = vⱼ + B relu(A h + a) + b, with a
hidden layer of a sixteenth of the embedding's width; logits = scale · cos(h, text(prompt(h))). Everything is shared and
starts at random. Every image has its own prompts, so one image costs as much as a whole batch in PromptFL (the paper's
batch is 1, our recipe's 4).

Alignment terms compare the class vectors averaged over the images of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Limits, Task
from fedvlm.core.data import Batch
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params, linear
from fedvlm.parts.adapters.prompt import Prompt, text_tower


@dataclass(frozen=True)
class Conditional(Prompt):
    limits: ClassVar[Limits] = Limits(examples=64, clients=2, gpu=True)  # larger blocks do not save prompts

    def init(self, task: Task, seed: int) -> Params:
        hidden, width, rng = max(1, task.dim // 16), text_tower(task).token.shape[1], generator(seed, 67)

        def uniform(inputs: int, *shape: int) -> Tensor:
            """Initial weights as torch.nn.Linear draws them."""
            return (torch.rand(*shape, generator=rng) * 2 - 1) * float(inputs**-0.5)

        network = {"a": uniform(task.dim, hidden, task.dim), "a0": uniform(task.dim, hidden)}
        network |= {"b": uniform(hidden, width, hidden), "b0": uniform(hidden, width)}
        return super().init(task, seed) | {k: v.to(torch.get_default_dtype()) for k, v in network.items()}

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        return params  # prompts depend on the image, so none can be encoded ahead

    def prompts(self, task: Task, params: Params, x: Tensor) -> Tensor:
        """The class vectors of each image, [clients, examples, classes, dim]."""
        shift = linear(torch.relu(linear(x, params["a"], params["a0"])), params["b"], params["b0"])
        context = params["context"][:, None] + shift[:, :, None, None]
        # images are folded into the client axis of the text tower
        text = super().class_vectors(task, {"context": context.flatten(0, 1)})
        return torch.unflatten(text, 0, context.shape[:2])

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return cosine_logits(task, self.prompts(task, params, x), x)

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        text = self.prompts(task, params, batch.x)
        mean = torch.einsum("kn,kncd->kcd", batch.weight, text)
        return cosine_logits(task, text, batch.x), F.normalize(mean, dim=-1)


def cosine_logits(task: Task, text: Tensor, x: Tensor) -> Tensor:
    """Logits [clients, examples, classes] from class vectors per image, [clients, examples, classes, dim]."""
    return task.scale * torch.einsum("knd,kncd->knc", x, text)
