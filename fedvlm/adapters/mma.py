"""pFedMMA (Ghiasi et al., 2025; multi-modal adapters: Yang et al., 2024): small networks beside the last layers of both
towers, whose middle both towers and all clients share.

A layer's result gets + scale · up(relu(middle(relu(down(norm₁ x))))). down and up belong to one tower and stay private;
middle, one a layer and the same in both towers, is all that travels. logits = the backbone's scale · cos(image, class
name in the run's template). Parameters: `middle` [layers, size, size]; private `image.down` [layers, size, width],
`image.up` [layers, width, size], `text.down`, `text.up`; and a bias each (`middle.bias`, …).

Our reading: up starts at 0, so that round 0, and a newcomer in any round, is zero-shot (multi-modal adapters start all at
random with scale 0.001, and rescale gradients); from 0, scale is no more than a pace, and 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import Task
from fedvlm.adapters.layered import Layered, kind, phrases, read, towers_of
from fedvlm.backbones.layers import Beside
from fedvlm.core import Params, linear
from fedvlm.seeds import generator

OWN = tuple(f"{tower}.{part}{bias}" for tower in ("image", "text") for part in ("down", "up") for bias in ("", ".bias"))


@dataclass(frozen=True)
class Mma(Layered):
    private: tuple[str, ...] = OWN
    size: int = 32  # of the middle
    layers: int = 2  # that get one, the last of each tower; 0 is all (of towers of equal depth)
    scale: float = 1.0  # of what is added

    def init(self, task: Task, seed: int) -> Params:
        both, size = towers_of(task), self.size
        phrases(task)
        layers = len(both.image.last(self.layers).layers)
        both.text.last(layers)
        draw, params = generator(seed, 67), {}
        for name, width in (("image.down", both.image.width), ("text.down", both.text.width), ("middle", size)):
            params[name] = (2 / size) ** 0.5 * torch.randn(layers, size, width, generator=draw)
            params[f"{name}.bias"] = torch.zeros(layers, size)
        for tower, width in (("image", both.image.width), ("text", both.text.width)):
            params |= {f"{tower}.up": torch.zeros(layers, width, size), f"{tower}.up.bias": torch.zeros(layers, width)}
        return params

    def beside(self, params: Params, tower: str) -> Beside:
        def added(layer: int, x: Tensor) -> Tensor:
            def through(name: str, y: Tensor) -> Tensor:
                return linear(y, params[name][:, layer].to(y), params[f"{name}.bias"][:, layer].to(y))

            inner = F.relu(through("middle", F.relu(through(f"{tower}.down", x.flatten(1, 2)))))
            return self.scale * through(f"{tower}.up", inner).unflatten(1, x.shape[1:3])

        return added

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        top = towers_of(task, self.precision).image.last(self.layers)
        return F.normalize(top.features(x, beside=self.beside(params, "image")).to(kind(params)), dim=-1)

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        reader, layers = towers_of(task, self.precision).text, params["middle"].shape[1]
        plan, hidden = read(reader, phrases(task), layers)
        return reader.above(hidden, plan, beside=self.beside(params, "text")).to(kind(params))
