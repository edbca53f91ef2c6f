"""A federation: whose rows lie where in one pool of features, train then val then test for each client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedvlm.adapters.base import Task
from fedvlm.backbones.base import Backbone, towers
from fedvlm.backbones.text import TextTower
from fedvlm.core import SPLITS, Data, FedvlmError, Halves
from fedvlm.data import partition as who
from fedvlm.data.nouns import nouns, outsiders
from fedvlm.data.source import ALONE, Source, digest
from fedvlm.data.store import Progress, class_names, features, fingerprint, texts
from fedvlm.data.text import ALPHABET
from fedvlm.errors import nearest
from fedvlm.seeds import key
from fedvlm.tasks import CHARACTERS, CLASSES, MASKS

FARTHEST = 1000  # nouns that are kept as names for outsiders

Partition = Literal[
    "auto", "domain", "iid", "dirichlet", "disjoint", "pathological", "domain-iid", "domain-dirichlet", "pooled"
]


@dataclass(frozen=True)
class Layout:
    """Who holds what. These are keys of the command line."""

    partition: Partition = "auto"  # auto: one client a domain where there are domains, else dirichlet
    clients: int = 10  # how many (for domain-iid and domain-dirichlet: in each domain)
    alpha: float = 0.5  # dirichlet: small is skewed
    per_client: int = 0  # pathological: classes a client, overlapping; 0 deals each class to one client
    shots: int = 0  # training images a class and client; 0 is all
    split: tuple[float, ...] = (60, 20, 20)  # train, val, test
    unseen: tuple[str, ...] = ()  # domains (or clients) that nobody trains on


@dataclass(frozen=True)
class Pool:
    """Every readable example as the frozen model sees it, before anybody holds it."""

    source: Source
    x: Tensor
    task: Task
    fingerprint: str
    backbone: str
    skipped: dict[str, str] = field(default_factory=dict)
    y: Tensor | None = None  # where the answers are no classes: masks
    outside: Tensor | None = None  # images of no class
    corrupted: Tensor | None = None  # [images, versions, …]


@dataclass(frozen=True)
class Federation:
    names: tuple[str, ...]  # a client each, position = id
    domains: tuple[str, ...]  # the domain of each client
    data: Data
    task: Task
    unseen: tuple[int, ...] = ()
    items: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # pool row → item of the source
    pooled: bool = False  # the last client is everybody's training data, and the only one that trains

    @property
    def scored(self) -> int:
        """How many clients are scored: ids below this."""
        return len(self.names) - self.pooled

    @property
    def seen(self) -> np.ndarray:
        """Clients that can train: not held out, and with something to train on."""
        if self.pooled:
            return np.array([len(self.names) - 1])
        has = self.data.counts("train") > 0
        return np.array([i for i in range(len(self.names)) if i not in self.unseen and has[i]], np.int64)


def pool(
    source: Source,
    backbone: Backbone,
    template: str,
    broken: str = "skip",
    progress: Progress | None = None,
    view: str = "embedding",
    needs: str = "",
) -> Pool:
    x, keys, skipped = features(source, backbone, broken, progress, view)
    y, more = None, list[bytes]()
    if source.kind is MASKS:
        y, more, bad = features(replace(source, items=source.masks), backbone, broken, None, view)
        y = (y.float().mean(1) > 127).to(torch.uint8)  # the masks went the images' way: same cut, same size
        pairs = zip(source.items, source.masks, strict=True)
        skipped |= {i.path: f"its mask: {bad[m.path]}" for i, m in pairs if m.path in bad}
    good = [k for k, item in enumerate(source.items) if item.path not in skipped]
    kept = tuple(source.masks[k] for k in good) if source.masks else ()
    source = replace(source, items=tuple(source.items[k] for k in good), masks=kept)
    if not good:
        raise FedvlmError(f"data={source.name}: none of its images can be read")
    if len(source.classes) < 2 and source.kind is CLASSES:
        raise FedvlmError(
            f"data={source.name}: only one class is left ({source.classes[0]}): {len(skipped)} images cannot be read, "
            f"such as {next(iter(skipped))}; a classifier needs at least two"
        )
    phrases = in_words(template, source.classes)
    text = class_names(backbone, list(phrases)) if backbone.dim else None
    task = Task(tuple(source.classes), text, backbone.dim, backbone.scale, towers(backbone, needs), phrases=phrases)
    mark = fingerprint([k[j] for j in good for k in (keys, more) if k], [f"{i.domain}/{i.label}" for i in source.items])
    named = f"{backbone.name}@{backbone.fingerprint}"
    return Pool(source, x[good], task, mark, named, skipped, None if y is None else y[good])


def in_words(template: str, classes: Sequence[str]) -> tuple[str, ...]:
    if "{}" not in template:
        raise FedvlmError(f"template='{template}' must hold {{}} where the class name goes")
    return tuple(template.replace("{}", name.replace("_", " ").lower()) for name in classes)


def with_outsiders(pool: Pool, source: Source, backbone: Backbone, view: str) -> Pool:
    """The same, and images of no class to tell from it."""
    x, keys, skipped = features(source, backbone, "skip", None, view)
    good = [k for k, item in enumerate(source.items) if item.path not in skipped]
    if not good:
        raise FedvlmError(f"outsiders={source.root}: none of its images can be read")
    mark = fingerprint([digest(pool.fingerprint.encode()), *(keys[k] for k in good)], [])
    told = {f"outsiders/{k}": why for k, why in skipped.items()}
    return replace(pool, outside=x[good], fingerprint=mark, skipped=pool.skipped | told)


def with_nouns(pool: Pool, backbone: Backbone, template: str, candidates: int, progress: Progress | None) -> Pool:
    """The same, and names far from every class (of so many candidates; 0 is all)."""
    known = nouns()
    if candidates < 0:
        raise FedvlmError(f"candidates={candidates} must be a number of nouns, or 0 for all {len(known):,}")
    if candidates:
        known = [known[k * len(known) // candidates] for k in range(min(candidates, len(known)))]
    found = texts(backbone, known, partial(_embedded, pool.task.tower, template), f"noun {template} ", progress)
    assert found is not None
    far = outsiders(found @ pool.task.names().T, min(FARTHEST, len(known)))
    return replace(pool, task=pool.task._replace(nouns=tuple(known[k] for k in far.tolist())))


def _embedded(tower: TextTower, template: str, names: list[str]) -> Tensor:
    """Embeddings of phrases; what stands before the name is read once for all of them, a third of the time in all."""
    before, after = template.split("{}", 1)
    context = tower.phrase(before.strip())[None, None]
    with torch.no_grad():
        if not context.shape[2]:
            raise FedvlmError(f"template='{template}': names of outsiders need words before the name")
        return tower.features(tower.plan(names, context.shape[2], ending=after.strip()), context)[0]


def with_corruptions(pool: Pool, versions: int, backbone: Backbone, view: str, progress: Progress | None) -> Pool:
    """The same, and so many corrupted versions of each image."""
    if not 1 <= versions <= 75:
        raise FedvlmError(f"corrupt={versions}: there are 15 corruptions × 5 severities, so between 1 and 75")
    found = [features(pool.source, backbone, "refuse", progress, view, v)[0] for v in range(versions)]
    mark = fingerprint([digest(pool.fingerprint.encode())], [f"corrupt={versions}"])
    return replace(pool, corrupted=torch.stack(found, dim=1), fingerprint=mark)


def halved(pool: Pool) -> Pool:
    """The same, with the second half of the classes, as they are listed, kept from everybody; of 101, 50 are trained on
    (FedDTL's counts)."""
    whole = pool.task
    half = len(whole.classes) // 2
    if half < 2:
        raise FedvlmError(
            f"protocol=base-to-novel halves the classes and needs four or more, and data={pool.source.name} has "
            f"{len(whole.classes)}: {', '.join(whole.classes)}"
        )
    return replace(pool, task=whole.some(slice(half))._replace(novel=whole.some(slice(half, None))))


def pool_of_text(source: Source) -> Pool:
    """Characters need no model to look at them."""
    assert source.tokens is not None
    task = Task(tuple(ALPHABET), None, 0, 1.0)
    mark = fingerprint([digest(source.tokens.tobytes())], [f"{i.domain}/{i.label}" for i in source.items])
    return Pool(source, torch.from_numpy(source.tokens), task, mark, "none@none")


def federate(pool: Pool, layout: Layout, seed: int) -> Federation:
    items = pool.source.items
    novel = pool.task.novel.classes if pool.task.novel else ()
    classes = {c: k for k, c in enumerate((*pool.task.classes, *novel))}
    y = np.array([classes[i.label] for i in items])
    domains = [i.domain for i in items]
    if len(layout.split) != 3 or min(layout.split) < 0 or layout.split[0] <= 0:
        raise FedvlmError(f"split={layout.split} must be three shares, train above 0, such as 60,20,20")
    strata = domains if pool.source.kind is CHARACTERS else [i.label for i in items]  # a block holds many characters
    part = who.split(strata, domains, [i.group for i in items], seed, layout.split)
    base = np.flatnonzero(y < len(pool.task.classes))  # of the rest nobody holds anything
    owner, names, homes = _hold(layout, y[base], part[base], [domains[i] for i in base], seed)
    keep = who.few_shot(y[base], owner, part[base], layout.shots, seed)
    order = np.lexsort((base, part[base], owner))
    order = order[keep[order]]
    cells = np.bincount(owner[order] * 3 + part[base][order], minlength=3 * len(names)).reshape(-1, 3)
    order = base[order]
    ends = np.cumsum(cells.sum(1))
    bounds = np.concatenate([(ends - cells.sum(1))[:, None], (ends - cells.sum(1))[:, None] + np.cumsum(cells, 1)], 1)
    rows = torch.from_numpy(order)
    answers = torch.from_numpy(y) if pool.y is None else pool.y
    data = Data(pool.x[rows], answers[rows], bounds, np.arange(len(names)), seed, outside=pool.outside)
    if pool.corrupted is not None:
        data = replace(data, corrupted=pool.corrupted[rows])
    if pool.task.novel:
        data = replace(data, halves=_halves(pool, y, part))
    unseen = tuple(k for k in range(len(names)) if names[k] in layout.unseen or homes[k] in layout.unseen)
    for wanted in layout.unseen:
        if wanted not in names and wanted not in homes:
            raise FedvlmError(
                f"unseen={wanted}: no such domain or client; {nearest(wanted, [*dict.fromkeys(homes), *names])}"
            )
    federation = Federation(tuple(names), tuple(homes), data, pool.task, unseen, order)
    if not len(federation.seen):
        raise FedvlmError("nobody is left to train: every client is held out or has no training image")
    return _together(federation) if layout.partition == "pooled" else federation


def _halves(pool: Pool, y: np.ndarray, part: np.ndarray) -> Halves:
    """The test examples of all base and of all novel classes, each numbered from 0."""
    base, test = len(pool.task.classes), part == SPLITS.index("test")
    found: Halves = {}
    for half, where, first in (("base", test & (y < base), 0), ("novel", test & (y >= base), base)):
        if not where.any():
            raise FedvlmError(
                f"protocol=base-to-novel: there is no test image of a {half} class; give split= a larger third share, "
                "such as 60,20,20"
            )
        found[half] = pool.x[torch.from_numpy(np.flatnonzero(where))], torch.from_numpy(y[where] - first)
    return found


def _together(federation: Federation) -> Federation:
    """One more client, who holds the training rows of all who could train."""
    d = federation.data
    rows = torch.cat([torch.arange(*d.bounds[i, :2].tolist()) for i in federation.seen])
    end = len(d.x) + len(rows)
    bounds = np.concatenate([d.bounds, [[len(d.x), end, end, end]]])
    data = replace(
        d, x=torch.cat([d.x, d.x[rows]]), y=torch.cat([d.y, d.y[rows]]), bounds=bounds, ids=np.arange(len(bounds))
    )
    items = np.concatenate([federation.items, federation.items[rows.numpy()]])
    return replace(
        federation,
        names=(*federation.names, "pool"),
        domains=(*federation.domains, "pool"),
        data=data,
        items=items,
        pooled=True,
    )


def _hold(
    layout: Layout, y: np.ndarray, part: np.ndarray, domains: list[str], seed: int
) -> tuple[np.ndarray, list[str], list[str]]:
    """The owner of each item, the clients' names, and their domains."""
    known = sorted(set(domains))
    has_domains = known != [ALONE]
    kind = layout.partition if layout.partition != "auto" else ("domain" if has_domains else "dirichlet")
    if kind.startswith("domain") and not has_domains:
        raise FedvlmError(
            f"partition={kind} needs domain/class/image, and this data has no domains; use partition=dirichlet"
        )
    if kind == "disjoint" and layout.per_client:
        raise FedvlmError(
            f"per_client={layout.per_client}: partition=disjoint deals each class to one client; classes overlap with "
            "partition=pathological"
        )
    if layout.clients < 1:
        raise FedvlmError(f"clients={layout.clients} must be at least 1")
    place = np.array([known.index(d) for d in domains])
    if kind in ("domain", "pooled"):
        return place, known, known
    if kind in ("domain-iid", "domain-dirichlet"):
        owner, names = np.zeros(len(y), np.int64), []
        for k, domain in enumerate(known):
            mine = np.flatnonzero(place == k)
            cut = (y[mine], part[mine], layout.clients, key(seed, 29, k))
            mix = who.iid(*cut) if kind == "domain-iid" else who.dirichlet(*cut, layout.alpha)
            owner[mine] = k * layout.clients + mix
            names += [f"{domain}-{i}" for i in range(layout.clients)]
        return owner, names, [d for d in known for _ in range(layout.clients)]
    deal = {
        "iid": lambda: who.iid(y, part, layout.clients, seed),
        "dirichlet": lambda: who.dirichlet(y, part, layout.clients, seed, layout.alpha),
        "disjoint": lambda: who.pathological(y, part, layout.clients, seed),
        "pathological": lambda: who.pathological(y, part, layout.clients, seed, layout.per_client),
    }
    width = len(str(layout.clients - 1))
    names = [f"client-{i:0{width}d}" for i in range(layout.clients)]
    return deal[kind](), names, names


def table(federation: Federation) -> list[dict]:
    """Clients × classes, for a person to look at."""
    d, rows = federation.data, []
    for k, name in enumerate(federation.names):
        low, high = d.bounds[k, 0], d.bounds[k, 1]
        classes = d.y[low:high].long() if d.y.dim() == 1 else torch.zeros(high - low, dtype=torch.long)
        per_class = torch.bincount(classes, minlength=len(federation.task.classes)).tolist()
        sizes = {s: int(d.counts(s)[k]) for s in SPLITS}
        rows.append({"client": name, "unseen": k in federation.unseen, **sizes, "classes": per_class})
    return rows
