"""Who shares masks with whom. Few clients: everybody with everybody. Many: SecAgg+ (Bell et al., 2020), a ring in an order
drawn by the round's public seed, in which each client has the k/2 next on either side as neighbours.

k and the share threshold t are the smallest for which, with `CORRUPT` of the clients on the server's side and `DROPPED` of
them dropping out, the union bounds hold:
- n · P[t or more of k neighbours are corrupt] ≤ 2^−40, hypergeometric: nobody's secrets can be opened;
- n · (corrupt + dropped)^(k/2) ≤ 2^−40: no k/2 in a row are gone, so that the honest clients that are left stay connected
  and only their whole sum can be seen;
- n · P[fewer than t of k neighbours are left] ≤ 2^−20: else the round is void, and nothing is learnt;
- 2 t > k + 1: without corrupt neighbours nobody's both secrets can be opened, even by telling them different stories.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction
from functools import cache, lru_cache
from math import ceil, comb
from typing import NamedTuple

SMALLEST = 3  # clients in a sum: of two, each could subtract its own
CORRUPT = DROPPED = Fraction(1, 5)
SECURITY, CORRECTNESS = Fraction(1, 2**40), Fraction(1, 2**20)


class Size(NamedTuple):
    neighbours: int  # k, of each client
    threshold: int  # t: so many of a client's neighbours and itself must give a share to open one of its secrets


@cache
def graph_size(clients: int, threshold: int) -> Size:
    """`threshold`: clients that must be in a sum; with few clients it is also the threshold of shares."""
    for k in range(2, clients - 1, 2):
        t = smallest_safe(clients, k)
        lost = tail(clients - 1, ceil(DROPPED * (clients - 1)), k, k - t + 1)
        if t <= k and clients * lost <= CORRECTNESS and clients * (CORRUPT + DROPPED) ** (k // 2) <= SECURITY:
            return Size(k, t)
    return Size(clients - 1, threshold)


def smallest_safe(clients: int, k: int) -> int:
    t = k // 2 + 1
    while t <= k and clients * tail(clients - 1, ceil(CORRUPT * (clients - 1)), k, t) > SECURITY:
        t += 1
    return t


def tail(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """P[at least so many of those drawn are marked], hypergeometric, exact."""
    ways = sum(comb(marked, i) * comb(population - marked, drawn - i) for i in range(max(0, least), drawn + 1))
    return Fraction(ways, comb(population, drawn))


@lru_cache(maxsize=8)
def neighbours(seed: bytes, ids: tuple[int, ...], k: int) -> dict[int, frozenset[int]]:
    n = len(ids)
    if k >= n - 1:
        everybody = frozenset(ids)
        return {i: everybody - {i} for i in ids}
    ring = sorted(ids, key=lambda i: hashlib.sha256(seed + i.to_bytes(4, "little")).digest())
    steps = [s for s in range(-(k // 2), k // 2 + 1) if s]
    return {i: frozenset(ring[(at + s) % n] for s in steps) for at, i in enumerate(ring)}
