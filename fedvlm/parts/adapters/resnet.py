"""Full training of a residual network (He et al., 2016) from pixels to classes, all of it shared.

Parameters are named as in torchvision and timm (conv1, layer1.0.bn1, …, fc), so `start=` takes a pre-trained
.safetensors file of theirs, and pixels are then normalised as these weights expect it (ImageNet's mean and standard
deviation). Without one it starts at random; nothing is downloaded. For small images the first layers keep the resolution,
as is usual.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.core.adapter import Task
from fedvlm.core.ranges import Count, default
from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.network import Network, Norm, Normalisation, channels_last, pixels_to_float

BLOCKS = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
SMALL_IMAGE = 96  # pixels; up to this width the first layers keep the resolution


@dataclass(frozen=True)
class ResNet(Network):
    depth: Literal[10, 18, 34, 50] = 18  # layers: ResNet-10, -18, -34 or -50
    width: Count = 64  # channels of the first stage
    start: str = default("", "path")  # a .safetensors file of pre-trained parameters; "": random
    normalise: Literal["auto", "signed", "imagenet"] = "auto"  # pixels: to ±1, or by ImageNet's mean; auto: with start=

    view: ClassVar[str] = "pixels"

    def build(self, task: Task) -> nn.Module:
        return ResidualNetwork(BLOCKS[self.depth], self.width, self.depth >= 50, len(task.classes), self.normalisation)

    @property
    def normalisation(self) -> Normalisation:
        if self.normalise == "auto":
            return "imagenet" if self.start else "signed"
        return self.normalise

    def init(self, task: Task, seed: int) -> Params:
        random = super().init(task, seed)
        if not self.start:
            return random
        found = read_weights(Path(self.start))
        if self.normalise == "auto" and any(k.endswith("running_square") for k in found):
            raise FedvlmError(
                f"start={self.start} was trained with fedvlm; say normalise=signed, or normalise=imagenet, as it was there"
            )
        return random | load_pretrained(Path(self.start), found, random)


class ResidualNetwork(nn.Module):
    def __init__(self, blocks: tuple[int, ...], width: int, deep: bool, classes: int, normalisation: Normalisation):
        super().__init__()
        self.normalisation = normalisation
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), Norm(width)
        channels = width
        for stage, count in enumerate(blocks):
            members = nn.ModuleList()
            for k in range(count):
                block = ResidualBlock(channels, width * 2**stage, 2 if stage and not k else 1, deep)
                members.append(block)
                channels = block.out_channels
            setattr(self, f"layer{stage + 1}", members)
        self.stages = len(blocks)
        self.fc = nn.Linear(channels, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d) and not m.weight.is_meta:
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        x = channels_last(pixels_to_float(x, self.normalisation))
        small = x.shape[-1] <= SMALL_IMAGE
        x = F.conv2d(x, self.conv1.weight, stride=1 if small else 2, padding=3)
        x = torch.relu(self.bn1(x, real))
        x = x if small else F.max_pool2d(x, 3, 2, 1)
        for stage in range(1, self.stages + 1):
            for block in getattr(self, f"layer{stage}"):
                x = block(x, real)
        features = x.mean((2, 3))
        return self.fc(features), features


class ResidualBlock(nn.Module):
    """A residual block: two 3×3 convolutions or (deep) 1×1, 3×3, 1×1 with four times the channels, plus a shortcut."""

    def __init__(self, in_channels: int, width: int, stride: int, deep: bool):
        super().__init__()
        self.out_channels = width * 4 if deep else width
        sizes = [(in_channels, width, 1, 1), (width, width, 3, stride), (width, self.out_channels, 1, 1)]
        if not deep:
            sizes = [(in_channels, width, 3, stride), (width, width, 3, 1)]
        for i, (before, after, kernel, step) in enumerate(sizes, 1):
            setattr(self, f"conv{i}", nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False))
            setattr(self, f"bn{i}", Norm(after))
        self.count = len(sizes)
        self.downsample = None
        if stride > 1 or in_channels != self.out_channels:
            shortcut = nn.Conv2d(in_channels, self.out_channels, 1, stride, bias=False)
            self.downsample = nn.ModuleList([shortcut, Norm(self.out_channels)])

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        out = x
        for i in range(1, self.count + 1):
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out), real)
            out = out if i == self.count else torch.relu(out)
        if self.downsample is not None:
            convolve, norm = self.downsample
            x = norm(convolve(x), real)
        return torch.relu(out + x)


def read_weights(path: Path) -> Params:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise FedvlmError(f"start={path}: cannot be read as .safetensors ({error})") from error


def load_pretrained(path: Path, found: Params, initial: Params) -> Params:
    """The file's values of these parameters, with running variances as second moments; a classifier of another number of
    classes is left out."""
    found = dict(found)
    for name in [n for n in found if n.endswith("running_var")]:
        mean = found[name.replace("running_var", "running_mean")]
        found[name.replace("running_var", "running_square")] = found.pop(name) + mean.square()
    fits = {k: found[k].to(v.dtype) for k, v in initial.items() if k in found and found[k].shape == v.shape}
    missing = [k for k in initial if k not in fits and not k.startswith("fc.")]
    if missing:
        raise FedvlmError(
            f"start={path}: {len(missing)} of {len(initial)} tensors are missing or of another shape, such as "
            f"{missing[0]}; check depth= and width="
        )
    return fits
