"""The pool: every readable example as the frozen model encodes it, before anybody holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm import backbones
from fedvlm.backbones.base import RAW, Backbone, in_precision, offered, tower_of, view_format
from fedvlm.config import catalogue
from fedvlm.config.config import OPEN, Config, Setup
from fedvlm.config.key_files import templates_of
from fedvlm.config.layouts import check_adapter, notes_on
from fedvlm.core.adapter import Adapter, NeedsNouns, Task
from fedvlm.core.data import Extra
from fedvlm.core.tasks import CLASSIFICATION, SEGMENTATION, TaskType
from fedvlm.data.columns import Words, column
from fedvlm.data.duplicates import copies_of, told, twins_of
from fedvlm.data.formats.text import ALPHABET
from fedvlm.data.images import BadImage, opened
from fedvlm.data.mapped import mapped_rows
from fedvlm.data.nouns import farthest_nouns, nouns
from fedvlm.data.source import Item, Source, digest, keep_classes, keep_domains, open_outsiders, open_source
from fedvlm.data.store import Progress, data_fingerprint, features, text_embeddings
from fedvlm.data.wording import class_embeddings, class_phrases
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.system import console
from fedvlm.system.timing import timed

MAX_NOUNS = 1000  # names for outsiders that are kept
Key = tuple[object, ...]


@dataclass(frozen=True)
class Pool:
    source: Source
    x: Tensor
    task: Task
    fingerprint: str
    backbone: str  # NAME@FINGERPRINT
    skipped: dict[str, str] = field(default_factory=dict)  # file → why it was left out
    y: Tensor | None = None  # labels where they are not the source's classes: masks
    extras: dict[str, Extra] = field(default_factory=dict)  # further examples to evaluate on
    view: str = ""  # of the images, as the adapter gets them; "": not of a backbone
    notes: tuple[str, ...] = ()  # what a user should know of the backbone
    twins: np.ndarray | None = None  # of each image, the first with the same content; None: no copies, or they may part
    copies: str = ""  # what a user should know of copies


class Outline(NamedTuple):
    """What is known before anything is encoded. The features are zeros that take no memory."""

    pool: Pool
    backbone: Backbone | None  # None: nothing has to be encoded, and the pool is complete


class Pools:
    """Pools that were made in this process: methods that read the same view of the same data share one."""

    def __init__(self) -> None:
        self.made: dict[Key, Pool] = {}
        self.sources: dict[Key, Source] = {}
        self.outlines: dict[Key, Outline] = {}
        self.said: set[str] = set()  # what the user was told about the data

    def source(self, setup: Setup) -> Source:
        """The data, before anything is encoded."""
        key = source_key(setup.config)
        if key not in self.sources:
            with timed("load"):
                self.sources[key] = open_data(setup)
        check_task(setup, self.sources[key].task_type)
        return self.sources[key]

    def outline(self, setup: Setup) -> Outline:
        source, key = self.source(setup), key_of(setup.config, setup.adapter)
        if key not in self.outlines:
            self.outlines[key] = outline(setup, source)
        return self.outlines[key]

    def load(self, setup: Setup, progress: Progress | None = None) -> Pool:
        outlined, key = self.outline(setup), key_of(setup.config, setup.adapter)
        if key not in self.made:
            self.made[key] = assemble(setup, outlined, progress)
        return self.made[key]

    def encode(self, setup: Setup) -> Pool:
        """What `load` gives, with a progress bar; names the images that are left out."""
        with console.progress(f"encoding {setup.config.data} for {setup.method.label}") as update:
            pool = self.load(setup, lambda done, total: update(done, total=total))
        if pool.copies:
            self.say(f"data={pool.source.name}: {pool.copies}", console.warn)
        for name, why in list(pool.skipped.items())[:10]:
            self.say(f"left out: {name}: {why}", console.warn)
        if len(pool.skipped) > 10:
            self.say(f"left out: {len(pool.skipped) - 10} more (run.json names them all)", console.warn)
        return pool

    def say(self, text: str, say: Callable[[str], None]) -> None:
        """Tells the user something about the data, once."""
        if text not in self.said:
            self.said.add(text)
            say(text)


def key_of(config: Config, adapter: Adapter) -> Key:
    """Everything that a pool depends on."""
    candidates = adapter.candidates if isinstance(adapter, NeedsNouns) else None
    more = (config.outsiders, config.corrupt, config.protocol == OPEN, candidates, adapter.view, adapter.requires)
    return (*source_key(config), *more)


def source_key(config: Config) -> Key:
    """The keys of the data, and the domains that are kept in any case where only some are used."""
    return (*(getattr(config, key) for key in catalogue.for_purpose("data")), config.domains and config.unseen)


def open_data(setup: Setup) -> Source:
    """The data of a setup, reduced to the domains and classes that are asked for."""
    config = setup.config
    source = open_source(
        config.data,
        config.group,
        config.domains,
        config.stride,
        config.unseen,
        config.split_file,
        config.names,
        config.columns,
    )
    check_task(setup, source.task_type)
    if source.tokens is not None:
        return source
    return keep_classes(keep_domains(source, config.domains, config.unseen), config.classes)


def assemble(setup: Setup, outlined: Outline, progress: Progress | None = None) -> Pool:
    """The outlined pool with features: encodes what the store does not hold, and adds what the run evaluates on."""
    pool, backbone = outlined
    if backbone is None:
        return pool
    config, adapter, view = setup.config, setup.adapter, setup.adapter.view
    images = in_precision(backbone, config.encode)
    pool = encoded(pool, images, config.broken, progress, config.duplicates)
    if config.outsiders:
        pool = with_outsiders(pool, open_outsiders(config.outsiders), images, view)
    if isinstance(adapter, NeedsNouns):
        pool = with_nouns(pool, backbone, config.template, adapter.candidates, progress)
    if config.corrupt:
        pool = with_corruptions(pool, config.corrupt, images, view, progress)
    return pool


def outline(setup: Setup, source: Source) -> Outline:
    """The pool without its features, for checks before anything is encoded. Names for outsiders are any nouns."""
    config, adapter = setup.config, setup.adapter
    if adapter.view == "text":
        return Outline(text_pool(source), None)
    if source.embeddings is not None:
        return Outline(check_embeddings(setup, embedding_pool(source, adapter.view)), None)
    backbone = backbones.load(config.backbone)
    in_precision(backbone, config.encode)
    check_adapter(setup.parts["adapter"].name, adapter, backbone)
    shape = view_format(backbone, adapter.view).shape
    task = task_of(backbone, source.classes, config.template, adapter.requires)
    x = torch.zeros(()).expand(len(source.items), *shape)
    notes = tuple(notes_on(backbone, adapter, config.data != "emoji"))
    pool = Pool(source, x, task, "", named(backbone), view=offered(backbone, adapter.view), notes=notes)
    if config.protocol == OPEN:
        pool = with_novel_classes(pool)
    if isinstance(adapter, NeedsNouns):
        pool = replace(pool, task=pool.task._replace(nouns=tuple(nouns()[:MAX_NOUNS])))
    return Outline(pool, backbone)


def named(backbone: Backbone) -> str:
    return f"{backbone.name}@{backbone.fingerprint}"


def check_task(setup: Setup, task_type: TaskType) -> None:
    """An error where this data does not suit the adapter or the evaluation."""
    config = setup.config
    for key in config.changed(catalogue.with_trait("classes")) if task_type is not CLASSIFICATION else ():
        if catalogue.run_keys()[key].binds(getattr(config, key)):
            raise FedvlmError(
                f"{key}={getattr(config, key)} is for classes, and data={config.data} is {task_type.description}"
            )
    if setup.adapter.task_type is not task_type:
        able = [n for n in registry.names("adapter") if registry.find("adapter", n).task_type is task_type]  # type: ignore[attr-defined]
        raise FedvlmError(
            f"data={config.data} is {task_type.description}, and adapter={setup.parts['adapter'].name} learns "
            f"{setup.adapter.task_type.description}; adapters for this data: {', '.join(able)} (`fedvlm ls methods` has "
            "their recipes)"
        )


def image_pool(
    source: Source,
    backbone: Backbone,
    template: str,
    broken: str = "skip",
    progress: Progress | None = None,
    view: str = "embedding",
    requires: str = "",
) -> Pool:
    """Images of these classes, encoded."""
    task = task_of(backbone, source.classes, template, requires)
    outlined = Pool(source, torch.empty(0), task, "", named(backbone), view=offered(backbone, view))
    return encoded(outlined, backbone, broken, progress)


def encoded(pool: Pool, backbone: Backbone, broken: str, progress: Progress | None, duplicates: str = "keep") -> Pool:
    """The pool with features, without the images that cannot be read; duplicates: what is done with copies."""
    source, view = pool.source, pool.view
    x, keys, skipped = features(source, backbone, broken, progress, view)
    y, mask_keys = None, list[bytes]()
    if source.task_type is SEGMENTATION:
        y, mask_keys, bad = features(replace(source, items=source.masks), backbone, broken, None, view)
        y = (y.float().mean(1) > 127).to(torch.uint8)  # masks are cropped and resized as the images are
        pairs = zip(source.items, source.masks, strict=True)
        skipped |= {i.path: f"its mask: {bad[m.path]}" for i, m in pairs if m.path in bad} | misfits(source, broken)
    good = [k for k, item in enumerate(source.items) if item.path not in skipped]
    twins, copies = twins_of([keys[k] for k in good]), ""
    if twins is not None:
        copies = told([source.items[k] for k in good], twins, duplicates)
        if duplicates == "drop":
            left_out = copies_of([source.items[k] for k in good], twins)
            skipped |= {path: f"a copy of {first}" for path, first in left_out.items()}
            good = [k for k, first in zip(good, twins.tolist(), strict=True) if good[first] == k]
        twins = twins if duplicates == "group" else None
    if skipped:
        kept = tuple(source.masks[k] for k in good) if source.masks else ()
        source = replace(source, items=tuple(source.items[k] for k in good), masks=kept)
    if not good:
        raise FedvlmError(f"data={source.name}: none of its images can be read")
    if len(source.classes) < 2 and source.task_type is CLASSIFICATION:
        raise FedvlmError(
            f"data={source.name}: only one class is left ({source.classes[0]}): {len(skipped)} images cannot be read, "
            f"such as {next(iter(skipped))}; a classifier needs at least two"
        )
    used = [k[j] for j in good for k in (keys, mask_keys) if k]
    grouped = ["duplicates=group"] if twins is not None else []
    mark = data_fingerprint(used, [described(i, source.tabular) for i in source.items] + grouped)
    if skipped:  # a copy, of gigabytes where a row is an image's hidden states
        x, y = x[good], None if y is None else y[good]
    pool = replace(pool, source=source, x=x, fingerprint=mark, backbone=named(backbone), skipped=skipped, y=y)
    return replace(pool, twins=twins, copies=copies)


def described(item: Item, tabular: bool) -> str:
    """What a data set's fingerprint says of an item beside its content. Groups are part of it where the data may name
    them: those of group= are in the run's settings."""
    own = (item.split, item.client, item.group) if tabular else (item.split,) if item.split else ()
    return "/".join((item.domain, item.label, *own))


