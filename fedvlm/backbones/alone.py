"""Images and texts that are computed on a CPU each by itself, with one core each.

What an operation gives may depend on how many cores share it, as it may on the rows beside a row. So whoever encodes does
it here: with one core an image, and the cores over the images. One image alone therefore takes one core.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

PIECE = 16  # images per call of a thread on a CPU: enough to keep a layer's weights in the cache

Item = TypeVar("Item")
LOCK = threading.RLock()


class Here(threading.local):
    on_one_core = False  # whether this thread computes on one core


HERE = Here()
usual = 0  # the number of cores that torch may use, while encoder_threads has set it to 1; 0 outside


@contextmanager
def encoder_threads(count: int) -> Iterator[ThreadPoolExecutor | None]:
    """Threads, so many, each of which, like this one meanwhile, computes on one core; None for 0."""
    global usual
    if not count:
        yield None
        return
    with LOCK:
        before = torch.get_num_threads(), HERE.on_one_core, usual
        usual = usual or before[0]
        on_one_core()
        pool = ThreadPoolExecutor(count, "encode", initializer=on_one_core)
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
            number, HERE.on_one_core, usual = before
            torch.set_num_threads(number)


def on_one_core() -> None:
    """Keeps this thread to one core. torch has a number of cores for each thread, which a new thread takes, when it first
    asks for it, from the one that was set last anywhere: so it is asked for before it is set."""
    torch.get_num_threads()
    torch.set_num_threads(1)
    HERE.on_one_core = True


def each_alone(encode: Callable[[Sequence[Item]], Tensor], given: Sequence[Item]) -> Tensor:
    """encode(given), of a function that computes each item by itself, over all cores and without gradients."""
    half = torch.is_autocast_enabled("cpu")

    def encoded(part: Sequence[Item]) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            return encode(part)

    if HERE.on_one_core:
        return encoded(given)
    cores = usual or torch.get_num_threads()
    if cores == 1:  # nothing to share, so several threads may do this at once
        torch.set_num_threads(1)
        return encoded(given)
    with encoder_threads(cores) as pool:
        most = max(1, min(PIECE, -(-len(given) // cores)))
        parts = [given[part] for part in pieces(len(given), most)]
        if pool is None or len(parts) < 2:
            return encoded(given)
        return torch.cat(list(pool.map(encoded, parts)))


def pieces(count: int, most: int) -> list[slice]:
    """`count` images in parts of at most so many, as equal as possible."""
    parts = -(-count // most)
    return [slice(a, b) for a, b in pairwise(count * k // parts for k in range(parts + 1))]
