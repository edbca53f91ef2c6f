"""All clients in this process, one after the other."""

from __future__ import annotations

from fedvlm.engines.base import Engine, Job
from fedvlm.engines.stacked import Stacked


class Serial(Stacked):
    """An engine that runs one client after the other."""

    @classmethod
    def open(cls, job: Job) -> Engine:
        return cls.with_chunk(job, 1)
