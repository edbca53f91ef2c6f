"""ProDA (Lu et al., CVPR 2022): many prompts, whose class features are taken as a normal distribution.

With K prompts, their mean class features w̄_c and covariances Σ of (w_1, …, w_C), training minimises an upper bound of the
expected cross-entropy over w ~ N(w̄, Σ):
−log [e^{s h·w̄_y} / Σ_c e^{s h·w̄_c + s²/2 hᵀA_cy h}] with A_cy the covariance of w_c − w_y and s the scale, so that
s² hᵀA_cy h is the variance over prompts of the difference of two logits. Each step has `sampled` of the K prompts, drawn
from seed, round and step; logits of the trained model = s h·w̄, with all prompts. K = 32, sampled = 4, all shared.
The paper's term against equal prompts is local=orthogonal.

Our reading: names at the end of all prompts (there a third each at the start, in the middle and at the end).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.adapter import Limits, Task
from fedvlm.core.data import Batch
from fedvlm.core.ranges import Count
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params
from fedvlm.core.tasks import Objective
from fedvlm.parts.adapters.prompt import Prompt, prompt_plan
from fedvlm.parts.adapters.several import draw_contexts, encode_contexts


@dataclass(frozen=True)
class Proda(Prompt):
    global_prompts: Count = 32  # K, prompts of each class; 1: PromptFL
    sampled: Count = 4  # prompts that a step trains; K or more: all

    limits: ClassVar[Limits] = Limits(examples=1 << 16, clients=2, gpu=True)

    def init(self, task: Task, seed: int) -> Params:
        return {"context": draw_contexts(self, task, seed, self.global_prompts)}

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        """w̄, which is shorter than 1."""
        return encode_contexts(self, task, params["context"]).mean(1)

    def nameless(self, task: Task, params: Params) -> Tensor:
        """The features of the prompts without a class name, [clients, prompts, dim]."""
        tower, contexts = self.tower(task), params["context"].mean(2, keepdim=True)
        text = tower.features(prompt_plan(tower, ("",), contexts.shape[3], self.position), contexts.flatten(0, 1))
        return torch.unflatten(text[:, 0], 0, contexts.shape[:2])

    def train_logits(self, task: Task, params: Params, batch: Batch) -> Tensor:
        return self.logits_and_aligned(task, params, batch)[0]

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [clients, examples, prompts, classes] of the prompts of this step."""
        order = torch.randperm(self.global_prompts, generator=generator(*batch.drawn, 83, batch.step))
        text = encode_contexts(self, task, params["context"][:, order[: self.sampled]])
        return task.scale * torch.einsum("knd,kmcd->knmc", batch.x, text), text.mean(1)

    def loss(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        return self.task_type.losses[objective](upper_bound(logits, batch.y), batch)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().losses(upper_bound(logits, y), y)


def upper_bound(logits: Tensor, y: Tensor) -> Tensor:
    """Logits [..., classes] whose cross-entropy is the bound: the mean over prompts, plus half the variance over prompts of
    the difference to the true class's logit (0 for that class itself)."""
    own = logits.gather(-1, y[:, :, None, None].expand(-1, -1, logits.shape[2], 1))
    return logits.mean(2) + (logits - own).var(2, correction=0) / 2
