"""PromptFL (Guo et al., 2024; CoOp, Zhou et al., 2022): learned context vectors before a class name.

The model is frozen. A prompt is [start] v₁ … vₙ NAME . [end] with n vectors v in the space of token embeddings, the
same for all classes or (specific=true) different for each; logits = scale · cos(image, text(prompt)). n · width
parameters, all shared. At the start v ~ N(0, 0.02), or the token embeddings of `phrase`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvlm.core.adapter import TEXT_FEATURES, Adapter, Limits, Task, class_vectors
from fedvlm.core.data import Batch
from fedvlm.core.ranges import Count
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError
from fedvlm.towers.text import PromptPlan, TextTower


@dataclass(frozen=True)
class Prompt(Adapter):
    context: Count = 16  # n, learned vectors before a class name; with phrase= as many as it has tokens
    position: Literal["end", "middle"] = "end"  # of the class name: after the context, or between its halves
    specific: bool = False  # each class has its own context; false: one context for all classes
    phrase: str = ""  # words that the context starts from; "": noise
    precision: Literal["full", "half"] = "full"  # half: bfloat16 in the frozen tower; the context stays float32

    requires: ClassVar[str] = "text tower"
    alignment: ClassVar[Literal["images", "classes"]] = "classes"
    # prompts are encoded once for all examples, so examples are cheap
    limits: ClassVar[Limits] = Limits(examples=1 << 16, clients=8, gpu=True)

    @property
    def open_vocabulary(self) -> bool:  # type: ignore[override]
        return not self.specific

    def init(self, task: Task, seed: int) -> Params:
        tower = text_tower(task)
        if self.phrase:
            start = tower.phrase(self.phrase)[None]
        else:
            start = 0.02 * torch.randn(1, self.context, tower.token.shape[1], generator=generator(seed, 47))
        context = start.to(torch.get_default_dtype()).repeat(len(task.classes) if self.specific else 1, 1, 1)
        return {"context": context}

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        tower, context = self.tower(task), params["context"]
        return tower.features(prompt_plan(tower, task.classes, context.shape[2], self.position), context)

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        return params | {TEXT_FEATURES: self.class_vectors(task, params)}

    def tower(self, task: Task) -> TextTower:
        return text_tower(task) if self.precision == "full" else to_bfloat16(text_tower(task))

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * x @ class_vectors(self, task, params).mT

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        text = self.class_vectors(task, params)
        return task.scale * batch.x @ text.mT, text


def text_tower(task: Task) -> TextTower:
    if not isinstance(task.tower, TextTower):
        raise FedvlmError("prompts are encoded by a CLIP's text tower, and this backbone has none to give")
    return task.tower


@lru_cache(maxsize=4)
def to_bfloat16(tower: TextTower) -> TextTower:
    return tower.to(dtype=torch.bfloat16)


@lru_cache(maxsize=32)
def prompt_plan(tower: TextTower, classes: tuple[str, ...], context: int, position: str) -> PromptPlan:
    return tower.plan([c.replace("_", " ") for c in classes], context, position)
