"""CLIP-LoRA (Zanella and Ben Ayed, 2024), federated (FedLoRA): low-rank changes of attention in the last layers of both
towers; everything else stays.

A projection W becomes W + scale · B A, with A [rank, width] at random (Kaiming, uniform) and B [width, rank] = 0: round 0 is
zero-shot. logits = the backbone's scale · cos(image, class name in the run's template). Parameters, all shared:
`image.{i}.{projection}.A`, `….B`, `text.{i}.{projection}.A`, `….B`, i = 0, 1, … the trained layers from the lowest up. A and
B are averaged separately, and the mean of B A is not the product of the means: that is FedLoRA as published.

CLIP-LoRA itself changes q, k and v of all layers (layers=0) at rank 2 with scale 1/√rank; FedDTL q, k, v and out of the last
3 of 12 at rank 4 with scale 1. For rules that look at one tower: `embed` is the image embedding before it is normalised,
`features` after, `classes` the text side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import Adapter, Task
from fedvlm.backbones.text import Below, Plan, TextTower
from fedvlm.backbones.vision import Both
from fedvlm.core import Batch, FedvlmError, Params
from fedvlm.seeds import generator

Projection = Literal["q", "k", "v", "out"]
Precision = Literal["full", "half"]  # half: frozen towers compute in bfloat16, what is learned stays float32


@dataclass(frozen=True)
class Lora(Adapter):
    rank: int = 4
    layers: int = 2  # that are trained, the last of each tower; 0 is all
    projections: tuple[Projection, ...] = ("q", "k", "v")
    scale: float = 1.0  # of B A
    towers: Literal["both", "image", "text"] = "both"  # that are trained
    precision: Precision = "full"

    needs: ClassVar[str] = "both towers"
    heavy: ClassVar[bool] = True
    reads_words: ClassVar[bool] = True
    most: ClassVar[int] = 4
    block: ClassVar[int] = 256

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.projections:
            raise FedvlmError(f"rank={self.rank} must be at least 1, and projections= one or more of q, k, v, out")

    @property
    def reads(self) -> str:  # type: ignore[override]
        return "embedding" if self.towers == "text" else f"hidden@{-self.layers}"

    @property
    def aligns(self) -> str:  # type: ignore[override]
        return "classes" if self.towers == "text" else "images"

    @property
    def opens(self) -> bool:
        return True

    def init(self, task: Task, seed: int) -> Params:
        both = towers_of(task)
        if self.towers != "image":
            phrases(task)
        sizes = {
            "image": (both.image.width, len(both.image.last(self.layers).layers)),
            "text": (both.text.width, len(both.text.last(self.layers))),
        }
        params: Params = {}
        for side, (tower, (width, layers)) in enumerate(sizes.items()):
            for i in range(layers if self.towers in ("both", tower) else 0):
                for p, projection in enumerate(self.projections):
                    drawn = torch.rand(self.rank, width, generator=generator(seed, 53, side, i, p))
                    params[f"{tower}.{i}.{projection}.A"] = (2 * drawn - 1) / width**0.5
                    params[f"{tower}.{i}.{projection}.B"] = torch.zeros(width, self.rank)
        return params

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor:
        """The image embedding before it is normalised, [clients, examples, dim]; of activations hidden@−layers."""
        top = towers_of(task, self.precision).image.last(self.layers)
        return top.features(x, params, self.scale).to(kind(params))

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return x.to(kind(params)) if self.towers == "text" else F.normalize(self.embed(task, params, x), dim=-1)

    def classes(self, task: Task, params: Params) -> Tensor:
        if self.towers == "image":
            return task.names()[None].to(kind(params))
        reader = towers_of(task, self.precision).text
        plan, hidden = read(reader, phrases(task), self.layers)
        return reader.above(hidden, plan, params, self.scale)

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
