"""All clients in this process, one after the other."""

from __future__ import annotations

from fedvlm.engines.base import Job
from fedvlm.engines.stacked import Stacked


class Serial(Stacked):
    @classmethod
    def open(cls, job: Job) -> Serial:
        return cls(job.method, job.data, 1, job.folder / "rows.bin", job.log, job.device)
