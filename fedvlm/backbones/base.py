"""The interface of a frozen encoder. A black box offers images → embeddings and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from fedvlm.errors import FedvlmError
from fedvlm.towers.vision import Tower

RAW = "raw"  # the view of embeddings before they are normalised


class ViewFormat(NamedTuple):
    """Shape and stored data type of one image in a view."""

    shape: tuple[int, ...]
    dtype: str = "<f4"  # a NumPy type string


class Backbone(Protocol):
    """A frozen encoder of images and, with a text tower, of phrases."""

    name: str  # as the user gave it
    fingerprint: str  # hash of all that determines the embeddings; keys the feature store
    dim: int  # length of an embedding; 0 where there are none
    scale: float  # logit scale
    black_box: bool  # returns embeddings only: no gradients, no tokens

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        """L2-normalised embeddings [images, dim], float32."""
        ...

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        """L2-normalised embeddings [phrases, dim], float32; None without a text tower."""
        ...


@runtime_checkable
class HasViews(Protocol):
    """A backbone with views of an image other than its embedding."""

    def view_format(self, view: str) -> ViewFormat | None:
        """None where there is no such view."""
        ...

    def encode(self, images: Sequence[Image.Image], view: str) -> Tensor:
        """The images in that view, [images, …]."""
        ...


@runtime_checkable
class PreparesImages(Protocol):
    """A backbone that prepares images apart from its model: then this is done ahead, in other threads."""

    def prepare(self, image: Image.Image, view: str) -> Image.Image | Tensor:
        """What `images` and `encode` take in the place of the image, with the same result to the bit."""
        ...


@runtime_checkable
class SafeInThreads(Protocol):
    """A backbone that several threads may call at once."""

    safe_in_threads: bool

    @property
    def device(self) -> torch.device: ...


@runtime_checkable
class Elsewhere(Protocol):
    """A backbone that another machine computes: its numbers do not depend on this one."""

    elsewhere: bool


Precision = Literal["full", "tf32", "half"]


@runtime_checkable
class HasPrecisions(Protocol):
    """A backbone that can compute in less than float32."""

    precision: Precision

    def in_precision(self, precision: Precision) -> Backbone:
        """The same model, whose images are encoded in that precision."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """A context in which this thread computes in the backbone's precision."""
        ...


def in_precision(backbone: Backbone, precision: Precision) -> Backbone:
    """The backbone, or an error where it cannot compute so."""
    if precision == "full":
        return backbone
    if not isinstance(backbone, HasPrecisions):
        raise FedvlmError(
            f"encode={precision}: backbone={backbone.name} has a precision of its own; leave encode= out, or give a model "
            "in a folder"
        )
    return backbone.in_precision(precision)


def offered(backbone: Backbone, view: str) -> str:
    """The view, or embedding in place of raw where the backbone gives normalised embeddings only."""
    raw = isinstance(backbone, HasViews) and backbone.view_format(RAW) is not None
    return "embedding" if view == RAW and not raw else view


def view_format(backbone: Backbone, view: str) -> ViewFormat:
    """The format of the backbone's view, or an error where it has no such view."""
    view = offered(backbone, view)
    if isinstance(backbone, HasViews):
        found = backbone.view_format(view)
    else:
        found = ViewFormat((backbone.dim,)) if view == "embedding" else None
    if found is None:
        raise _no_such_view(backbone, view)
    return found


def encode_view(backbone: Backbone, images: Sequence[Image.Image | Tensor], view: str) -> Tensor:
    """The images in that view, [images, …]."""
    view, plain = offered(backbone, view), cast(Sequence[Image.Image], images)  # prepared only for those that take it
    if view == "embedding":
        return backbone.images(plain)
    if not isinstance(backbone, HasViews):
        raise _no_such_view(backbone, view)
    return backbone.encode(plain, view)


def _no_such_view(backbone: Backbone, view: str) -> FedvlmError:
    gives = "embeddings only: it is a black box" if backbone.black_box else f"no {view}"
    return FedvlmError(
        f"backbone={backbone.name} gives {gives}, "
        f"and this adapter reads {view}; adapters head, attention, rotation, linear and mlp read embeddings"
    )


def tower_of(backbone: Backbone, needed: str) -> Tower | None:
    """The "image tower", "text tower" or "both towers" of a CLIP, as `needed` says; None where that is ""."""
    if not needed:
        return None
    found: Tower | None = getattr(backbone, needed.replace(" ", "_"), None)
    if found is None:
        what = needed.replace("both", "image and text")
        raise FedvlmError(
            f"backbone={backbone.name} has no {what} to give, and this adapter needs it; "
            "use a CLIP in Hugging Face format"
        )
    return found


def checked_embeddings(embeddings: object, count: int, source: str, dim: int = 0) -> Tensor:
    """The output of an external encoder as L2-normalised float32 [count, dim], or an error that names `source`.

    dim=0 accepts any length. Rows are first divided by their largest magnitude, so that the squares in the norm neither
    overflow nor underflow to 0."""
    try:
        found = embeddings if isinstance(embeddings, Tensor) else torch.from_numpy(np.array(embeddings, order="C"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise FedvlmError(
            f"{source}: returned {type(embeddings).__name__}, not an array of numbers [n, dim]"
        ) from error
    shape = tuple(found.shape)
    if not found.is_floating_point():
        raise FedvlmError(f"{source}: returned {found.dtype}; embeddings must be floating point")
    if found.ndim != 2 or shape[0] != count or 0 in shape[1:] or (dim and shape[1] != dim):
        raise FedvlmError(
            f"{source}: returned shape {shape}, expected one embedding per row, ({count}, {dim or 'dim'})"
        )
    found = found.detach().cpu().double()
    largest = found.abs().amax(dim=1, keepdim=True)
    bad = torch.nonzero(~(largest.isfinite() & (largest > 0)).flatten()).flatten().tolist()
    if bad:
        raise FedvlmError(f"{source}: embedding {bad[0]} is all zero or not finite ({len(bad)} of {count} are)")
    return F.normalize(found / largest, dim=1).float()