def task_of(backbone: Backbone, classes: Sequence[str], template: str, requires: str = "") -> Task:
    """These classes, as the backbone sees their names."""
    tower, text = tower_of(backbone, requires), class_embeddings(backbone, template, classes)
    phrases = class_phrases(template, classes)
    return Task(tuple(classes), text, backbone.dim, backbone.scale, tower, phrases=phrases)


def misfits(source: Source, broken: str) -> dict[str, str]:
    """Images whose masks have another aspect ratio (by more than 1 %) and so show another section; and both sizes."""
    found = {}
    masks = replace(source, items=source.masks)
    for item, (_, image), (_, mask) in zip(source.items, source.read(), masks.read(), strict=True):
        with suppress(BadImage):  # named already
            (width, height), (w, h) = opened(image).size, opened(mask).size
            if abs(width * h - height * w) > 0.01 * width * h:
                found[item.path] = f"its mask has {w}×{h} pixels, and the image {width}×{height}"
    for path, why in found.items() if broken == "refuse" else ():
        raise FedvlmError(f"{path}: {why}; repair or remove it, or give broken=skip")
    return found


def text_pool(source: Source) -> Pool:
    """Characters need no backbone."""
    assert source.tokens is not None
    task = Task(tuple(ALPHABET), None, 0, 1.0)
    mark = data_fingerprint([digest(source.tokens.tobytes())], domains_and_labels(source))
    return Pool(source, torch.from_numpy(source.tokens), task, mark, "none@none")


