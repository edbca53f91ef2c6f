"""Time of a command by phase: `with timed("encode"): …`. Needs no torch.

A phase inside another counts for itself alone, so that phases add up to at most the wall time. Only the main thread is
timed: what other threads do beside it shows as the time that it waits for them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

Phase = Literal["import", "load", "decode", "encode", "rounds", "evaluate", "write"]


class Clock:
    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self.inside = 0.0  # seconds of phases that ended inside the one under way

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        began, outside, self.inside = perf_counter(), self.inside, 0.0
        try:
            yield
        finally:
            took = perf_counter() - began
            self.seconds[phase] += took - self.inside
            self.inside = outside + took

    def taken(self) -> dict[str, float]:
        """Seconds by phase since the last call: what the first run of a process waited for is in its record."""
        found = dict(self.seconds)
        self.seconds.clear()
        return found


clock = Clock()  # of this process
timed = clock.timed
