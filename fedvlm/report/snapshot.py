"""Run folders as they are at one moment: each file is read once, and a run that is still going ends with its last scores."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from fedvlm.core.records import Result, RoundRecord, RunRecord
from fedvlm.training.folder import RunFolder


class Snapshot(RunFolder):
    """A run folder for reading. `running`: whether a run without a result counts with the rounds that it has so far."""

    def __init__(self, run: RunFolder, running: bool = False):
        super().__init__(run.folder)
        self.running = running

    @cached_property
    def finished(self) -> bool:
        """Whether the folder itself has a result."""
        return self._stored.result is not None

    @cached_property
    def _stored(self) -> RunRecord:
        return super().record

    @cached_property
    def _rounds(self) -> list[RoundRecord]:
        return super().rounds()

    @cached_property
    def _record(self) -> RunRecord:
        if self.finished or not self.running or (result := so_far(self._rounds, self._stored)) is None:
            return self._stored
        return replace(self._stored, result=result)

    @property
    def record(self) -> RunRecord:
        return self._record

    def rounds(self) -> list[RoundRecord]:
        return self._rounds

    @property
    def progress(self) -> str:
        last = self._rounds[-1]["round"] if self._rounds else 0
        return f"{self.folder.name} (round {last} of {self._stored.rounds})"


def so_far(rounds: list[RoundRecord], record: RunRecord) -> Result | None:
    """What the result would be if the last scored round were the last one; None before any round was scored."""
    scored = [r for r in rounds if "personal" in r]
    if not scored:
        return None
    return Result(
        last=scored[-1],
        selected=scored[-1],
        parameters={},
        bytes_down=sum(r.get("bytes_down", 0) for r in rounds),
        bytes_up=sum(r.get("bytes_up", 0) for r in rounds),
        seconds=sum(r.get("seconds", 0.0) for r in rounds),
        unseen=held_out(record),
    )


def held_out(record: RunRecord) -> list[str]:
    """The clients of the domains (or the clients) that nobody trains on."""
    wanted = set(record.unseen)
    return [c for c in record.clients if c in wanted or record.homes.get(c, c) in wanted]
