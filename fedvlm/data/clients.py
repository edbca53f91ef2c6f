"""A federation: which client's rows lie where in one pool of features: train, then val, then test for each client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvlm.config.config import OPEN, POOL, POOLED, Layout
from fedvlm.core.adapter import Task
from fedvlm.core.data import SPLITS, Data, Extra
from fedvlm.core.seeds import key
from fedvlm.core.tasks import NEXT_CHARACTER
from fedvlm.data import partition
from fedvlm.data.centre import centred
from fedvlm.data.columns import Words, column
from fedvlm.data.duplicates import together
from fedvlm.data.mapped import gathered
from fedvlm.data.pool import Pool
from fedvlm.data.source import NO_DOMAIN, Item
from fedvlm.errors import FedvlmError, nearest


class Half(NamedTuple):
    rows: np.ndarray  # of the pool
    y: Tensor


@dataclass(frozen=True)
class Federation:
    names: tuple[str, ...]  # of the clients, position = id
    domains: tuple[str, ...]  # the domain of each client
    data: Data
    task: Task
    unseen: tuple[int, ...] = ()
    items: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # pool row → item of the source
    pooled: bool = False  # the last client holds everybody's training data, and is the only one that trains
    halves: dict[str, Half] = field(default_factory=dict)  # test examples of base and of novel classes

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
        has[list(self.unseen)] = False
        return np.flatnonzero(has)


def federate(pool: Pool, layout: Layout, seed: int) -> Federation:
    """Clients with their examples."""
    return with_examples(shared_out(pool, layout, seed), pool, layout)


def shared_out(pool: Pool, layout: Layout, seed: int) -> Federation:
    """Who has which rows of the pool; nobody has examples yet, so that an outline of the pool is enough."""
    items = pool.source.items
    novel = pool.task.novel.classes if pool.task.novel else ()
    classes = {c: k for k, c in enumerate((*pool.task.classes, *novel))}
    labels, domains = column(items, "label"), column(items, "domain")
    y = np.array([classes[name] for name in labels.names])[labels.codes]
    if len(layout.split) != 3 or min(layout.split) < 0 or layout.split[0] <= 0:
        raise FedvlmError(f"split={layout.split} must be three shares, train above 0, such as 60,20,20")
    by_domain = pool.source.task_type is NEXT_CHARACTER  # a block of text holds many characters
    part = split_of(items, domains if by_domain else labels, domains, seed, layout, twins=pool.twins)
    base = np.flatnonzero(y < len(pool.task.classes))  # nobody holds examples of novel classes
    clients = column(items, "client")
    kind = _kind(layout, domains.only(base), clients.only(base))
    owner, names, homes = _owners(kind, layout, y[base], part[base], domains.only(base), clients.only(base), seed)
    if layout.score == "domain" and not set(homes) <= set(domains.names):
        raise FedvlmError(
            "score=domain: these clients are of no single domain; use partition=domain-dirichlet or score=all"
        )
    unseen = tuple(k for k in range(len(names)) if {names[k], homes[k]} & set(layout.unseen)) if layout.unseen else ()
    if layout.unseen_split == "all":
        part[base[np.isin(owner, unseen)]] = SPLITS.index("test")
    keep = partition.few_shot(y[base], owner, part[base], layout.shots, seed)
    order = partition.stable_order(owner * len(SPLITS) + part[base])
    order = order[keep[order]]
    cells = np.bincount(owner[order] * 3 + part[base][order], minlength=3 * len(names)).reshape(-1, 3)
    order = base[order]
    ends = np.cumsum(cells.sum(1))
    bounds = np.concatenate([(ends - cells.sum(1))[:, None], (ends - cells.sum(1))[:, None] + np.cumsum(cells, 1)], 1)
    for wanted in layout.unseen:
        if wanted not in names and wanted not in homes:
            raise FedvlmError(
                f"unseen={wanted}: no such domain or client; {nearest(wanted, dict.fromkeys([*homes, *names]))}"
            )
    data = Data(torch.zeros(len(order), 0), torch.from_numpy(y[order]), bounds, np.arange(len(names)), seed)
    halves = _base_and_novel(pool, y, part) if pool.task.novel else {}
    federation = Federation(tuple(names), tuple(homes), data, pool.task, unseen, order, halves=halves)
    if not len(federation.seen):
        raise FedvlmError("nobody is left to train: every client is held out or has no training image")
    return with_shared_tests(federation, layout)


def with_examples(federation: Federation, pool: Pool, layout: Layout) -> Federation:
    """Each client with the examples of its rows."""
    rows, d = torch.from_numpy(federation.items), federation.data
    extras = {k: e._replace(x=e.x[rows]) if e.aligned else e for k, e in pool.extras.items()}
    extras |= {k: Extra(pool.x[torch.from_numpy(half.rows)], half.y) for k, half in federation.halves.items()}
    y = d.y if pool.y is None else pool.y[rows]
    data = replace(d, x=gathered(pool.x, federation.items), y=y, extras=extras)
    federation = replace(federation, data=centred(data) if layout.centre == "own" else data)
    return _pooled(federation) if layout.partition == POOLED else federation


def split_of(
    items: Sequence[Item],
    strata: Sequence[str],
    domains: Sequence[str],
    seed: int,
    layout: Layout,
    first: int = 0,
    twins: np.ndarray | None = None,
) -> np.ndarray:
    """The split of each item: as the data say, or else drawn, with copies of an image on one side."""
    groups = column(items, "group")
    if any(i.split for i in items[:1]):
        return partition.given_split(column(items, "split"), strata, domains, groups, seed, layout.split, first)
    return together(partition.split(strata, domains, groups, seed, layout.split, first), twins)


def with_shared_tests(federation: Federation, layout: Layout) -> Federation:
    """Each client with the test rows that score= says; rows that several clients are scored on are copied. The images of
    held-out clients are only seen by held-out clients, unless score=unseen asks for them: what is trained and what is new
    are not mixed."""
    if layout.score == "own":
        return federation
    d, names, unseen = federation.data, federation.names, federation.unseen
    if layout.score == "unseen" and not unseen:
        raise FedvlmError("score=unseen: nobody is held out; give unseen= or protocol=leave-one-domain-out")

    def tests(k: int) -> list[np.ndarray]:
        near = [j for j in range(len(names)) if federation.domains[j] == federation.domains[k]]
        group = near if layout.score == "domain" else range(len(names))
        wanted = k in unseen or layout.score == "unseen"
        return [np.arange(d.bounds[j, 2], d.bounds[j, 3]) for j in group if (j in unseen) == wanted]

    rows = [np.concatenate([np.arange(d.bounds[k, 0], d.bounds[k, 2]), *tests(k)]) for k in range(len(names))]
    ends = np.cumsum([len(r) for r in rows])
    starts = ends - [len(r) for r in rows]
    bounds = np.concatenate([starts[:, None] + d.bounds[:, :3] - d.bounds[:, :1], ends[:, None]], axis=1)
    order = np.concatenate(rows)
    at = torch.from_numpy(order)
    data = replace(d, x=d.x[at], y=d.y[at], bounds=bounds)
    return replace(federation, data=data, items=federation.items[order])


def own_data(pool: Pool, layout: Layout, seed: int, classes: Sequence[str], place: int) -> Data:
    """The data of a single client that alone holds this pool, in the order train, val, test. `classes` are those of all
    clients; where every client has all of them, the split is that of `federate` with one client per domain."""
    if layout.score != "own":
        raise FedvlmError(f"score={layout.score}: a site is scored on its own test images only; leave score= out")
    items, number = pool.source.items, {c: k for k, c in enumerate(classes)}
    y = np.array([number[i.label] for i in items])
    by_site = pool.source.task_type is NEXT_CHARACTER
    strata = [NO_DOMAIN] * len(items) if by_site else [i.label for i in items]
    before = place * (1 if by_site else len(classes))
    part = split_of(items, strata, [""] * len(items), seed, layout, before, pool.twins)
    keep = partition.few_shot(y, np.zeros(len(y), np.int64), part, layout.shots, seed)
    order = np.lexsort((np.arange(len(y)), part))
    order = order[keep[order]]
    sizes = np.bincount(part[order], minlength=len(SPLITS))
    rows = torch.from_numpy(order)
    answers = torch.from_numpy(y) if pool.y is None else pool.y
    extras = {k: e._replace(x=e.x[rows]) if e.aligned else e for k, e in pool.extras.items()}
    bounds = np.concatenate([[0], np.cumsum(sizes)])[None]
    data = Data(pool.x[rows], answers[rows], bounds, np.array([place]), seed, extras=extras)
    return centred(data) if layout.centre == "own" else data


def _base_and_novel(pool: Pool, y: np.ndarray, part: np.ndarray) -> dict[str, Half]:
    """The test examples of all base and of all novel classes, labels numbered from 0."""
    base, test = len(pool.task.classes), part == SPLITS.index("test")
    found: dict[str, Half] = {}
    for half, where, first in (("base", test & (y < base), 0), ("novel", test & (y >= base), base)):
        if not where.any():
            raise FedvlmError(
                f"protocol={OPEN}: there is no test image of a {half} class; give split= a larger third share, "
                "such as 60,20,20"
            )
        found[half] = Half(np.flatnonzero(where), torch.from_numpy(y[where] - first))
    return found


def _pooled(federation: Federation) -> Federation:
    """Add a client that holds the training rows of all that could train."""
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
        names=(*federation.names, POOL),
        domains=(*federation.domains, POOL),
        data=data,
        items=items,
        pooled=True,
    )


def partition_of(layout: Layout, items: Sequence[Item]) -> str:
    """What partition=auto is for these items: their clients where they name these, else their domains, else dirichlet."""
    return _kind(layout, column(items, "domain"), column(items, "client"))


def _kind(layout: Layout, domains: Words, clients: Words) -> str:
    has_domains = domains.names != (NO_DOMAIN,)
    auto = "client" if all(clients.names) else "domain" if has_domains else "dirichlet"
    kind = layout.partition if layout.partition != "auto" else auto
    if kind.startswith("domain") and not has_domains:
        raise FedvlmError(
            f"partition={kind} needs domain/class/image, and this data has no domains; use partition=dirichlet"
        )
    if kind == "client" and auto != "client":
        raise FedvlmError(
            "partition=client needs a table with a column client, and this data names none; use partition=auto"
        )
    return kind


def _owners(
    kind: str, layout: Layout, y: np.ndarray, part: np.ndarray, domain: Words, client: Words, seed: int
) -> tuple[np.ndarray, list[str], list[str]]:
    """The owner of each item, the clients' names, and their domains."""
    known, place = list(domain.names), domain.codes
    if kind == "disjoint" and layout.per_client:
        raise FedvlmError(
            f"per_client={layout.per_client}: partition=disjoint deals each class to one client; classes overlap with "
            "partition=pathological"
        )
    if layout.clients < 1:
        raise FedvlmError(f"clients={layout.clients} must be at least 1")
    if kind == "client":
        home = np.zeros(len(client.names), np.int64)
        home[client.codes] = place
        return client.codes, list(client.names), [known[k] for k in home.tolist()]
    if kind in ("domain", POOLED):
        return place, known, known
    if kind in ("domain-iid", "domain-dirichlet"):
        owner, names = np.zeros(len(y), np.int64), []
        for k, name in enumerate(known):
            mine = np.flatnonzero(place == k)
            cut = (y[mine], part[mine], layout.clients, key(seed, 29, k))
            mix = partition.iid(*cut) if kind == "domain-iid" else partition.dirichlet(*cut, layout.alpha)
            owner[mine] = k * layout.clients + mix
            names += [f"{name}-{i}" for i in range(layout.clients)]
        return owner, names, [d for d in known for _ in range(layout.clients)]
    deal = {
        "iid": lambda: partition.iid(y, part, layout.clients, seed),
        "dirichlet": lambda: partition.dirichlet(y, part, layout.clients, seed, layout.alpha),
        "disjoint": lambda: partition.pathological(y, part, layout.clients, seed),
        "pathological": lambda: partition.pathological(y, part, layout.clients, seed, layout.per_client),
    }
    width = len(str(layout.clients - 1))
    names = [f"client-{i:0{width}d}" for i in range(layout.clients)]
    return deal[kind](), names, names


class ClientSizes(NamedTuple):
    client: str
    unseen: bool
    splits: dict[str, int]
    classes: list[int]  # training examples of each class


def table(federation: Federation) -> list[ClientSizes]:
    """Clients × classes, for a person to look at."""
    d, rows = federation.data, []
    for k, name in enumerate(federation.names):
        low, high = int(d.bounds[k, 0]), int(d.bounds[k, 1])
        classes = d.y[low:high].long() if d.y.dim() == 1 else torch.zeros(high - low, dtype=torch.long)
        per_class: list[int] = torch.bincount(classes, minlength=len(federation.task.classes)).tolist()
        sizes = {s: int(d.counts(s)[k]) for s in SPLITS}
        rows.append(ClientSizes(name, k in federation.unseen, sizes, per_class))
    return rows
