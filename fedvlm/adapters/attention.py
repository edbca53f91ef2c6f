"""FedCLIP's attention adapter (Lu et al., 2023): a learned mask weights the coordinates of the image embedding.

a(h) = softmax(W₂ tanh(W₁ h + b₁) + b₂),  h* = a(h)·h / ‖a(h)·h‖,  logits = scale · cos(h*, class name).
2(d² + d) parameters, all shared. Initialised as torch.nn.Linear: uniform in ±1/√d.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import Adapter, Task
from fedvlm.core import Params, linear
from fedvlm.seeds import generator


@dataclass(frozen=True)
class Attention(Adapter):
    open_vocabulary: ClassVar[bool] = True

    def init(self, task: Task, seed: int) -> Params:
        task.names()
        rng, bound, d = generator(seed, 2), task.dim**-0.5, task.dim
        shapes = {"w1": (d, d), "b1": (d,), "w2": (d, d), "b2": (d,)}
        return {k: (torch.rand(s, generator=rng) * 2 - 1) * bound for k, s in shapes.items()}

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        hidden = torch.tanh(linear(x, params["w1"], params["b1"]))
        mask = torch.softmax(linear(hidden, params["w2"], params["b2"]), dim=-1)
        return F.normalize(mask * x, dim=-1)

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * self.features(task, params, x) @ task.names().mT
