"""Shamir's secret sharing (1979): any `threshold` of the shares give the secret, fewer say nothing about it.

The secret is f(0) of a random polynomial f of degree threshold − 1 modulo a prime; holder i's share is f(i + 1).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import accumulate
from math import prod

PRIME = 2**256 + 297  # the smallest above every secret of 32 bytes
SECRET, SHARE = 32, 33  # bytes


def split_secret(secret: bytes, threshold: int, holders: Iterable[int]) -> dict[int, bytes]:
    if len(secret) != SECRET:
        raise ValueError(f"a secret has {SECRET} bytes")
    polynomial = [secrets.randbelow(PRIME) for _ in range(threshold - 1)] + [int.from_bytes(secret, "little")]
    shares = {}
    for holder in holders:
        value = 0
        for coefficient in polynomial:  # Horner's rule
            value = (value * (holder + 1) + coefficient) % PRIME
        shares[holder] = value.to_bytes(SHARE, "little")
    return shares


def join_shares(shares: Mapping[int, bytes]) -> bytes:
    """The secret, from exactly `threshold` shares; an error where they do not belong together (not all such are found)."""
    weights = lagrange(tuple(sorted(shares)))
    value = sum(weights[i] * int.from_bytes(share, "little") for i, share in shares.items()) % PRIME
    if value >> (8 * SECRET):
        raise ValueError("the shares do not belong together")
    return value.to_bytes(SECRET, "little")


@lru_cache(maxsize=1024)
def lagrange(holders: tuple[int, ...]) -> dict[int, int]:
    """The weights with which the shares add up to f(0): Π x_j / (x_i · Π (x_j − x_i)), the second product over the
    others."""
    points = [i + 1 for i in holders]
    below = [x * prod(y - x for y in points if y != x) % PRIME for x in points]
    products = list(accumulate(below, lambda a, b: a * b % PRIME, initial=1))
    inverse, above, weights = pow(products.pop(), -1, PRIME), prod(points) % PRIME, {}
    for i, factor, before in zip(reversed(holders), reversed(below), reversed(products), strict=True):
        weights[i] = above * inverse * before % PRIME  # a single inversion serves all (Montgomery, 1987)
        inverse = inverse * factor % PRIME
    return weights
