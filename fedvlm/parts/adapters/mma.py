"""pFedMMA (Ghiasi et al., 2025): small networks beside both towers' last layers, whose middle layer is shared.

(Multi-modal adapters: Yang et al., 2024.) scale · up(relu(middle(relu(down(norm₁ x))))) is added to a layer's output.
down and up belong to one tower and stay private; middle, one per layer and the same in both towers, is all that is
sent. logits = the backbone's scale · cos(image, class name in the run's template). Parameters: `middle` [layers, size,
size]; private `image.down` [layers, size, width], `image.up` [layers, width, size], `text.down`, `text.up`; each with a
bias (`middle.bias`, …).

Our reading: up starts at 0, so that round 0, and a newcomer in any round, is zero-shot (multi-modal adapters start
everything at random with scale 0.001, and rescale gradients). Starting from 0, the scale only changes the learning
speed; it is 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Task
from fedvlm.core.ranges import Count, Whole, default
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params, linear
from fedvlm.parts.adapters.layered import Layered, dtype_of, encode_lower_layers, require_phrases, towers_of
from fedvlm.towers.layers import Beside

PRIVATE = tuple(
    f"{tower}.{part}{bias}" for tower in ("image", "text") for part in ("down", "up") for bias in ("", ".bias")
)


@dataclass(frozen=True)
class Mma(Layered):
    private: tuple[str, ...] = PRIVATE
    size: Count = 32  # width of the middle layer
    layers: Whole = default(2, "effort")  # last layers of each tower, with adapters; 0: all (of towers of equal depth)
    scale: float = 1.0  # factor of an adapter's output

    def init(self, task: Task, seed: int) -> Params:
        both, size = towers_of(task), self.size
        require_phrases(task)
        layers = len(both.image.last(self.layers).layers)
        both.text.last(layers)  # an error where the text tower has fewer layers
        rng, params = generator(seed, 67), {}
        for name, width in (("image.down", both.image.width), ("text.down", both.text.width), ("middle", size)):
            params[name] = (2 / size) ** 0.5 * torch.randn(layers, size, width, generator=rng)
            params[f"{name}.bias"] = torch.zeros(layers, size)
        for tower, width in (("image", both.image.width), ("text", both.text.width)):
            params |= {f"{tower}.up": torch.zeros(layers, width, size), f"{tower}.up.bias": torch.zeros(layers, width)}
        return params

    def beside(self, params: Params, tower: str) -> Beside:
        """The adapters of one tower, as a function of (layer, norm₁ x); see towers/layers.py."""

        def added(layer: int, x: Tensor) -> Tensor:
            def affine(name: str, y: Tensor) -> Tensor:
                return linear(y, params[name][:, layer].to(y), params[f"{name}.bias"][:, layer].to(y))

            inner = F.relu(affine("middle", F.relu(affine(f"{tower}.down", x.flatten(1, 2)))))
            return self.scale * torch.unflatten(affine(f"{tower}.up", inner), 1, x.shape[1:3])

        return added

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor:
        image_layers = towers_of(task, self.precision).image.last(self.layers)
        return image_layers.features(x, beside=self.beside(params, "image")).to(dtype_of(params))

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        text_tower, layers = towers_of(task, self.precision).text, params["middle"].shape[1]
        plan, hidden = encode_lower_layers(text_tower, require_phrases(task), layers)
        return text_tower.above(hidden, plan, beside=self.beside(params, "text")).to(dtype_of(params))
