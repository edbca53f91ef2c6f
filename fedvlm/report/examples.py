"""Example images of each client with what the models said of them (`fedvlm report --images`).

The images are the user's own data and become part of the page as small copies without metadata.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from io import BytesIO
from typing import NamedTuple

import numpy as np

from fedvlm.data.images import BadImage, decode
from fedvlm.data.pool import Pools
from fedvlm.data.source import Source
from fedvlm.errors import FedvlmError
from fedvlm.evaluation.protocols import target
from fedvlm.report.answers import Answers
from fedvlm.training.folder import RunFolder

SIDE = 72  # pixels of a thumbnail
MOST_IMAGES = 60  # of a page: about 150 kB
MOST_CLIENTS = 20
PER_CLIENT = 6


class Said(NamedTuple):
    """One model's answer."""

    model: str
    answer: str
    sure: str  # percent
    right: bool


class Example(NamedTuple):
    client: str
    truth: str
    picture: str  # JPEG in base64; "" where the image cannot be read any more
    said: list[Said]


class Shown(NamedTuple):
    """The examples of one run of a method, those that changed most first."""

    label: str
    run: str
    by_client: dict[str, list[Example]]
    clients: int  # of which so many are shown at most


def shown(label: str, run: RunFolder, own: Answers, frozen: Answers | None, source: Source, most: int) -> Shown:
    """`frozen`: the frozen model's answers to the same images, where there are some."""
    chances = {"zero-shot": matched(frozen, own), "shared": own.probabilities("shared")}
    if "personal" in own.logits:
        chances["personal"] = own.probabilities("personal")
    known = {model: p for model, p in chances.items() if p is not None}
    first, last = (list(known.values())[k][np.arange(len(own.label)), own.label] for k in (0, -1))
    change = np.nan_to_num(np.abs(last - first))
    present = np.unique(own.client)
    picked: list[int] = []
    for client in sorted(present, key=lambda k: -change[own.client == k].max())[:MOST_CLIENTS]:
        rows = np.flatnonzero(own.client == client)
        picked += rows[np.argsort(-change[rows], kind="stable")][:most].tolist()
    pictures = thumbnails(source, [int(own.item[k]) for k in picked])
    by_client: dict[str, list[Example]] = {}
    for k in picked:
        client, truth = own.client_name(int(own.client[k])), own.record.data.classes[int(own.label[k])]
        example = Example(client, truth, pictures[int(own.item[k])], said(own, known, k))
        by_client.setdefault(client, []).append(example)
    return Shown(label, run.folder.name, by_client, len(present))


def said(own: Answers, known: dict[str, np.ndarray], k: int) -> list[Said]:
    out = []
    for model, chances in known.items():
        if np.isfinite(chances[k]).all() and not (model == "personal" and own.held_out[k]):
            best = int(chances[k].argmax())
            answer = own.record.data.classes[best]
            out.append(Said(model, answer, f"{100 * chances[k, best]:.0f}", best == own.label[k]))
    return out


def matched(frozen: Answers | None, own: Answers) -> np.ndarray | None:
    """The frozen model's probabilities in the order of the other run's images; NaN where it did not see one."""
    found = None if frozen is None else frozen.probabilities("shared")
    if frozen is None or found is None or found.shape[1] != len(own.record.data.classes):
        return None
    place = {int(item): k for k, item in enumerate(frozen.item)}
    out = np.full((len(own.item), found.shape[1]), np.nan)
    for k, item in enumerate(own.item):
        if int(item) in place:
            out[k] = found[place[int(item)]]
    return out


def partner(own: Answers, frozen: list[Answers]) -> Answers | None:
    """The frozen model's run with the same seed and held-out target."""
    same = [a for a in frozen if (a.record.seed, target(a.record)) == (own.record.seed, target(own.record))]
    return same[0] if same and same[0] is not own else None


def source_of(run: RunFolder, own: Answers, pools: Pools) -> Source:
    """The run's data as it numbered them; an error where they are no longer the same."""
    setup = run.setup()
    if setup.config.federation or own.record.backbone.name == "embeddings":
        raise FedvlmError(f"{run.folder}: --images needs images, and this run's are not here; leave --images out")
    source = pools.source(setup)
    items = tuple(i for i in source.items if i.path not in own.record.data.skipped)
    classes = own.record.data.classes
    same = own.item.max(initial=-1) < len(items) and all(
        items[int(i)].label == classes[int(y)] for i, y in zip(own.item, own.label, strict=True)
    )
    if not same:
        raise FedvlmError(
            f"{run.folder}: data={setup.config.data} is not what it was trained on, so that --images would show other "
            "images; leave --images out"
        )
    return replace(source, items=items, masks=())


def thumbnails(source: Source, wanted: list[int]) -> dict[int, str]:
    """Small copies as JPEG in base64, without metadata."""
    order = sorted(set(wanted))
    some = replace(source, items=tuple(source.items[i] for i in order))
    out = dict.fromkeys(order, "")
    for k, data in some.read():
        try:
            image = decode(data)
        except (BadImage, ValueError, OSError):
            continue
        image.thumbnail((SIDE, SIDE))
        packed = BytesIO()
        image.save(packed, "JPEG", quality=75)
        out[order[k]] = base64.b64encode(packed.getvalue()).decode()
    return out
