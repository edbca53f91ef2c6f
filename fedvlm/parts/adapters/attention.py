"""FedCLIP's attention adapter (Lu et al., 2023): a learned mask weights the coordinates of the image embedding.

a(h) = softmax(W₂ tanh(W₁ h + b₁) + b₂),  h* = a(h)·h / ‖a(h)·h‖,  logits = scale · cos(h*, class name), with h the
embedding before normalisation, as in the paper and its code: from a vector of length 1, the mask hardly depends on the
image. A black box gives normalised embeddings only; h then has length 1. W₁ is [width · d, d], so that the adapter has
2 · width · d² + (width + 1) · d parameters, all shared. Initialised as torch.nn.Linear: uniform in ±1/√(its inputs).

Rules that align features compare d · a(h)·h (our reading): not normalised, and times d so that a uniform mask leaves the
embedding as it is. The coordinates of a(h)·h alone are d times smaller, and CORAL's covariances d⁴.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.data import Batch
from fedvlm.core.ranges import Count
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params, linear


@dataclass(frozen=True)
class Attention(Adapter):
    width: Count = 1  # of the hidden layer, in widths of the embedding

    view: ClassVar[str] = "raw"
    open_vocabulary: ClassVar[bool] = True
    diagnostics: ClassVar[Mapping[str, str]] = {
        "mask_contrast": "standard deviation of the mask over coordinates, relative to its mean; 0: all count alike",
        "mask_variation": "standard deviation of the mask over images, relative to its mean; 0: the same for all images",
    }

    def init(self, task: Task, seed: int) -> Params:
        task.names()
        rng, d, hidden = generator(seed, 2), task.dim, self.width * task.dim
        shapes = {"w1": (hidden, d), "b1": (hidden,), "w2": (d, hidden), "b2": (d,)}
        bounds = {"w1": d**-0.5, "b1": d**-0.5, "w2": hidden**-0.5, "b2": hidden**-0.5}
        return {k: (torch.rand(s, generator=rng) * 2 - 1) * bounds[k] for k, s in shapes.items()}

    def mask(self, params: Params, x: Tensor) -> Tensor:
        """a(h)."""
        hidden = torch.tanh(linear(x, params["w1"], params["b1"]))
        return torch.softmax(linear(hidden, params["w2"], params["b2"]), dim=-1)

    def masked(self, params: Params, x: Tensor) -> Tensor:
        """a(h)·h."""
        return self.mask(params, x) * x

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return F.normalize(self.masked(params, x), dim=-1)

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * self.features(task, params, x) @ task.names().mT

    def diagnose(self, task: Task, params: Params, x: Tensor) -> Params:
        mask = self.mask(params, x)
        mean = mask.mean(1)
        by_image = (mask.var(1, correction=0).sqrt() / mean).mean(-1)
        return {"mask_contrast": mean.var(-1, correction=0).sqrt() * mask.shape[-1], "mask_variation": by_image}

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        masked = self.masked(params, batch.x)
        return task.scale * F.normalize(masked, dim=-1) @ task.names().mT, task.dim * masked
