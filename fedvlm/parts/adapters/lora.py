"""CLIP-LoRA (Zanella and Ben Ayed, 2024), federated (FedLoRA): low-rank changes of attention in both towers.

The attention projections of the last layers are changed; everything else is frozen. A projection W becomes
W + scale · B A, with A [rank, width] random (Kaiming, uniform) and B [width, rank] = 0, so round 0 is zero-shot.
logits = the backbone's scale · cos(image, class name in the run's template). Parameters, all shared:
`image.{i}.{projection}.A`, `….B`, `text.{i}.{projection}.A`, `….B`, i = 0, 1, … the trained layers from the lowest up.
A and B are averaged separately, and the mean of B A is not the product of the means: that is FedLoRA as published.

CLIP-LoRA itself changes q, k and v of all layers (layers=0) at rank 2 with scale 1/√rank; FedDTL q, k, v and out of the
last 3 of 12 at rank 4 with scale 1. For rules that use one tower: `embed` is the image embedding before normalisation,
`features` after it, `class_vectors` the text side. Variants that train something else (ffa, small, residual) say in
`factors` what A and B are. `private=*.B` keeps B on the client, which is FedSA-LoRA (Guo et al., 2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.ranges import Count, Whole, default
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params, select
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.layered import Layered, dtype_of, encode_lower_layers, require_phrases, towers_of

Projection = Literal["q", "k", "v", "out"]


class Changed(NamedTuple):
    """A projection that is changed."""

    name: str  # image.0.q
    width: int  # of its input and output
    at: tuple[int, int, int]  # tower, layer, projection: for random numbers


@dataclass(frozen=True)
class Lora(Layered):
    rank: Count = default(4, "effort")  # of B A
    layers: Whole = default(2, "effort")  # the last layers of each tower, which are trained; 0: all
    projections: tuple[Projection, ...] = default(("q", "k", "v"), "effort")  # of attention: any of q, k, v, out
    scale: float = 1.0  # factor of B A
    towers: Literal["both", "image", "text"] = "both"  # which towers are trained

    trains_factors: ClassVar[bool] = True  # A and B are its parameters

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
        if self.towers != "image":
            require_phrases(task)
        params: Params = {}
        for name, width, at in self.changed(task):
            params[f"{name}.A"] = random_down(self.rank, width, seed, at)
            params[f"{name}.B"] = torch.zeros(width, self.rank)
        return params

    def changed(self, task: Task) -> Iterator[Changed]:
        """The projections that are changed, lowest layer first."""
        both = towers_of(task)
        sizes = {
            "image": (both.image.width, len(both.image.last(self.layers).layers)),
            "text": (both.text.width, len(both.text.last(self.layers))),
        }
        for side, (tower, (width, layers)) in enumerate(sizes.items()):
            for i in range(layers if self.towers in ("both", tower) else 0):
                for p, projection in enumerate(self.projections):
                    yield Changed(f"{tower}.{i}.{projection}", width, (side, i, p))

    def factors(self, task: Task, params: Params) -> Params:
        """A and B of each changed projection, [clients or 1, ...], named as in towers/layers.py."""
        return select(params, [f"{c.name}.{factor}" for c in self.changed(task) for factor in "AB"])

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor:
        image_layers = towers_of(task, self.precision).image.last(self.layers)
        return image_layers.features(x, factors_per_client(self.factors(task, params)), self.scale).to(dtype_of(params))

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return x.to(dtype_of(params)) if self.towers == "text" else super().features(task, params, x)

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        if self.towers == "image":
            return super().class_vectors(task, params)
        text_tower = towers_of(task, self.precision).text
        plan, hidden = encode_lower_layers(text_tower, require_phrases(task), self.layers)
        return text_tower.above(hidden, plan, factors_per_client(self.factors(task, params)), self.scale)


def random_down(rank: int, width: int, seed: int, at: tuple[int, int, int]) -> Tensor:
    """A at the start: Kaiming, uniform."""
    unit = torch.rand(rank, width, generator=generator(seed, 53, *at))
    return (2 * unit - 1).div(width**0.5)


def factors_per_client(factors: Params) -> Params:
    """Expand all factors to the same number of clients, where some are private and the shared ones have an axis of
    one."""
    clients = max(map(len, factors.values()))
    return {k: v.expand(clients, -1, -1) for k, v in factors.items()}


def trains_factors(adapter: Adapter) -> bool:
    """Whether A and B are both trained, for rules that treat them differently."""
    return isinstance(adapter, Lora) and adapter.trains_factors
