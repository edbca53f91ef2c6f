"""The common base of adapters that train a whole network: ordinary PyTorch modules, called client by client.

Everything is trained and everything is shared, running statistics included. These are kept as moments, E[x] and E[x²]:
averaged over clients, with any weights, they are the moments of all clients' data together, which averaged variances
are not. A network is large, so a loop over clients adds almost no time; on a CPU clients train one at a time.

precision=half computes in bfloat16 by torch's autocast: convolutions and products; norms, losses and the parameters that
the optimiser changes stay float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.func import functional_call

from fedvlm.core.adapter import Adapter, Limits, Task
from fedvlm.core.data import Batch
from fedvlm.core.seeds import key
from fedvlm.core.state import Params
from fedvlm.towers.products import fast_linear

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation of red, green, blue
EPS = 1e-5  # added to a variance, as in torch's batch norm


class Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class TrackStatistic(torch.autograd.Function):
    """The identity on x. Its backward pass gives the running statistic the gradient (running − batch): a step along it
    moves the running value towards the batch's, as torch's batch norm does in the forward pass."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, running: Tensor, batch: Tensor) -> Tensor:
        ctx.save_for_backward(running - batch)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (difference,) = ctx.saved_tensors
        return gradients[0], difference, None


track_statistic: Callable[[Tensor, Tensor, Tensor], Tensor] = TrackStatistic.apply


class Norm(nn.Module):
    """Batch norm over [examples, channels, height, width]. `real` [examples] are the weights of the examples in training
    (0 for padding); None: evaluation, with the running statistics."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.running_mean: Tensor
        self.running_square: Tensor
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_square", torch.ones(width))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        if x.dtype == torch.bfloat16:  # the variance is a difference of two moments, which needs more digits
            with torch.autocast(x.device.type, enabled=False):
                return self.forward(x.to(self.weight.dtype), real).to(x.dtype)
        mean, square = self.running_mean.detach(), self.running_square.detach()
        if real is not None:
            mean = torch.einsum("n,nc->c", real, x.mean((2, 3)))
            square = torch.einsum("n,nc->c", real, x.square().mean((2, 3)))
            x = track_statistic(x, self.running_mean, mean.detach())
            x = track_statistic(x, self.running_square, square.detach())
        scale = self.weight * ((square - mean.square()).clamp(min=0) + EPS).rsqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


@dataclass(frozen=True)
class Network(Adapter):
    """`build` returns the module: called with (x, real), it gives logits and features of one model."""

    # half: bfloat16 in convolutions and products; the trained parameters stay float32
    precision: Literal["full", "half"] = "full"

    limits: ClassVar[Limits] = Limits(examples=32, clients=1, gpu=True)

    def build(self, task: Task) -> nn.Module:
        raise NotImplementedError

    def module(self, task: Task) -> nn.Module:
        """The module to call with each client's parameters."""
        return _without_values(self, len(task.classes))

    def init(self, task: Task, seed: int) -> Params:
        with torch.random.fork_rng(devices=[]):  # torch's own initialisation, without changing the global generator
            torch.manual_seed(key(seed, 41) % 2**63)
            module = self.build(task)
        return {k: v.detach().clone() for k, v in module.state_dict().items()}

    def logits_and_features(
        self, task: Task, params: Params, x: Tensor, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[clients, examples, ...] each; `real` as in `Norm`, with a client axis."""
        module, clients = self.module(task), max([len(x), *(len(v) for v in params.values())])
        models = single_clients(params, clients)
        with self.autocast(x.device), fast_linear(x):
            found = [
                functional_call(module, models[i], (x[i % len(x)], None if real is None else real[i % len(real)]))
                for i in range(clients)
            ]
        logits, features = (self.widened(torch.stack(each)) for each in zip(*found, strict=True))
        return logits, features

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "half" else nullcontext()

    def widened(self, x: Tensor) -> Tensor:
        """What the network computed, for losses and norms."""
        return x.to(torch.get_default_dtype()) if self.precision == "half" else x

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return self.logits_and_features(task, params, x)[1]

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return self.logits_and_features(task, params, x)[0]

    def train_logits(self, task: Task, params: Params, batch: Batch) -> Tensor:
        return self.logits_and_aligned(task, params, batch)[0]

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.logits_and_features(task, params, batch.x, batch.weight)


def single_clients(params: Params, clients: int) -> list[Params]:
    """The parameters of each client. A client alone gets views, whose gradients are not copied."""
    if all(len(v) == 1 for v in params.values()):
        return [{k: v.squeeze(0) for k, v in params.items()}] * clients
    return [{k: v[i % len(v)] for k, v in params.items()} for i in range(clients)]


@lru_cache(maxsize=8)
def _without_values(adapter: Network, classes: int) -> nn.Module:
    """The module on the meta device: every call brings its own parameters."""
    with torch.device("meta"):
        return adapter.build(Task(tuple(map(str, range(classes))), None, 0, 1.0))


def channels_last(x: Tensor) -> Tensor:
    """Store images with their channels last in memory on a GPU in bfloat16, as its fast convolutions read them."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda and torch.is_autocast_enabled("cuda") else x


Normalisation = Literal["signed", "imagenet"]


def pixels_to_float(x: Tensor, normalisation: Normalisation = "signed") -> Tensor:
    """Integer pixels 0 … 255 as numbers in [−1, 1], or with ImageNet's mean and standard deviation by channel, as public
    weights expect them; floating-point input as it is."""
    if x.is_floating_point():
        return x
    x = x.to(torch.get_default_dtype())
    if normalisation == "signed":
        return x / 127.5 - 1
    mean, std = (torch.tensor(v, dtype=x.dtype, device=x.device)[:, None, None] for v in IMAGENET)
    return (x / 255 - mean) / std
