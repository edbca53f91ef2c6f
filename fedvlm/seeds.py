"""Randomness without a generator: every draw is a hash of what it is for, so it is the same in any engine, any order.

The mixer is splitmix64 (Steele, Lea and Flood, 2014). Nothing in fedvlm reads a global random state.
"""

import numpy as np
import torch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        z = z + GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def keys(*parts: int, clients: np.ndarray) -> np.ndarray:
    """One 64-bit key a client, from what the draw is for: (run seed, round, step, ...)."""
    key = np.asarray(clients, dtype=np.uint64)
    for part in parts:
        key = _mix(key ^ _mix(np.array([part], dtype=np.uint64)))
    return key


def key(*parts: int) -> int:
    return int(keys(*parts, clients=np.zeros(1))[0])


def shuffled(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """A permutation of range(count) for each key, one behind the other."""
    owner = np.repeat(np.arange(len(counts), dtype=np.uint64), counts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    with np.errstate(over="ignore"):
        hashes = _mix(np.repeat(keys, counts) + place.astype(np.uint64) * GOLDEN)
    order = np.argsort((owner << np.uint64(40)) | (hashes >> np.uint64(24)), kind="stable")
    return place[order]


def generator(*parts: int) -> torch.Generator:
    return torch.Generator().manual_seed(key(*parts) & 0x7FFFFFFFFFFFFFFF)


def numpy_generator(*parts: int) -> np.random.Generator:
    return np.random.default_rng(key(*parts))
