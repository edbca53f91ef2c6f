"""CLIP-LoRA (Zanella and Ben Ayed, 2024), federated (FedLoRA): low-rank changes of attention in both towers.

The attention projections of the last layers are changed; everything else is frozen. A projection W becomes
W + scale · B A, with A [rank, width] random (Kaiming, uniform) and B [width, rank] = 0, so round 0 is zero-shot.
logits = the backbone's scale · cos(image, class name in the run's template). Parameters, all shared:
`image.{i}.{projection}.A`, `….B`, `text.{i}.{projection}.A`, `….B`, i = 0, 1, … the trained layers from the lowest up.
A and B are averaged separately, and the mean of B A is not the product of the means: that is FedLoRA as published.

CLIP-LoRA itself changes q, k and v of all layers (layers=0) at rank 2 with scale 1/√rank; FedDTL q, k, v and out of the
last 3 of 12 at rank 4 with scale 1. For rules that use one tower: `embed` is the image embedding before normalisation,
`features` after it, `class_vectors` the text side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm.adapters.base import Task
from fedvlm.adapters.layered import Layered, dtype_of, encode_lower_layers, require_phrases, towers_of
from fedvlm.core import FedvlmError, Params
from fedvlm.keys import Count, Whole
from fedvlm.seeds import generator

Projection = Literal["q", "k", "v", "out"]


@dataclass(frozen=True)
class Lora(Layered):
    rank: Count = 4  # of B A
    layers: Whole = 2  # the last layers of each tower, which are trained; 0: all
    projections: tuple[Projection, ...] = ("q", "k", "v")  # of attention that are changed: q, k, v, out
    scale: float = 1.0  # factor of B A
    towers: Literal["both", "image", "text"] = "both"  # which towers are trained

    def __post_init__(self) -> None:
        if not self.projections:
            raise FedvlmError("projections= must be one or more of q, k, v, out")

    @property
    def view(self) -> str:  # type: ignore[override]
        return "embedding" if self.towers == "text" else f"hidden@{-self.layers}"

    @property
    def alignment(self) -> Literal["images", "classes"]:  # type: ignore[override]
        return "classes" if self.towers == "text" else "images"

    def init(self, task: Task, seed: int) -> Params:
        both = towers_of(task)
        if self.towers != "image":
            require_phrases(task)
        sizes = {
            "image": (both.image.width, len(both.image.last(self.layers).layers)),
            "text": (both.text.width, len(both.text.last(self.layers))),
        }
        params: Params = {}
        for side, (tower, (width, layers)) in enumerate(sizes.items()):
            for i in range(layers if self.towers in ("both", tower) else 0):
                for p, projection in enumerate(self.projections):
                    unit = torch.rand(self.rank, width, generator=generator(seed, 53, side, i, p))
                    params[f"{tower}.{i}.{projection}.A"] = (2 * unit - 1) / width**0.5
                    params[f"{tower}.{i}.{projection}.B"] = torch.zeros(width, self.rank)
        return params

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor:
        image_layers = towers_of(task, self.precision).image.last(self.layers)
        return image_layers.features(x, params, self.scale).to(dtype_of(params))

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return x.to(dtype_of(params)) if self.towers == "text" else super().features(task, params, x)

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        if self.towers == "image":
            return super().class_vectors(task, params)
        text_tower = towers_of(task, self.precision).text
        plan, hidden = encode_lower_layers(text_tower, require_phrases(task), self.layers)
        return text_tower.above(hidden, plan, params, self.scale)