def embedding_pool(source: Source, view: str = "embedding") -> Pool:
    """Embeddings that the user computed: no backbone is needed, and none is known."""
    given = source.embeddings
    assert given is not None
    unit, dim = mapped_rows(given.x, partial(F.normalize, dim=-1)), given.x.shape[1]
    task = Task(tuple(source.classes), given.text, dim, given.scale, phrases=tuple(source.classes))
    mark = data_fingerprint([digest(unit.numpy().data)], domains_and_labels(source))
    return Pool(source, given.x if view == RAW else unit, task, mark, "embeddings@given")


def domains_and_labels(source: Source) -> Words:
    """domain/label of each item."""
    domain, label = column(source.items, "domain"), column(source.items, "label")
    used, codes = np.unique(domain.codes * len(label.names) + label.codes, return_inverse=True)
    pairs = (divmod(k, len(label.names)) for k in used.tolist())
    return Words.coded([f"{domain.names[d]}/{label.names[k]}" for d, k in pairs], codes)


def check_embeddings(setup: Setup, pool: Pool) -> Pool:
    config, adapter = setup.config, setup.adapter
    refused = {
        f"adapter={setup.parts['adapter'].name}": adapter.view not in ("embedding", RAW) or bool(adapter.requires),
        "outsiders=": bool(config.outsiders),
        "corrupt=": bool(config.corrupt),
        f"protocol={OPEN}": config.protocol == OPEN,
    }
    for key, needs_images in refused.items():
        if needs_images:
            raise FedvlmError(
                f"{key} needs images and their backbone, and data={config.data} holds embeddings; adapters head, attention, "
                "rotation, linear and mlp work on embeddings"
            )
    return pool


