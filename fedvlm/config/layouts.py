"""The kinds of backbone there are, what each offers, and which adapters can use it.

A class of backbones says what it offers by `views`, `towers` and `has_texts`; an adapter what it needs by `view` and
`requires`. Whether it needs embeddings of the class names is tried on a task without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from functools import cache
from typing import NamedTuple, cast

import torch

from fedvlm.backbones import BUNDLED
from fedvlm.backbones.base import RAW, Backbone, HasViews, offered
from fedvlm.backbones.hf import Clip
from fedvlm.backbones.open_clip import BertPair, OpenClipPair, OpenClipVit
from fedvlm.backbones.pixels import Pixels
from fedvlm.backbones.siglip import Siglip
from fedvlm.backbones.vision_only import Vision
from fedvlm.core.adapter import Adapter, Task
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry

ANY_DIM = 8
NO_TEXT = "needs embeddings of the class names, and this model has no text tower"


class Offer(NamedTuple):
    """What a backbone can give."""

    views: tuple[str, ...]
    towers: tuple[str, ...] = ()
    texts: bool = True


class ModelLayout(NamedTuple):
    name: str
    how: str  # what a user gives
    offer: Offer


BLACK_BOX = Offer(("embedding",))


def offer_of(kind: type[Clip] | type[Vision] | type[OpenClipPair] | type[Pixels]) -> Offer:
    return Offer(kind.views, kind.towers, kind.has_texts)


FOLDER = "folder or owner/model"
LAYOUTS = (
    ModelLayout("CLIP, MetaCLIP (Hugging Face)", f"{FOLDER}, mini-clip", offer_of(Clip)),
    ModelLayout("CLIP with a ViT: LAION, DFN, MetaCLIP (open_clip)", FOLDER, offer_of(OpenClipVit)),
    ModelLayout("SigLIP, SigLIP 2 (Hugging Face, open_clip)", FOLDER, offer_of(Siglip)),
    ModelLayout("CLIP with a ResNet, EVA-02-CLIP (open_clip)", FOLDER, offer_of(OpenClipPair)),
    ModelLayout("BiomedCLIP: ViT and BERT (open_clip)", FOLDER, offer_of(BertPair)),
    ModelLayout("ViT, DINOv2, DINOv3 (Hugging Face)", FOLDER, offer_of(Vision)),
    ModelLayout("black box with texts", "http(s)://…, python:module:function", BLACK_BOX),
    ModelLayout("black box without texts", "onnx:FILE, …", BLACK_BOX._replace(texts=False)),
    ModelLayout("no model: pixels", "pixels:SIZE", offer_of(Pixels)),
)


def why_not(adapter: Adapter, offer: Offer) -> str:
    """Why an adapter cannot be used with what is offered; "" where it can."""
    view = adapter.view.partition("@")[0]
    if view == RAW and RAW not in offer.views:
        view = "embedding"
    if view not in offer.views:
        return f"reads {'activations inside the image tower' if view == 'hidden' else view}, which this model does not give"
    if adapter.requires and adapter.requires not in offer.towers:
        return f"works inside a CLIP's {adapter.requires.removeprefix('both ')}, and this model has none of that kind"
    return "" if offer.texts or not needs_texts(adapter) else NO_TEXT


@cache
def needs_texts(adapter: Adapter) -> bool:
    """Whether it cannot do without embeddings of the class names."""
    if adapter.requires:
        return True
    if adapter.view not in ("embedding", RAW):
        return False
    task = Task(("one", "two"), None, ANY_DIM, 1.0)
    try:
        params = {k: v[None] for k, v in adapter.init(task, 0).items()}
        adapter.logits(task, params, torch.ones(1, 1, ANY_DIM))
    except FedvlmError:
        return True
    return False


def usable_adapters(offer: Offer) -> list[str]:
    """The adapters that work with it, and the setting under which they do where that is not the default."""
    found = []
    for name in sorted(set(registry.names("adapter")) - registry.installed("adapter").keys()):
        adapter = cast(Adapter, registry.find("adapter", name)())
        if adapter.view == "text":  # it uses no backbone
            continue
        if not why_not(adapter, offer):
            found.append(name)
        elif from_random(adapter) and not why_not(from_random(adapter) or adapter, offer):
            found.append(f"{name} (init_from=random)")
    return found


def from_random(adapter: Adapter) -> Adapter | None:
    """The adapter with a random initial classifier, where it can start from one."""
    if "init_from" not in {f.name for f in fields(adapter)}:
        return None
    return replace(adapter, init_from="random")  # type: ignore[call-arg]


def offered_by(backbone: Backbone, adapter: Adapter) -> Offer:
    """What a backbone that is loaded offers, as far as an adapter asks for it; of other packages' backbones it is tried."""
    texts = bool(getattr(backbone, "has_texts", True))
    view = adapter.view.partition("@")[0]
    views: Iterable[str] = getattr(backbone, "views", ())
    if not views:
        found = isinstance(backbone, HasViews) and backbone.view_format(offered(backbone, adapter.view)) is not None
        views = ("embedding", view) if found else ("embedding",)
    towers: Iterable[str] = getattr(backbone, "towers", (adapter.requires,) if not backbone.black_box else ())
    return Offer(tuple(views), tuple(towers), texts)


def check_adapter(name: str, adapter: Adapter, backbone: Backbone) -> None:
    """An error, before anything is encoded, where the backbone cannot give what the adapter needs."""
    offer = offered_by(backbone, adapter)
    reason = why_not(adapter, offer)
    if not reason:
        return
    if reason == NO_TEXT and from_random(adapter):
        advice = "give init_from=random"
    else:
        advice = f"adapters that work with it: {', '.join(usable_adapters(offer))}"
    raise FedvlmError(f"backbone={backbone.name}: adapter={name} {reason}; {advice}")


def notes_on(backbone: Backbone, adapter: Adapter, own_data: bool) -> list[str]:
    """What a user should know of a run with this backbone; said once."""
    found = [text for text in (getattr(backbone, "note", ""),) if text]
    if adapter.view == RAW and offered(backbone, RAW) != RAW:
        found.append(
            f"backbone={backbone.name} gives embeddings of length 1 only, and this adapter is meant for embeddings before "
            "normalisation: it sees unit vectors, and its results may differ from the paper's (recorded as unit vectors)"
        )
    if backbone.name == BUNDLED and own_data and adapter.view != "pixels":
        found.append(
            "backbone=mini-clip is a small model for trying things out; for real results download CLIP once (`hf download "
            "openai/clip-vit-base-patch16 --local-dir FOLDER`) and give backbone=FOLDER"
        )
    return found
