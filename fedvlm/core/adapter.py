"""The interface of an adapter, the task description it gets, and the optional capabilities it can declare."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.data import Batch
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params
from fedvlm.core.tasks import CLASSIFICATION, Objective, TaskType
from fedvlm.errors import FedvlmError

if TYPE_CHECKING:
    from fedvlm.towers.vision import Tower

PREPARED = "prepared."  # prefix of what `prepare` adds to the parameters; refused as a parameter's name
TEXT_FEATURES = PREPARED + "text_features"  # encoded prompts, [clients, classes (some adapters add more), dim]


class Task(NamedTuple):
    """What server and clients know of the task: the classes, and the frozen model's embeddings of their names."""

    classes: tuple[str, ...]
    text: Tensor | None  # [classes, dim], L2-normalised; None where the backbone has no text tower
    dim: int
    scale: float  # the backbone's logit scale
    tower: Tower | None = None  # the backbone's image tower, text tower or both, as the adapter `requires`
    nouns: tuple[str, ...] = ()  # names far from every class, farthest first, for adapters that are NeedsNouns
    novel: Task | None = None  # the classes that no client trains on (protocol=base-to-novel)
    phrases: tuple[str, ...] = ()  # what `text` embeds, one phrase per class; () without a text tower

    def names(self) -> Tensor:
        """The embeddings of the class names."""
        if self.text is None:
            raise FedvlmError(
                "this backbone has no text tower, so there are no class embeddings to start from; "
                "use init_from=random (the recipe fedot-random-head does), or give text= with embeddings of your own"
            )
        return self.text

    def subset(self, which: slice) -> Task:
        """The task restricted to these classes."""
        text = None if self.text is None else self.text[which]
        return self._replace(classes=self.classes[which], text=text, phrases=self.phrases[which])

    def with_text(self, embeddings: Params) -> Task:
        """The task with these class embeddings ("text" and, for novel classes, "novel") instead of the frozen ones."""
        if not embeddings:
            return self
        novel = self.novel
        if novel is not None and "novel" in embeddings:
            novel = novel._replace(text=embeddings["novel"])
        return self._replace(text=embeddings["text"], novel=novel)

    def to(self, device: torch.device) -> Task:
        text = None if self.text is None else self.text.to(device)
        tower = None if self.tower is None else copy.deepcopy(self.tower).to(device=device)
        novel = None if self.novel is None else self.novel._replace(tower=None).to(device)._replace(tower=tower)
        return self._replace(text=text, tower=tower, novel=novel)


class Limits(NamedTuple):
    """How much an adapter computes at a time."""

    examples: int = 2048  # scored at a time
    clients: int = 1024  # trained at a time on a CPU
    gpu: bool = False  # device=auto uses a GPU where there is one


