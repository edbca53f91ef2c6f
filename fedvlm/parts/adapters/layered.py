"""The common base of adapters that train inside CLIP's two towers.

Their input are stored activations, `hidden@−layers`, and they run the layers above. The text tower encodes the class
names in the run's phrases; logits = the backbone's scale · cos.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import TEXT_FEATURES, Adapter, Limits, Task, class_vectors
from fedvlm.core.data import Batch
from fedvlm.core.ranges import Whole, default
from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError
from fedvlm.towers.text import LowerActivations, PromptPlan, TextTower
from fedvlm.towers.vision import Towers

Precision = Literal["full", "half"]


@dataclass(frozen=True)
class Layered(Adapter):
    layers: Whole = default(0, "effort")  # last layers of the image tower, run in each step (others are stored); 0: all
    precision: Precision = "full"  # half: bfloat16 in the frozen towers; trained parameters stay float32

    requires: ClassVar[str] = "both towers"
    open_vocabulary: ClassVar[bool] = True
    limits: ClassVar[Limits] = Limits(examples=256, clients=4, gpu=True)

    @property
    def view(self) -> str:  # type: ignore[override]
        return f"hidden@{-self.layers}"

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor:
        """The image embedding before normalisation, [clients, examples, dim], from activations hidden@−layers."""
        raise NotImplementedError

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return F.normalize(self.embed(task, params, x), dim=-1)

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        """The frozen model's, for adapters that do not change the text tower."""
        return task.names()[None].to(dtype_of(params))

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        return params | {TEXT_FEATURES: self.class_vectors(task, params)}

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * self.features(task, params, x) @ class_vectors(self, task, params).mT

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Image features are compared before normalisation, where differences are not scaled down."""
        text = self.class_vectors(task, params)
        if self.alignment == "classes":
            return task.scale * self.features(task, params, batch.x) @ text.mT, text
        embedding = self.embed(task, params, batch.x)
        return task.scale * F.normalize(embedding, dim=-1) @ text.mT, embedding


def towers_of(task: Task, precision: Precision = "full") -> Towers:
    if not isinstance(task.tower, Towers):
        raise FedvlmError("this adapter changes a CLIP's own layers, and this backbone has no two towers to give")
    return task.tower if precision == "full" else towers_in_bfloat16(task.tower)


@lru_cache(maxsize=4)
def towers_in_bfloat16(towers: Towers) -> Towers:
    return towers.to(dtype=torch.bfloat16)


def dtype_of(params: Params) -> torch.dtype:
    return next(iter(params.values())).dtype


def require_phrases(task: Task) -> tuple[str, ...]:
    """The phrases whose embeddings are Task.text: encoding the same ones makes round 0 zero-shot."""
    if len(task.phrases) != len(task.classes):
        raise FedvlmError(
            f"Task.phrases holds {len(task.phrases)} phrases for {len(task.classes)} classes, and this adapter's text tower "
            "encodes one for each; give a single template= (in Python, the phrases that Task.text embeds)"
        )
    return task.phrases


@lru_cache(maxsize=8)
def encode_lower_layers(
    text_tower: TextTower, phrases: tuple[str, ...], layers: int
) -> tuple[PromptPlan, LowerActivations]:
    """The tokens, and the input of the last `layers` layers: the same in every step, so computed once."""
    plan = text_tower.phrases(phrases)
    return plan, text_tower.below(plan, layers)
