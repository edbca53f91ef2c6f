"""Who holds what: splits (train, val, test) and partitions (which client), by seed, exact and always terminating."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedvlm.core import FedvlmError
from fedvlm.seeds import numpy_generator


def apportion(total: int, shares: np.ndarray) -> np.ndarray:
    """Whole numbers in these proportions that add up to `total` exactly (largest remainder)."""
    exact = total * shares / shares.sum()
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts


def split(
    labels: Sequence[str], domains: Sequence[str], groups: Sequence[str], seed: int, shares: Sequence[float]
) -> np.ndarray:
    """0 train, 1 val, 2 test for each item; stratified by class within a domain. Items of one group (in any domain)
    go together, stratified by class. A class of one image stays in train."""
    of = np.zeros(len(labels), np.int64)
    if any(groups):
        cells: dict[tuple[str, ...], list[int]] = {}
        for i, (label, group) in enumerate(zip(labels, groups, strict=True)):
            cells.setdefault((label, group) if group else (label, "", str(i)), []).append(i)
        strata: dict[str | tuple[str, ...], list[list[int]]] = {}
        for (label, *_), members in sorted(cells.items()):
            strata.setdefault(label, []).append(members)
    else:
        strata = {}
        for i, place in enumerate(zip(domains, labels, strict=True)):
            strata.setdefault(place, []).append([i])
    for number, (_, units) in enumerate(sorted(strata.items())):
        counts = apportion(len(units), np.asarray(shares, float))
        if counts[0] == 0:
            counts[counts.argmax()] -= 1
            counts[0] = 1
        order = numpy_generator(seed, 11, number).permutation(len(units))
        for part, chosen in enumerate(np.split(order, np.cumsum(counts)[:-1])):
            for unit in chosen:
                of[units[unit]] = part
    return of


def few_shot(labels: np.ndarray, owner: np.ndarray, part: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Which items stay: of each client's training items at most `shots` a class; val and test are left whole."""
    keep = np.ones(len(labels), bool)
    if not shots:
        return keep
    order = numpy_generator(seed, 13).permutation(len(labels))
    seen: dict[tuple[int, int], int] = {}
    for i in order:
        if part[i] == 0:
            cell = (int(owner[i]), int(labels[i]))
            seen[cell] = seen.get(cell, 0) + 1
            keep[i] = seen[cell] <= shots
    return keep


def iid(labels: np.ndarray, part: np.ndarray, clients: int, seed: int) -> np.ndarray:
    return _deal(labels, part, np.full((labels.max() + 1, clients), 1.0), seed)


def dirichlet(labels: np.ndarray, part: np.ndarray, clients: int, seed: int, alpha: float) -> np.ndarray:
    """Each class is cut in proportions drawn from Dirichlet(α), the same for train, val and test."""
    if not 0 < alpha < np.inf:
        raise FedvlmError(f"alpha={alpha:g} must be above 0: small is skewed, large is even")
    draw, size = numpy_generator(seed, 17), (labels.max() + 1, clients)
    # a gamma of shape α is one of shape α + 1 times u^(1/α): in logarithms, for with a tiny α all of them would be 0
    logs = np.log(draw.gamma(alpha + 1, size=size)) - draw.exponential(size=size) / alpha
    return _deal(labels, part, np.exp(logs - logs.max(1, keepdims=True)), seed)


def pathological(labels: np.ndarray, part: np.ndarray, clients: int, seed: int, per_client: int = 0) -> np.ndarray:
    """Classes dealt out like cards, each to one client; with `per_client` = k, k classes a client, shared evenly by
    whoever holds them (every class is held by somebody as long as k × clients allows)."""
    classes = int(labels.max()) + 1
    order = numpy_generator(seed, 19).permutation(classes)
    shares = np.zeros((classes, clients))
    if not per_client:
        if clients > classes:
            raise FedvlmError(
                f"this partition deals {classes} classes to clients={clients}: somebody would have none; "
                "lower clients=, or let classes overlap with partition=pathological per_client=2"
            )
        shares[order, np.arange(classes) % clients] = 1.0
    else:
        if not 1 <= per_client <= classes:
            raise FedvlmError(f"per_client={per_client} must be between 1 and the {classes} classes")
        deck = np.tile(order, -(-clients * per_client // classes))
        for client in range(clients):  # consecutive cards of a repeated deck are distinct while k ≤ classes
            shares[deck[client * per_client : (client + 1) * per_client], client] = 1.0
        orphans = np.flatnonzero(shares.sum(1) == 0)
        if len(orphans):
            raise FedvlmError(
                f"per_client={per_client} × clients={clients} leaves {len(orphans)} of {classes} classes with nobody; "
                f"raise either (at least {-(-classes // clients)} classes a client)"
            )
    return _deal(labels, part, shares, seed)


def _deal(labels: np.ndarray, part: np.ndarray, shares: np.ndarray, seed: int) -> np.ndarray:
    """Items to clients, class by class and split by split, in exact proportion."""
    owner = np.zeros(len(labels), np.int64)
    start = np.zeros(3, np.int64)
    for label in range(shares.shape[0]):
        for piece in range(3):
            members = np.flatnonzero((labels == label) & (part == piece))
            members = numpy_generator(seed, 23, label, piece).permutation(members)
            # ties between equal shares would always favour the first client: begin each class where the last ended
            turned = np.roll(shares[label], -start[piece])
            counts = np.roll(apportion(len(members), turned), start[piece])
            owner[members] = np.repeat(np.arange(shares.shape[1]), counts)
            start[piece] = (start[piece] + len(members)) % shares.shape[1]
    return owner