def with_outsiders(pool: Pool, source: Source, backbone: Backbone, view: str) -> Pool:
    """Add images of no class, to be detected."""
    x, keys, skipped = features(source, backbone, "skip", None, view)
    good = [k for k, item in enumerate(source.items) if item.path not in skipped]
    if not good:
        raise FedvlmError(f"outsiders={source.root}: none of its images can be read")
    mark = data_fingerprint([digest(pool.fingerprint.encode()), *(keys[k] for k in good)], [])
    left_out = {f"outsiders/{k}": why for k, why in skipped.items()}
    extras = pool.extras | {"outsiders": Extra(x[good])}
    return replace(pool, extras=extras, fingerprint=mark, skipped=pool.skipped | left_out)


def with_nouns(pool: Pool, backbone: Backbone, template: str, candidates: int, progress: Progress | None) -> Pool:
    """Add names far from every class, chosen among so many candidates; 0 is all."""
    known = nouns()
    if candidates < 0:
        raise FedvlmError(f"candidates={candidates} must be a number of nouns, or 0 for all {len(known):,}")
    if candidates:
        known = [known[k * len(known) // candidates] for k in range(min(candidates, len(known)))]
    template = templates_of(template)[0]
    found = text_embeddings(backbone, [template.replace("{}", name) for name in known], progress)
    assert found is not None  # an adapter that needs nouns requires a text tower
    far = farthest_nouns(found @ pool.task.names().T, min(MAX_NOUNS, len(known)))
    return replace(pool, task=pool.task._replace(nouns=tuple(known[k] for k in far.tolist())))


def with_corruptions(pool: Pool, versions: int, backbone: Backbone, view: str, progress: Progress | None) -> Pool:
    """Add so many corrupted versions of each image."""
    if not 1 <= versions <= 75:
        raise FedvlmError(f"corrupt={versions}: there are 15 corruptions × 5 severities, so between 1 and 75")
    found = [features(pool.source, backbone, "refuse", progress, view, v)[0] for v in range(versions)]
    mark = data_fingerprint([digest(pool.fingerprint.encode())], [f"corrupt={versions}"])
    extras = pool.extras | {"corrupted": Extra(torch.stack(found, dim=1), aligned=True)}
    return replace(pool, extras=extras, fingerprint=mark)


def with_novel_classes(pool: Pool) -> Pool:
    """Keep the second half of the classes, as they are listed, from everybody; of 101, 50 are trained on (FedDTL's
    counts)."""
    whole = pool.task
    half = len(whole.classes) // 2
    if half < 2:
        raise FedvlmError(
            f"protocol={OPEN} halves the classes and needs four or more, and data={pool.source.name} has "
            f"{len(whole.classes)}: {', '.join(whole.classes)}"
        )
    task = whole.subset(slice(half))._replace(novel=whole.subset(slice(half, None)))
    return replace(pool, task=task)
