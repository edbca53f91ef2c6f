"""Splits (train, val, test) and partitions (which client holds which item). Both depend on the seed only, have exact
sizes, and need no resampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedvlm.core.data import SPLITS
from fedvlm.core.seeds import numpy_generator
from fedvlm.data.columns import Words
from fedvlm.errors import FedvlmError


def apportion(total: int, shares: np.ndarray) -> np.ndarray:
    """Integers in these proportions that add up to `total` (largest-remainder method)."""
    exact = total * shares / shares.sum()
    counts: np.ndarray = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts


def stable_order(cells: np.ndarray) -> np.ndarray:
    """np.argsort(cells, kind="stable") of numbers from 0 on, in a third of the time: numpy sorts 16 bits digit by digit, and
    numbers themselves, with their places in the last bits, by vector instructions."""
    if (largest := int(cells.max(initial=0))) < 1 << 16:
        return np.argsort(cells.astype(np.uint16), kind="stable")
    width = len(cells).bit_length()
    if largest.bit_length() + width > 63:
        return np.argsort(cells, kind="stable")
    keys: np.ndarray = (cells << width) | np.arange(len(cells))
    keys.sort()
    return keys & ((1 << width) - 1)


def split(
    labels: Sequence[str],
    domains: Sequence[str],
    groups: Sequence[str],
    seed: int,
    shares: Sequence[float] | np.ndarray,
    first: int = 0,
) -> np.ndarray:
    """The split of each item: 0 train, 1 val, 2 test. `first`: the number of strata before these, at other sites.

    Without groups the split is stratified by domain and class. With groups it is stratified by class only, and the items
    of one group, in all domains and classes, are in one split; a group of several classes counts as its most frequent
    one. Every stratum has something in train.
    """
    parts = np.zeros(len(labels), np.int64)
    if any(Words.of(groups).names):
        strata: dict[str, list[list[int]]] = {}  # stratum → units, each a list of items kept together
        members: dict[str, list[int]] = {}
        for i, group in enumerate(groups):
            if group:
                members.setdefault(group, []).append(i)
        units = {(most_frequent([labels[i] for i in m]), g): m for g, m in members.items()}
        alone = {(labels[i], "", str(i)): [i] for i, group in enumerate(groups) if not group}
        for (label, *_), together in sorted((units | alone).items()):
            strata.setdefault(label, []).append(together)
        for number, (_, units_of) in enumerate(sorted(strata.items()), first):
            for unit, part in zip(units_of, _drawn_parts(len(units_of), seed, shares, number), strict=True):
                parts[unit] = part
        return parts
    by_class, by_domain = Words.of(labels), Words.of(domains)
    stratum = by_domain.codes * len(by_class.names) + by_class.codes
    order = stable_order(stratum)
    _, sizes = np.unique(stratum, return_counts=True)
    for number, rows in enumerate(np.split(order, np.cumsum(sizes)[:-1]) if len(order) else (), first):
        parts[rows] = _drawn_parts(len(rows), seed, shares, number)
    return parts


def _drawn_parts(count: int, seed: int, shares: Sequence[float] | np.ndarray, number: int) -> np.ndarray:
    """The split of each of the units of a stratum."""
    counts = apportion(count, np.asarray(shares, float))
    if counts[0] == 0:
        counts[counts.argmax()] -= 1
        counts[0] = 1
    found = np.empty(count, np.int64)
    found[numpy_generator(seed, 11, number).permutation(count)] = np.repeat(np.arange(len(counts)), counts)
    return found


def most_frequent(labels: Sequence[str]) -> str:
    """The first by name of those that are equally frequent."""
    return min(Counter(labels).items(), key=lambda found: (-found[1], found[0]))[0]


def given_split(
    given: Sequence[str],
    labels: Sequence[str],
    domains: Sequence[str],
    groups: Sequence[str],
    seed: int,
    shares: Sequence[float],
    first: int = 0,
) -> np.ndarray:
    """The split of each item where the data come with one; of val and test, what the data do not have is drawn from their
    train items, in the proportions of `shares`."""
    words = Words.of(given)
    parts: np.ndarray = np.array([SPLITS.index(name) for name in words.names], np.int64)[words.codes]
    drawn = [part == 0 or not (parts == part).any() for part in range(len(SPLITS))]
    rows = np.flatnonzero(parts == 0)
    if any(drawn[1:]) and len(rows):
        label, domain, group = (Words.of(column).only(rows) for column in (labels, domains, groups))
        parts[rows] = split(label, domain, group, seed, np.where(drawn, shares, 0), first)
    return parts


def few_shot(labels: np.ndarray, owner: np.ndarray, part: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Which items to keep: at most `shots` (0: all) training items per client and class, and all of val and test."""
    keep = np.ones(len(labels), bool)
    if not shots:
        return keep
    order = numpy_generator(seed, 13).permutation(len(labels))
    order = order[part[order] == 0]
    cell = owner[order] * (int(labels.max(initial=0)) + 1) + labels[order]
    by_cell = stable_order(cell)
    _, starts, sizes = np.unique(cell[by_cell], return_index=True, return_counts=True)
    keep[order[by_cell]] = np.arange(len(order)) - np.repeat(starts, sizes) < shots
    return keep


