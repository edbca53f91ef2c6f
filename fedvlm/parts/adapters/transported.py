"""FedOTP (Li et al., CVPR 2024): a shared and a private context; optimal transport assigns image patches to them.

Per image and class, the plan T moves mass from the N patches to the two prompts: min ⟨1 − cos, T⟩ − ε H(T) with at most
1/N from a patch and γ/2 to a prompt, so that a share 1 − γ of the image may match neither (`fedvlm.parts.transport`; γ =
0.8, ε = 0.1, no gradient through T).  logits = scale · Σ T·cos over patches and prompts. As in the public code this is not
divided by γ: two prompts that match every patch give γ · scale, where PromptFL gives scale.

The two contexts start from different random draws: equal ones would receive the same half of every patch and the same
gradients. A newcomer, who has no private context, uses the shared one for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import TEXT_FEATURES, Limits, Task
from fedvlm.core.data import Batch
from fedvlm.core.ranges import Count, Positive, PositiveShare
from fedvlm.core.seeds import key
from fedvlm.core.state import Params
from fedvlm.parts.adapters.prompt import Prompt
from fedvlm.parts.transport import unbalanced

CHUNK = 1 << 23  # cosines at a time: 32 MB in float32, and about six times that while their plan is computed


@dataclass(frozen=True)
class Transported(Prompt):
    private: tuple[str, ...] = ("own",)
    mass: PositiveShare = 0.8  # γ, share of the image that is matched with prompts; 1: all of it
    entropy: Positive = 0.1  # ε, weight of the plan's entropy; larger spreads a patch over both prompts
    iterations: Count = 100  # largest number of iterations to compute a plan

    view: ClassVar[str] = "patches"
    limits: ClassVar[Limits] = Limits(examples=512, clients=8, gpu=True)

    def init(self, task: Task, seed: int) -> Params:
        return super().init(task, seed) | {"own": super().init(task, key(seed, 53))["context"]}

    def shared_only(self, params: Params) -> Params:
        return params | {"own": params["context"]}

    def prompts(self, task: Task, params: Params) -> Tensor:
        """The class vectors of both contexts, [clients, 2, classes, dim]; a shared one is encoded once for all clients."""
        both = (super(Transported, self).class_vectors(task, {"context": params[k]}) for k in ("context", "own"))
        return torch.stack(torch.broadcast_tensors(*both), 1)

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        return F.normalize(self.prompts(task, params).mean(1), dim=-1)

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return x[:, :, 0].to(params["context"])

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        return params | {TEXT_FEATURES: self.prompts(task, params)}

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        text = params[TEXT_FEATURES] if TEXT_FEATURES in params else self.prompts(task, params)
        return task.scale * self.similarity(x, text)

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        text = self.prompts(task, params)
        return task.scale * self.similarity(batch.x, text), F.normalize(text.mean(1), dim=-1)

    def similarity(self, x: Tensor, text: Tensor) -> Tensor:
        """Σ T·cos over patches and prompts, [clients, examples, classes], a few examples at a time."""
        cosines_per_example = max(len(x), len(text)) * x.shape[2] * text.shape[1] * text.shape[2]
        parts = []
        for part in x[:, :, 1:].split(max(1, CHUNK // cosines_per_example), 1):
            cosines = torch.einsum("knpd,kmcd->kncpm", part.to(text), text)
            parts.append((self.plan(1 - cosines) * cosines).sum((-2, -1)))
        return torch.cat(parts, 1)

    def plan(self, cost: Tensor) -> Tensor:
        """T [..., patches, prompts], without gradient."""
        return unbalanced(cost, self.entropy, self.mass, self.iterations)
