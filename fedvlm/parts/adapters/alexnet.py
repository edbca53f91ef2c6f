"""Full training of AlexNet (Krizhevsky et al., 2012, as in torchvision) from pixels to classes, all of it shared.

FedCLIP's paper compares it. Five convolutions, two hidden layers, and a classifier; parameters are named as in
torchvision and start at random as there. There is no dropout (our reading: a client's step should not depend on a random
stream). For small images the first layers keep the resolution, by the same rule as in `resnet.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.core.adapter import Task
from fedvlm.core.ranges import Count
from fedvlm.parts.adapters.network import Network, pixels_to_float
from fedvlm.parts.adapters.resnet import SMALL_IMAGE

GRID = 6  # positions along a side that the hidden layers see


@dataclass(frozen=True)
class AlexNet(Network):
    width: Count = 64  # channels of the first convolution; the hidden layers have 64 times as many

    view: ClassVar[str] = "pixels"

    def build(self, task: Task) -> nn.Module:
        return Convolutions(self.width, len(task.classes))


class Convolutions(nn.Module):
    def __init__(self, width: int, classes: int):
        super().__init__()
        # the numbers are the places of these layers in torchvision's sequence
        self.features = nn.ModuleDict(
            {
                "0": nn.Conv2d(3, width, 11, 4, 2),
                "3": nn.Conv2d(width, 3 * width, 5, padding=2),
                "6": nn.Conv2d(3 * width, 6 * width, 3, padding=1),
                "8": nn.Conv2d(6 * width, 4 * width, 3, padding=1),
                "10": nn.Conv2d(4 * width, 4 * width, 3, padding=1),
            }
        )
        self.classifier = nn.ModuleDict(
            {
                "1": nn.Linear(4 * width * GRID**2, 64 * width),
                "4": nn.Linear(64 * width, 64 * width),
                "6": nn.Linear(64 * width, classes),
            }
        )

    def forward(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """`real`, which marks examples that are not padding, is ignored: there is no batch norm here."""
        x = pixels_to_float(x)
        first, small = cast(nn.Conv2d, self.features["0"]), x.shape[-1] <= SMALL_IMAGE
        x = torch.relu(F.conv2d(x, first.weight, first.bias, *((1, 5) if small else (4, 2))))
        edge = 1 if small else 0
        x = x if small else F.max_pool2d(x, 3, 2)
        x = F.max_pool2d(torch.relu(self.features["3"](x)), 3, 2, edge)
        for name in ("6", "8", "10"):
            x = torch.relu(self.features[name](x))
        x = F.adaptive_avg_pool2d(F.max_pool2d(x, 3, 2, edge), GRID).flatten(1)
        for name in ("1", "4"):
            x = torch.relu(self.classifier[name](x))
        return self.classifier["6"](x), x