def iid(labels: np.ndarray, part: np.ndarray, clients: int, seed: int) -> np.ndarray:
    """The client of each item; every client has the same share of each class."""
    return _assign(labels, part, np.full((labels.max() + 1, clients), 1.0), seed)


def dirichlet(labels: np.ndarray, part: np.ndarray, clients: int, seed: int, alpha: float) -> np.ndarray:
    """The client of each item; the shares of a class are drawn from Dirichlet(α), the same for train, val and test."""
    if not 0 < alpha < np.inf:
        raise FedvlmError(f"alpha={alpha:g} must be above 0: small is skewed, large is even")
    draw, size = numpy_generator(seed, 17), (labels.max() + 1, clients)
    # Gamma(α) is Gamma(α + 1) × u^(1/α); computed in logarithms because all of a class's draws underflow for a tiny α
    logs = np.log(draw.gamma(alpha + 1, size=size)) - draw.exponential(size=size) / alpha
    return _assign(labels, part, np.exp(logs - logs.max(1, keepdims=True)), seed)


def pathological(labels: np.ndarray, part: np.ndarray, clients: int, seed: int, per_client: int = 0) -> np.ndarray:
    """The client of each item, where a client holds only some classes.

    per_client: how many classes a client holds; the clients that hold a class share it evenly. 0: each class is held by
    exactly one client.
    """
    classes = int(labels.max()) + 1
    order = numpy_generator(seed, 19).permutation(classes)
    shares = np.zeros((classes, clients))
    if not per_client:
        if clients > classes:
            raise FedvlmError(
                f"this partition deals {classes} classes to clients={clients}: some clients would have none; "
                "lower clients=, or let classes overlap with partition=pathological per_client=2"
            )
        shares[order, np.arange(classes) % clients] = 1.0
    else:
        if not 1 <= per_client <= classes:
            raise FedvlmError(f"per_client={per_client} must be between 1 and the {classes} classes")
        repeated = np.tile(order, -(-clients * per_client // classes))
        for client in range(clients):  # consecutive entries are distinct, because per_client ≤ classes
            shares[repeated[client * per_client : (client + 1) * per_client], client] = 1.0
        unassigned = np.flatnonzero(shares.sum(1) == 0)
        if len(unassigned):
            raise FedvlmError(
                f"per_client={per_client} × clients={clients} leaves {len(unassigned)} of {classes} classes without a "
                f"client; raise either (at least {-(-classes // clients)} classes a client)"
            )
    return _assign(labels, part, shares, seed)


def _assign(labels: np.ndarray, part: np.ndarray, shares: np.ndarray, seed: int) -> np.ndarray:
    """The client of each item, by shares [classes, clients]; exact within each class and split."""
    owner = np.zeros(len(labels), np.int64)
    start = np.zeros(3, np.int64)
    cell = labels * 3 + part
    ends = np.cumsum(np.bincount(cell, minlength=3 * shares.shape[0]))
    cells = np.split(stable_order(cell), ends[:-1])
    for label in range(shares.shape[0]):
        for piece in range(3):
            members = numpy_generator(seed, 23, label, piece).permutation(cells[3 * label + piece])
            # apportion breaks ties in favour of the first client: begin each class at the client where the last one ended
            rotated = np.roll(shares[label], -start[piece])
            counts = np.roll(apportion(len(members), rotated), start[piece])
            owner[members] = np.repeat(np.arange(shares.shape[1]), counts)
            start[piece] = (start[piece] + len(members)) % shares.shape[1]
    return owner
