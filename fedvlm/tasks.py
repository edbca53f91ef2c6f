"""What is to be learned: the loss a client descends and the score it reports. Everything else is the same for all tasks.

Classes: cross-entropy and accuracy. Masks: cross-entropy + soft Dice a pixel, and the Dice coefficient an image.
Characters: the next one of a text, which is a class again. An adapter names what it learns; data names what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core import Batch

Objective = Literal["cross-entropy", "contrastive"]
Loss = Callable[[Tensor, Batch], Tensor]  # logits → one number a client


@dataclass(frozen=True)
class Kind:
    what: str  # the data, in words
    metric: str  # the score's name
    losses: dict[Objective, Loss]
    score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # logits, y → score and loss, [clients, examples] each


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    return batch.mean(logits.logsumexp(-1) - logits.gather(-1, batch.y[..., None])[..., 0])


def contrastive(logits: Tensor, batch: Batch) -> Tensor:
    """The public FedCLIP code's loss: each image against the names of the batch's labels, and the reverse."""
    padding = (batch.weight == 0)[:, None]
    pairs = logits.gather(-1, batch.y[:, None].expand(-1, logits.shape[1], -1))
    least = torch.finfo(logits.dtype).min

    def matched(side: Tensor) -> Tensor:
        own = side.masked_fill(padding, least).log_softmax(-1).diagonal(dim1=-2, dim2=-1)
        return batch.mean(own.masked_fill(padding[:, 0], 0))

    return -(matched(pairs) + matched(pairs.mT)) / 2


def by_class(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    _, guess = logits.max(-1)  # not argmax: ten times slower on a CPU in the layout `linear` leaves
    return guess == y, logits.logsumexp(-1) - logits.gather(-1, y[..., None])[..., 0]


def dice(inside: Tensor, y: Tensor, smooth: float = 0.0) -> Tensor:
    """2|P ∩ Y| / (|P| + |Y|) for each image; 1 where both are empty."""
    y = y.to(inside.dtype)
    both, sum = (inside * y).sum((-2, -1)), (inside + y).sum((-2, -1))
    return torch.where(sum > 0, (2 * both + smooth) / (sum + smooth).clamp(min=1e-12), 1.0)


def mask_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy a pixel + 1 − soft Dice, for each image; the smoothing of 1 pixel is the usual one."""
    pixels = F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="none").mean((-2, -1))
    return pixels + 1 - dice(logits.sigmoid(), y, smooth=1.0)


def by_pixel(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return dice((logits > 0).to(logits.dtype), y), mask_loss(logits, y)


BY_CLASS: dict[Objective, Loss] = {"cross-entropy": cross_entropy, "contrastive": contrastive}
CLASSES = Kind("images in folders by class", "accuracy", BY_CLASS, by_class)
CHARACTERS = Kind("text to be continued", "accuracy", {"cross-entropy": cross_entropy}, by_class)
MASKS = Kind(
    "images with masks",
    "Dice",
    {"cross-entropy": lambda logits, batch: batch.mean(mask_loss(logits, batch.y))},
    by_pixel,
)
