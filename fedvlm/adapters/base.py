"""What an adapter is, and what it may know of the task."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core import Batch, FedvlmError, Params
from fedvlm.evaluate.detection import SCORES
from fedvlm.seeds import generator
from fedvlm.tasks import CLASSES, Kind, Objective

READ = "read.words"  # among parameters: class vectors that were worked out beforehand


class Task(NamedTuple):
    """What everybody may know: the classes, and how the frozen model sees their names."""

    classes: tuple[str, ...]
    text: Tensor | None  # [classes, dim], L2-normalised; None where the backbone has no text tower
    dim: int
    scale: float  # the backbone's own logit scale
    tower: Any = None  # the backbone's own, image or text, where an adapter needs it
    nouns: tuple[str, ...] = ()  # names far from every class, farthest first, where an adapter needs them
    novel: Task | None = None  # classes that nobody trains on, where a protocol keeps some
    phrases: tuple[str, ...] = ()  # what `text` was made of, a class each; none where the backbone has no text tower

    def names(self) -> Tensor:
        if self.text is None:
            raise FedvlmError(
                "this backbone has no text tower, so there are no class embeddings to start from; "
                "use init_from=random (the recipe fedot-random-head does)"
            )
        return self.text

    def some(self, which: slice) -> Task:
        """The same with these classes only."""
        text = None if self.text is None else self.text[which]
        return self._replace(classes=self.classes[which], text=text, phrases=self.phrases[which])

    def to(self, device: torch.device) -> Task:
        moved = None if self.text is None else self.text.to(device)
        tower = None if self.tower is None else copy.deepcopy(self.tower).to(device=device)
        novel = None if self.novel is None else self.novel._replace(tower=None).to(device)._replace(tower=tower)
        return self._replace(text=moved, tower=tower, novel=novel)


@dataclass(frozen=True)
class Adapter:
    """`init` gives one model's parameters; `logits` works for many clients side by side (axis 0 of everything)."""

    private: tuple[str, ...] = ()  # names that never leave a client

    learns: ClassVar[Kind] = CLASSES
    reads: ClassVar[str] = "embedding"  # the view of an image it needs; black boxes serve "embedding" only
    block: ClassVar[int] = 2048  # examples scored at a time
    heavy: ClassVar[bool] = False  # whether a GPU is worth it
    most: ClassVar[int] = 1024  # clients side by side
    needs: ClassVar[str] = ""  # "image tower", "text tower": what of the backbone itself it calls
    reads_words: ClassVar[bool] = False  # whether a text tower makes class vectors; `logits` asks `known` for them
    pairs: ClassVar[bool] = False  # whether what is private has a shared twin, and `public` is written
    reads_nouns: ClassVar[bool] = False  # whether it needs names of outsiders, and has a field `candidates`
    transposes: ClassVar[bool] = False  # whether `transpose` is written; autograd serves where it is not
    aligns: ClassVar[str] = "images"  # what an alignment compares: adapted image features, or class vectors ("classes")
    watches: ClassVar[tuple[str, ...]] = ()  # what `diagnose` tells, one number a client

    @property
    def opens(self) -> bool:
        """Whether it can tell classes that nobody trained on, by their names: `logits` follows whatever task it is given,
        and no parameter is a class's own. To be said by each adapter of which it is true."""
        return False

    def init(self, task: Task, seed: int) -> Params:
        return {}

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        """The image embedding as adapted, what the classifier sees: [clients, examples, dim]."""
        return x

    def classes(self, task: Task, params: Params) -> Tensor:
        """The class vectors as adapted, [clients, classes, dim], where `aligns` says they are what changes."""
        raise NotImplementedError

    def read(self, task: Task, params: Params, before: Params) -> Params:
        """The same parameters and, under READ, what of the model does not depend on an image: evaluation looks at many
        images, and words need reading once. `before` is what was read of another view, if any."""
        return params | {READ: self.classes(task, params)} if self.reads_words else params

    def known(self, task: Task, params: Params) -> Tensor:
        """The class vectors, read before or now."""
        return params[READ][:, : len(task.classes)] if READ in params else self.classes(task, params)

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        raise NotImplementedError

    def inside(self, task: Task, params: Params, x: Tensor) -> dict[str, Tensor]:
        """By several scores, how surely x is of one of the classes, [clients, examples]; higher is surer."""
        logits = self.logits(task, params, x)
        return {name: score(logits) for name, score in SCORES.items()}

    def training(self, task: Task, params: Params, batch: Batch) -> Tensor:
        """The logits in training, for adapters in which they differ (statistics of the batch)."""
        return self.logits(task, params, batch.x)

    def loss(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        """What is descended, one number a client, of what `training` gave: the place for a term of an adapter's own."""
        return self.learns.losses[objective](logits, batch)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """The same for each example, [clients, examples], for rules that weigh them."""
        return self.learns.score(logits, y)[1]

    def public(self, params: Params) -> Params:
        """The same model with nothing private in it, as a newcomer has it: a private part that has a shared twin is that."""
        return params

    def both(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """In training, logits and what an alignment compares (see `aligns`), for rules that look at both."""
        logits = self.training(task, params, batch)
        return logits, self.classes(task, params) if self.aligns == "classes" else self.features(task, params, batch.x)

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
