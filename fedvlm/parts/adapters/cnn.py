"""Full training of the small network that pfl-research (Granqvist et al., 2024) compares simulators on, from pixels of
CIFAR-10 to classes: two 3×3 convolutions, a pool, one hidden layer, all of it shared.

There is no dropout (our reading: a client's step should not depend on a random stream), and pixels are normalised by
ImageNet's mean and standard deviation by channel, which differ from CIFAR-10's by less than 0.05. Weights start as Glorot
and Bengio (2010) draw them. Images of another size than 32 pixels are pooled to the same grid.

A client's step is too small for a GPU, so clients are computed side by side: a convolution is one batched product over all
clients there, and a grouped convolution on a CPU (`benchmarks/contest.py --layers` measures both).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.core.adapter import Limits, Task
from fedvlm.core.ranges import Count
from fedvlm.core.state import Params, linear
from fedvlm.parts.adapters.network import Network, pixels_to_float

GRID = 14  # positions along a side that the hidden layer sees: what pooling by 2 leaves of 32 pixels
SIDE = 3  # of a convolution's kernel


@dataclass(frozen=True)
class Cnn(Network):
    width: Count = 32  # channels of the first convolution; the second has twice as many, the hidden layer four times

    view: ClassVar[str] = "pixels"
    limits: ClassVar[Limits] = Limits(examples=256, clients=64, gpu=True)

    def build(self, task: Task) -> nn.Module:
        width = self.width
        convolutions = {"conv1": nn.Conv2d(3, width, SIDE), "conv2": nn.Conv2d(width, 2 * width, SIDE)}
        hidden = nn.Linear(2 * width * GRID**2, 4 * width)
        module = nn.ModuleDict(convolutions | {"fc1": hidden, "fc2": nn.Linear(4 * width, len(task.classes))})
        for name, value in module.named_parameters():
            if name.endswith("weight"):
                nn.init.xavier_uniform_(value)
        return module

    def logits_and_features(
        self, task: Task, params: Params, x: Tensor, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`real`, which marks examples that are not padding, is ignored: there is no batch norm here."""
        x = pixels_to_float(x, "imagenet")
        with self.autocast(x.device):
            for name in ("conv1", "conv2"):
                x = convolved(x, params[f"{name}.weight"], params[f"{name}.bias"]).relu()
            x = pooled(x.flatten(0, 1)).view(*x.shape[:2], -1)
            features = linear(x, params["fc1.weight"], params["fc1.bias"]).relu()
            logits = linear(features, params["fc2.weight"], params["fc2.bias"])
        return self.widened(logits), self.widened(features)


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [clients, examples, channels, height, width] by each client's own weights, or by those that are the same for all."""
    if len(weight) == 1:
        out = F.conv2d(x.flatten(0, 1), weight[0], bias[0])
        return out.view(*x.shape[:2], *out.shape[1:])
    x = x.expand(len(weight), *x.shape[1:])
    return by_products(x, weight, bias) if x.is_cuda else by_groups(x, weight, bias)


def by_groups(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One convolution, in which a client is a group of channels."""
    out = F.conv2d(x.transpose(0, 1).flatten(1, 2), weight.flatten(0, 1), bias.flatten(), groups=len(weight))
    return out.view(x.shape[1], len(weight), -1, *out.shape[2:]).transpose(0, 1)


def by_products(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The pixels under every position of the kernel as columns, times the weights."""
    clients, examples, _, height, width = x.shape
    # as the channels of one image: torch's kernel starts once for each image
    columns = F.unfold(x.reshape(1, -1, height, width), SIDE).view(clients, examples, weight[0, 0].numel(), -1)
    out = weight.flatten(2)[:, None] @ columns + bias[:, None, :, None]
    return out.view(clients, examples, -1, height - SIDE + 1, width - SIDE + 1)


def pooled(x: Tensor) -> Tensor:
    """Average the map over GRID × GRID positions."""
    if x.shape[-2:] == (2 * GRID, 2 * GRID):
        return F.max_pool2d(x, 2)
    return F.adaptive_max_pool2d(x, GRID)
