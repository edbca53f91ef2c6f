"""Run folders as they are at one moment: each file is read once."""

from __future__ import annotations

from functools import cached_property

from fedvlm.core.records import RoundRecord, RunRecord
from fedvlm.training.folder import RunFolder


class Snapshot(RunFolder):
    """A run folder for reading."""

    def __init__(self, run: RunFolder):
        super().__init__(run.folder, run.trusted)

    @cached_property
    def _record(self) -> RunRecord:
        return super().record

    @cached_property
    def _rounds(self) -> list[RoundRecord]:
        return super().rounds()

    @property
    def record(self) -> RunRecord:
        return self._record

    def rounds(self) -> list[RoundRecord]:
        return self._rounds

    @property
    def progress(self) -> str:
        last = self._rounds[-1]["round"] if self._rounds else 0
        return f"{self.folder.name} (round {last} of {self.record.rounds})"
