"""What a frozen encoder must offer. A black box offers images → embeddings and nothing else."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core import FedvlmError

PIXELS = 64_000_000  # an image larger than this is refused before it is decoded


class Form(NamedTuple):
    """What one image is in a view: its shape, and the numbers it is kept as."""

    shape: tuple[int, ...]
    kind: str = "<f4"


class Backbone(Protocol):
    name: str  # as the user gave it
    fingerprint: str  # changes whenever the numbers would: keys the feature store
    dim: int
    scale: float  # logit scale
    black_box: bool  # only embeddings come out: no gradients, no tokens

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        """L2-normalised embeddings [images, dim], float32."""
        ...

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        """L2-normalised embeddings [phrases, dim], float32; None without a text tower."""
        ...


def form(backbone: Backbone, view: str) -> Form:
    """Everybody has embeddings; what else there is, the backbone says."""
    if view == "embedding" and not isinstance(backbone, Sees):
        return Form((backbone.dim,))
    found = backbone.form(view) if isinstance(backbone, Sees) else None
    if found is None:
        gives = "embeddings only: it is a black box" if backbone.black_box else f"no {view}"
        raise FedvlmError(
            f"backbone={backbone.name} gives {gives}, "
            f"and this adapter reads {view}; adapters head, attention, rotation, linear and mlp read embeddings"
        )
    return found


def look(backbone: Backbone, images: Sequence[Image.Image], view: str) -> Tensor:
    """The images in that view, [images, …]."""
    return backbone.images(images) if view == "embedding" else backbone.encode(images, view)  # type: ignore[attr-defined]


def towers(backbone: Backbone, needed: str) -> Any:
    """A CLIP's own image or text tower, or both; None where none is needed."""
    if not needed:
        return None
    found = getattr(backbone, needed.replace(" ", "_"), None)
    if found is None:
        what = needed.replace("both", "image and text")
        raise FedvlmError(
            f"backbone={backbone.name} has no {what} to give, and this adapter needs it; use a CLIP in Hugging Face format"
        )
    return found


@runtime_checkable
class Sees(Protocol):
    """A backbone with more to show than embeddings."""

    def form(self, view: str) -> Form | None: ...

    def encode(self, images: Sequence[Image.Image], view: str) -> Tensor: ...


def checked(embeddings: Any, count: int, who: str, dim: int = 0) -> Tensor:
    """What somebody else's encoder returned, as L2-normalised float32 [count, dim] (0: any), or an error.

    Rows are scaled by their largest number first: neither huge nor tiny ones may become a silent zero."""
    try:
        found = embeddings if isinstance(embeddings, Tensor) else torch.from_numpy(np.array(embeddings, order="C"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise FedvlmError(f"{who}: returned {type(embeddings).__name__}, not an array of numbers [n, dim]") from error
    shape = tuple(found.shape)
    if not found.is_floating_point():
        raise FedvlmError(f"{who}: returned {found.dtype}; embeddings must be floating point")
    if found.ndim != 2 or shape[0] != count or 0 in shape[1:] or (dim and shape[1] != dim):
        raise FedvlmError(f"{who}: returned shape {shape}, expected one embedding a row, ({count}, {dim or 'dim'})")
    found = found.detach().cpu().double()
    largest = found.abs().amax(dim=1, keepdim=True)
    bad = torch.nonzero(~(largest.isfinite() & (largest > 0)).flatten()).flatten().tolist()
    if bad:
        raise FedvlmError(f"{who}: embedding {bad[0]} is all zero or not finite ({len(bad)} of {count} are)")
    return F.normalize(found / largest, dim=1).float()
