"""What adapters inside CLIP's two towers have in common: they read stored activations, `hidden@−layers`, and train what lies
above; class names are read by the text tower in the run's own phrases; logits = the backbone's scale · cos.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvlm.adapters.base import Adapter, Task
from fedvlm.backbones.text import Below, Plan, TextTower
from fedvlm.backbones.vision import Both
from fedvlm.core import Batch, FedvlmError, Params

Precision = Literal["full", "half"]  # half: frozen towers compute in bfloat16, what is learned stays float32


@dataclass(frozen=True)
class Layered(Adapter):
    layers: int = 0  # of the image tower that are run anew, the last; 0 is all
    precision: Precision = "full"

    needs: ClassVar[str] = "both towers"
    heavy: ClassVar[bool] = True
    reads_words: ClassVar[bool] = True
    most: ClassVar[int] = 4
    block: ClassVar[int] = 256

    @property
    def reads(self) -> str:  # type: ignore[override]
        return f"hidden@{-self.layers}"

    @property
    def opens(self) -> bool:
        return True

    def classes(self, task: Task, params: Params) -> Tensor:
        """The frozen model's, where the text side is not changed."""
        return task.names()[None].to(kind(params))

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * self.features(task, params, x) @ self.known(task, params).mT

    def both(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        features, text = self.features(task, params, batch.x), self.classes(task, params)
        return task.scale * features @ text.mT, text if self.aligns == "classes" else features


def towers_of(task: Task, precision: Precision = "full") -> Both:
    if not isinstance(task.tower, Both):
        raise FedvlmError("this adapter changes a CLIP's own layers, and this backbone has no two towers to give")
    return task.tower if precision == "full" else halved(task.tower)


@lru_cache(maxsize=4)
def halved(towers: Both) -> Both:
    return towers.to(dtype=torch.bfloat16)


def kind(params: Params) -> torch.dtype:
    return next(iter(params.values())).dtype


def phrases(task: Task) -> tuple[str, ...]:
    """What the class names were embedded with, so that round 0 is zero-shot."""
    if len(task.phrases) != len(task.classes):
        raise FedvlmError(
            f"Task.phrases holds {len(task.phrases)} phrases for {len(task.classes)} classes, and this adapter's text tower "
            "reads them; give those that Task.text was made of, one a class"
        )
    return task.phrases


@lru_cache(maxsize=8)
def read(reader: TextTower, texts: tuple[str, ...], layers: int) -> tuple[Plan, Below]:
    """What is the same in every step: the tokens, and what enters the trained layers."""
    plan = reader.phrases(texts)
    return plan, reader.below(plan, layers)
