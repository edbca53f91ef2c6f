"""Random numbers by hashing: every draw depends only on its key (run seed, round, client, …), so it is the same in
every engine and in any order.

The hash is splitmix64 (Steele, Lea and Flood, 2014). Nothing in fedvlm reads a global random state.
"""

import numpy as np
import torch
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: Keys) -> Keys:
    with np.errstate(over="ignore"):
        z = z + GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def keys(*parts: int, clients: np.ndarray) -> Keys:
    """One 64-bit key per client id, from what identifies the draw: (run seed, round, step, ...)."""
    key = np.asarray(clients, dtype=np.uint64)
    for part in parts:
        key = _mix(key ^ _mix(np.array([part], dtype=np.uint64)))
    return key


def key(*parts: int) -> int:
    """One 64-bit key from what identifies the draw."""
    return int(keys(*parts, clients=np.zeros(1))[0])


def shuffled(keys: Keys, counts: np.ndarray) -> NDArray[np.intp]:
    """A random permutation of range(count) for each key, concatenated."""
    owner = np.repeat(np.arange(len(counts), dtype=np.uint64), counts)
    position: NDArray[np.intp] = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    with np.errstate(over="ignore"):
        hashes = _mix(np.repeat(keys, counts) + position.astype(np.uint64) * GOLDEN)
    order = np.argsort((owner << np.uint64(40)) | (hashes >> np.uint64(24)), kind="stable")
    return position[order]


def generator(*parts: int) -> torch.Generator:
    """Torch's generator for these numbers: the same on every machine."""
    return torch.Generator().manual_seed(key(*parts) & 0x7FFFFFFFFFFFFFFF)


def numpy_generator(*parts: int) -> np.random.Generator:
    return np.random.default_rng(key(*parts))
