"""All clients in this process, one after the other."""

from __future__ import annotations

from fedvlm.engines.base import Engine, Job
from fedvlm.engines.stacked import Stacked


class Serial(Stacked):
    @classmethod
    def open(cls, job: Job) -> Engine:
        return cls.with_chunk(job, 1)
