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
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import Task
from fedvlm.adapters.layered import Layered, kind, phrases, read, towers_of
from fedvlm.core import FedvlmError, Params
from fedvlm.seeds import generator

Projection = Literal["q", "k", "v", "out"]


@dataclass(frozen=True)
class Lora(Layered):
    rank: int = 4
    layers: int = 2  # that are trained, the last of each tower; 0 is all
    projections: tuple[Projection, ...] = ("q", "k", "v")
    scale: float = 1.0  # of B A
    towers: Literal["both", "image", "text"] = "both"  # that are trained

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.projections:
            raise FedvlmError(f"rank={self.rank} must be at least 1, and projections= one or more of q, k, v, out")

    @property
    def view(self) -> str:  # type: ignore[override]
        return "embedding" if self.towers == "text" else f"hidden@{-self.layers}"

    @property
    def alignment(self) -> Literal["images", "classes"]:  # type: ignore[override]
        return "classes" if self.towers == "text" else "images"

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

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        if self.towers == "image":
            return super().class_vectors(task, params)
        reader = towers_of(task, self.precision).text
        plan, hidden = read(reader, phrases(task), self.layers)
        return reader.above(hidden, plan, params, self.scale)
