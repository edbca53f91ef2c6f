"""Whole networks as adapters: ordinary PyTorch code for one model, called client by client.

Everything is trained and everything travels, running statistics too. These are kept as moments, E[x] and E[x²]: averaged
over clients, with whatever weights, they are the moments of all clients' data together, which averaged variances are not.
A network is large, so that a loop over clients costs nothing beside it (serial is the measured rule's choice here).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedvlm.adapters.base import Adapter, Limits, Task
from fedvlm.core import Batch, Params
from fedvlm.seeds import key

LEAST = 1e-5  # variance, as in torch's batch norm


class Follow(torch.autograd.Function):
    """x as it is; on the way back the running value gets, for a gradient, how far it is from what was seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, running: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(running - seen)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (away,) = ctx.saved_tensors
        return gradients[0], away, None


class Norm(nn.Module):
    """Batch norm over [examples, channels, height, width]; `real` [examples] says in training which are no padding."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.running_mean: Tensor
        self.running_square: Tensor
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_square", torch.ones(width))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        mean, square = self.running_mean.detach(), self.running_square.detach()
        if real is not None:
            mean = torch.einsum("n,nc->c", real, x.mean((2, 3)))
            square = torch.einsum("n,nc->c", real, x.square().mean((2, 3)))
            x = Follow.apply(x, self.running_mean, mean.detach())
            x = Follow.apply(x, self.running_square, square.detach())
        slope = self.weight * ((square - mean.square()).clamp(min=0) + LEAST).rsqrt()
        return x * slope[:, None, None] + (self.bias - mean * slope)[:, None, None]


@dataclass(frozen=True)
class Network(Adapter):
    """`build` gives the module: called with (x, real), it returns logits and features of one model."""

    limits: ClassVar[Limits] = Limits(examples=32, clients=1, gpu=True)

    def build(self, task: Task) -> nn.Module:
        raise NotImplementedError

    def module(self, task: Task) -> nn.Module:
        return _built(self, len(task.classes))

    def init(self, task: Task, seed: int) -> Params:
        with torch.random.fork_rng(devices=[]):  # torch's own initialisations, without leaving a trace in its generator
            torch.manual_seed(key(seed, 41) % 2**63)
            made = self.build(task)
        return {k: v.detach().clone() for k, v in made.state_dict().items()}

    def each(self, task: Task, params: Params, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits and features [clients, examples, ...]."""
        module, clients = self.module(task), max([len(x), *(len(v) for v in params.values())])
        of_one = [
            functional_call(
                module,
                {k: v[i % len(v)] for k, v in params.items()},
                (x[i % len(x)], None if real is None else real[i % len(real)]),
            )
            for i in range(clients)
        ]
        return torch.stack([logits for logits, _ in of_one]), torch.stack([features for _, features in of_one])

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return self.each(task, params, x)[1]

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return self.each(task, params, x)[0]

    def train_logits(self, task: Task, params: Params, batch: Batch) -> Tensor:
        return self.logits_and_aligned(task, params, batch)[0]

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.each(task, params, batch.x, batch.weight)


@lru_cache(maxsize=8)
def _built(adapter: Network, classes: int) -> nn.Module:
    """The shape of it, without numbers: those come with each call."""
    with torch.device("meta"):
        return adapter.build(Task(tuple(map(str, range(classes))), None, 0, 1.0))


def scaled(x: Tensor) -> Tensor:
    """Pixels 0 … 255 as numbers around 0; anything else as it is."""
    return x if x.is_floating_point() else (x.to(torch.get_default_dtype()) / 127.5) - 1
