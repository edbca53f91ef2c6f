"""Images and texts that are computed on a CPU each by itself, with one core each.

What an operation gives may depend on how many cores share it, as it may on the rows beside a row. So whoever encodes does
it here: with one core an image, and the cores over the images. One image alone therefore takes one core.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

PIECE = 16  # images per call of a thread on a CPU: enough to keep a layer's weights in the cache

Item = TypeVar("Item")
LOCK = threading.RLock()  # MKL has one setting for all threads


@contextmanager
def encoder_threads(count: int) -> Iterator[ThreadPoolExecutor | None]:
    """So many threads, each of which, like this one meanwhile, computes on one core; None for 0."""
    if not count:
        yield None
        return
    with LOCK:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        pool = ThreadPoolExecutor(count, "encode", initializer=partial(torch.set_num_threads, 1))
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)


def each_alone(encode: Callable[[Sequence[Item]], Tensor], given: Sequence[Item]) -> Tensor:
    """encode(given), of a function that computes each item by itself, over all cores and without gradients."""
    half = torch.is_autocast_enabled("cpu")

    def encoded(part: Sequence[Item]) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            return encode(part)

    threads = torch.get_num_threads()
    if threads == 1:  # a thread of a pool that encodes, or a user's choice
        return encoded(given)
    with encoder_threads(threads) as pool:
        most = max(1, min(PIECE, -(-len(given) // threads)))
        parts = [given[part] for part in pieces(len(given), most)]
        if pool is None or len(parts) < 2:
            return encoded(given)
        return torch.cat(list(pool.map(encoded, parts)))


def pieces(count: int, most: int) -> list[slice]:
    """`count` images in parts of at most so many, as equal as possible."""
    parts = -(-count // most)
    return [slice(a, b) for a, b in pairwise(count * k // parts for k in range(parts + 1))]
