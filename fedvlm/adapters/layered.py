"""What adapters inside CLIP's two towers have in common: they read stored activations, `hidden@−layers`, and train what lies
above; class names are read by the text tower in the run's own phrases; logits = the backbone's scale · cos.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvlm.adapters.base import TEXT_FEATURES, Adapter, Limits, Task, class_vectors
from fedvlm.backbones.text import LowerActivations, PromptPlan, TextTower
from fedvlm.backbones.vision import Towers
from fedvlm.core import Batch, FedvlmError, Params

Precision = Literal["full", "half"]  # half: frozen towers compute in bfloat16, what is learned stays float32


@dataclass(frozen=True)
class Layered(Adapter):
    layers: int = 0  # of the image tower that are run anew, the last; 0 is all
    precision: Precision = "full"

    requires: ClassVar[str] = "both towers"
    open_vocabulary: ClassVar[bool] = True
    limits: ClassVar[Limits] = Limits(examples=256, clients=4, gpu=True)

    @property
    def view(self) -> str:  # type: ignore[override]
        return f"hidden@{-self.layers}"

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        """The frozen model's, where the text side is not changed."""
        return task.names()[None].to(kind(params))

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        return params | {TEXT_FEATURES: self.class_vectors(task, params)}

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * self.features(task, params, x) @ class_vectors(self, task, params).mT

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        features, text = self.features(task, params, batch.x), self.class_vectors(task, params)
        return task.scale * features @ text.mT, text if self.alignment == "classes" else features


def towers_of(task: Task, precision: Precision = "full") -> Towers:
    if not isinstance(task.tower, Towers):
        raise FedvlmError("this adapter changes a CLIP's own layers, and this backbone has no two towers to give")
    return task.tower if precision == "full" else halved(task.tower)


@lru_cache(maxsize=4)
def halved(towers: Towers) -> Towers:
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
def read(reader: TextTower, texts: tuple[str, ...], layers: int) -> tuple[PromptPlan, LowerActivations]:
    """What is the same in every step: the tokens, and what enters the trained layers."""
    plan = reader.phrases(texts)
    return plan, reader.below(plan, layers)
