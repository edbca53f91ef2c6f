"""Task types: the loss a client minimises and the score it reports. Everything else is the same for all tasks.

Classification: cross-entropy and accuracy. Segmentation: cross-entropy per pixel + soft Dice, and the Dice coefficient of
an image. Next character: classification over the alphabet. An adapter names the type it learns, a data source the type it
holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.data import Batch

Objective = Literal["cross-entropy", "contrastive"]
Loss = Callable[[Tensor, Batch], Tensor]  # logits → one number per client
PerExample = Callable[[Tensor, Tensor], Tensor]  # logits, labels → [clients, examples]


@dataclass(frozen=True)
class TaskType:
    """A kind of task: its losses, and the score that its tables show."""

    description: str  # of the data, for messages
    metric: str  # name of the score
    losses: dict[Objective, Loss]
    score: PerExample
    loss: PerExample  # the cross-entropy objective without the mean over examples


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    return batch.mean(cross_entropy_each(logits, batch.y))


def cross_entropy_each(logits: Tensor, y: Tensor) -> Tensor:
    return logits.logsumexp(-1) - logits.gather(-1, y[..., None])[..., 0]


def contrastive(logits: Tensor, batch: Batch) -> Tensor:
    """The loss of FedCLIP's public code: each image against the class names of the batch's labels, and the reverse."""
    padding = (batch.weight == 0)[:, None]
    similarity = logits.gather(-1, batch.y[:, None].expand(-1, logits.shape[1], -1))
    lowest = torch.finfo(logits.dtype).min

    def diagonal_cross_entropy(similarity: Tensor) -> Tensor:
        log_p = similarity.masked_fill(padding, lowest).log_softmax(-1).diagonal(dim1=-2, dim2=-1)
        return batch.mean(log_p.masked_fill(padding[:, 0], 0))

    return -(diagonal_cross_entropy(similarity) + diagonal_cross_entropy(similarity.mT)) / 2


def correct(logits: Tensor, y: Tensor) -> Tensor:
    _, predicted = logits.max(-1)  # argmax is ten times slower on a CPU in the memory layout that `linear` returns
    return predicted == y


def dice(inside: Tensor, y: Tensor, smooth: float = 0.0) -> Tensor:
    """2|P ∩ Y| / (|P| + |Y|) for each image; 1 where both are empty."""
    y = y.to(inside.dtype)
    both, total = (inside * y).sum((-2, -1)), (inside + y).sum((-2, -1))
    return torch.where(total > 0, (2 * both + smooth) / (total + smooth).clamp(min=1e-12), 1.0)


def mask_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy per pixel + 1 − soft Dice for each image, with the usual smoothing of one pixel."""
    pixels = F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="none").mean((-2, -1))
    return pixels + 1 - dice(logits.sigmoid(), y, smooth=1.0)


def mask_dice(logits: Tensor, y: Tensor) -> Tensor:
    return dice((logits > 0).to(logits.dtype), y)


CLASSIFICATION = TaskType(
    "images in folders by class",
    "accuracy",
    {"cross-entropy": cross_entropy, "contrastive": contrastive},
    correct,
    cross_entropy_each,
)
NEXT_CHARACTER = TaskType(
    "text to be continued", "accuracy", {"cross-entropy": cross_entropy}, correct, cross_entropy_each
)
SEGMENTATION = TaskType(
    "images with masks",
    "Dice",
    {"cross-entropy": lambda logits, batch: batch.mean(mask_loss(logits, batch.y))},
    mask_dice,
    mask_loss,
)
