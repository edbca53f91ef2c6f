"""Random numbers for privacy: a cryptographic function (SHAKE-256) of a secret and of what the draw is for, so that they are
the same in every engine and in a repeated round, and nobody without the secret can compute them.

Normal numbers are made by Box and Muller's formula in float64. Like every noise in floating point it leaves traces of the
exact sum in its last digits (Mironov, 2012); docs/privacy.md says what that means.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def uniform(secret: bytes, purpose: str, *numbers: int, count: int) -> Floats:
    """Uniform numbers in (0, 1), 53 bits each; `numbers`: round, client, step, …"""
    key = repr((secret.hex(), purpose, *numbers)).encode()
    words = np.frombuffer(hashlib.shake_256(key).digest(8 * count), "<u8")
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(secret: bytes, purpose: str, *numbers: int, count: int) -> Floats:
    """Normal numbers of variance 1."""
    half = (count + 1) // 2
    first, second = uniform(secret, purpose, *numbers, count=2 * half).reshape(2, half)
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
