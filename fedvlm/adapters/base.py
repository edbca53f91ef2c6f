"""What an adapter is, and what it may know of the task."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core import FedvlmError, Params
from fedvlm.seeds import generator


class Task(NamedTuple):
    """What everybody may know: the classes, and how the frozen model sees their names."""

    classes: tuple[str, ...]
    text: Tensor | None  # [classes, dim], L2-normalised; None where the backbone has no text tower
    dim: int
    scale: float  # the backbone's own logit scale

    def names(self) -> Tensor:
        if self.text is None:
            raise FedvlmError(
                "this backbone has no text tower, so there are no class embeddings to start from; "
                "use init_from=random (the recipe fedot-random-head does)"
            )
        return self.text


@dataclass(frozen=True)
class Adapter:
    """`init` gives one model's parameters; `logits` works for many clients side by side (axis 0 of everything)."""

    private: tuple[str, ...] = ()  # names that never leave a client

    reads: ClassVar[str] = "embedding"  # the view of an image it needs; black boxes serve "embedding" only
    transposes: ClassVar[bool] = False  # whether `transpose` is written; autograd serves where it is not
    aligns: ClassVar[str] = "images"  # what an alignment compares: adapted image features, or class vectors ("classes")
    watches: ClassVar[tuple[str, ...]] = ()  # what `diagnose` tells, one number a client

    def init(self, task: Task, seed: int) -> Params:
        return {}

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        """The image embedding as adapted, what the classifier sees: [clients, examples, dim]."""
        return x

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        raise NotImplementedError

    def transpose(self, task: Task, params: Params, x: Tensor, residual: Tensor) -> Params:
        """The slope in the parameters of a loss whose slope in the logits is `residual`."""
        raise NotImplementedError

    def diagnose(self, task: Task, params: Params) -> Params:
        """Numbers worth watching, one a client."""
        return {}

    def fold(self, task: Task, params: Params) -> Tensor | None:
        """The plain linear classifier [classes, dim] this is equal to, where it is one (scale included)."""
        return None


def classifier(task: Task, init: str, seed: int) -> Tensor:
    """Where a trainable classifier starts: the class names' embeddings, or unit rows at random."""
    if init == "text":
        return task.names().clone()
    rows = torch.randn(len(task.classes), task.dim, generator=generator(seed, 1), dtype=torch.float64)
    return F.normalize(rows, dim=-1).to(torch.get_default_dtype())
