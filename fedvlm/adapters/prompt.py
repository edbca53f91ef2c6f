"""PromptFL (Guo et al., 2024; CoOp, Zhou et al., 2022): the words before a class name are learned, the model stays.

A prompt is [start] v₁ … vₙ NAME . [end] with n vectors v in token space, the same for all classes or (specific=true) its
own for each; logits = scale · cos(image, text(prompt)). n · width parameters, all shared. v ~ N(0, 0.02), or the words of
`phrase`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvlm.adapters.base import Adapter, Task
from fedvlm.backbones.text import Plan, TextTower
from fedvlm.core import Batch, FedvlmError, Params
from fedvlm.seeds import generator


@dataclass(frozen=True)
class Prompt(Adapter):
    context: int = 16  # vectors
    position: Literal["end", "middle"] = "end"  # of the class name
    specific: bool = False  # a context for each class
    phrase: str = ""  # words to start from, in place of noise
    precision: Literal["full", "half"] = "full"  # half: the frozen tower is bfloat16, what is learned stays float32

    needs: ClassVar[str] = "text tower"
    aligns: ClassVar[str] = "classes"
    reads_words: ClassVar[bool] = True
    heavy: ClassVar[bool] = True
    most: ClassVar[int] = 8
    block: ClassVar[int] = 1 << 16  # every prompt is read once for all examples

    @property
    def opens(self) -> bool:
        return not self.specific

    def init(self, task: Task, seed: int) -> Params:
        tower = text_tower(task)
        if self.phrase:
            start = tower.phrase(self.phrase)[None]
        else:
            start = 0.02 * torch.randn(1, self.context, tower.token.shape[1], generator=generator(seed, 47))
        context = start.to(torch.get_default_dtype()).repeat(len(task.classes) if self.specific else 1, 1, 1)
        return {"context": context}

    def classes(self, task: Task, params: Params) -> Tensor:
        tower, context = self.tower(task), params["context"]
        return tower.features(plan(tower, task.classes, context.shape[2], self.position), context)

    def tower(self, task: Task) -> TextTower:
        return text_tower(task) if self.precision == "full" else halved(text_tower(task))

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * x @ self.known(task, params).mT

    def both(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        text = self.classes(task, params)  # read once
        return task.scale * batch.x @ text.mT, text


def text_tower(task: Task) -> TextTower:
    if not isinstance(task.tower, TextTower):
        raise FedvlmError("prompts are read by a CLIP's text tower, and this backbone has none to give")
    return task.tower


@lru_cache(maxsize=4)
def halved(tower: TextTower) -> TextTower:
    return tower.to(dtype=torch.bfloat16)


@lru_cache(maxsize=32)
def plan(tower: TextTower, classes: tuple[str, ...], context: int, position: str) -> Plan:
    return tower.plan([c.replace("_", " ") for c in classes], context, position)