@dataclass(frozen=True)
class Adapter:
    """What is trained, which of it is private, and how it computes logits.

    `init` returns the parameters of one model; all other methods get parameters with a leading client axis.
    """

    private: tuple[str, ...] = ()  # parameters that never leave a client; * stands for any part of a name (*.B)

    task_type: ClassVar[TaskType] = CLASSIFICATION
    # its input: embedding (all a black box has), raw (before normalisation), patches, hidden@k, pixels, text
    view: ClassVar[str] = "embedding"
    requires: ClassVar[str] = ""  # of the backbone: "image tower", "text tower" or "both towers"; "": none
    limits: ClassVar[Limits] = Limits()
    alignment: ClassVar[Literal["images", "classes"]] = "images"  # what CORAL compares: image features or class vectors
    open_vocabulary: ClassVar[bool] = False  # whether `logits` works for classes without training data, by their names

    def incompatible(self, shape: Sequence[int]) -> str:
        """Why it cannot be used with examples of this shape; "" where it can."""
        return ""

    def init(self, task: Task, seed: int) -> Params:
        return {}

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        """The adapted image embedding that the classifier sees, [clients, examples, dim]."""
        return x

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        """The parameters plus, under PREPARED names, what does not depend on the images: evaluation computes it once.
        `before` is what this method returned for another model in the same evaluation, {} for the first."""
        return params

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        raise NotImplementedError

    def train_logits(self, task: Task, params: Params, batch: Batch) -> Tensor:
        """The logits in training, where they differ (batch statistics, dropout)."""
        return self.logits(task, params, batch.x)

    def loss(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        """The training loss of `train_logits`, one number per client; override to add a term."""
        return self.task_type.losses[objective](logits, batch)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """The same for each example, [clients, examples], for rules that weight examples."""
        return self.task_type.loss(logits, y)

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """The logits in training, and what `alignment` names, for rules that need both."""
        logits = self.train_logits(task, params, batch)
        if self.alignment == "classes":
            return logits, class_vectors(self, task, params)
        return logits, self.features(task, params, batch.x)


@runtime_checkable
class HasClassVectors(Protocol):
    """The classifier is a set of class vectors."""

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        """[clients, classes, dim]."""
        ...


@runtime_checkable
class HasLinearHead(Protocol):
    """logits = scale · (head · features + bias), the bias where it has that parameter: a regression can solve it."""

    linear_head: ClassVar[bool]


@runtime_checkable
class HasSharedTwin(Protocol):
    """Every private parameter has a shared counterpart, which a new client uses in its place."""

    def shared_only(self, params: Params) -> Params:
        """The parameters with each private one replaced by its counterpart."""
        ...


@runtime_checkable
class HasGradient(Protocol):
    """The gradient is known in closed form; other adapters use autograd."""

    def gradient(self, task: Task, params: Params, x: Tensor, residual: Tensor) -> Params:
        """The gradient in the parameters, from the gradient in the logits (`residual`)."""
        ...


@runtime_checkable
class HasDiagnostics(Protocol):
    """Numbers worth recording at the end of a run, one per client: by name, with the meaning in words."""

    diagnostics: ClassVar[Mapping[str, str]]

    def diagnose(self, task: Task, params: Params, x: Tensor) -> Params:
        """[clients] each, from the clients' own models and a few of their training examples, [clients, examples, …]."""
        ...


@runtime_checkable
class HasLinearForm(Protocol):
    """The model equals a linear classifier on normalised embeddings."""

    def to_linear(self, task: Task, params: Params) -> Tensor:
        """[classes, dim], logit scale included."""
        ...


@runtime_checkable
class HasDetectionScores(Protocol):
    """It has its own scores for out-of-distribution detection; the default is in core/detection.py."""

    def detection_scores(self, task: Task, params: Params, x: Tensor) -> dict[str, Tensor]:
        """Detection scores by name, [clients, examples]; higher is more in-distribution."""
        ...


@runtime_checkable
class HasRawEmbedding(Protocol):
    """The image embedding is available before it is normalised."""

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor: ...


@runtime_checkable
class HasTowers(Protocol):
    """It trains inside the backbone's towers; `towers` says which."""

    towers: Literal["both", "image", "text"]


@runtime_checkable
class NeedsNouns(Protocol):
    """It needs names far from every class (Task.nouns)."""

    candidates: int  # WordNet nouns among which they are chosen; 0: all


def class_vectors(adapter: Adapter, task: Task, params: Params) -> Tensor:
    """The adapter's class vectors: from `prepare` where it ran, else computed now."""
    if TEXT_FEATURES in params:
        return params[TEXT_FEATURES][:, : len(task.classes)]
    assert isinstance(adapter, HasClassVectors), (
        f"{type(adapter).__name__} has alignment=classes but no class_vectors()"
    )
    return adapter.class_vectors(task, params)


def initial_classifier(task: Task, init: str, seed: int) -> Tensor:
    """The initial classifier [classes, dim]: the class names' embeddings (init="text"), or random unit vectors."""
    if init == "text":
        return task.names().clone()
    rows = torch.randn(len(task.classes), task.dim, generator=generator(seed, 1), dtype=torch.float64)
    return F.normalize(rows, dim=-1).to(torch.get_default_dtype())
