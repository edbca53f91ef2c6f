"""A function in several threads, for what waits for the disk or leaves Python's lock alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from fedvlm.system.machine import cores

Given = TypeVar("Given")
Made = TypeVar("Made")


def in_threads(make: Callable[[Given], Made], given: Iterable[Given]) -> Iterator[Made]:
    """Apply `make` like `map`, a few ahead, with a thread per core."""
    waiting: deque[Future[Made]] = deque()
    pool = ThreadPoolExecutor(cores(), thread_name_prefix="read")
    try:
        for one in given:
            waiting.append(pool.submit(make, one))
            if len(waiting) > 2 * cores():
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
