"""What an honest server can ask a site next, as the site itself knows it from the plan.

A run is a row of places: in each round the exchanges of the merge, in their order, then scores, then diagnostics. Each place
has one request. The same request again gets the stored answer, so that a call that was lost, a process that was killed and a
server that repeats a round change nothing; another request in its place, one of a place that was passed over, and one of a
round that is over or not in the plan are refused. `Course` says which places there are, `Diary` which were taken.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedvlm.core.adapter import HasDiagnostics
from fedvlm.core.state import Message
from fedvlm.errors import Refused
from fedvlm.federation.wire import SECURE, Header
from fedvlm.system import files

if TYPE_CHECKING:
    from fedvlm.config.config import Config
    from fedvlm.rounds.method import Method

DIARY = "diary.jsonl"
SCORE, DIAGNOSE = 1 << 20, 1 + (1 << 20)  # places behind those of all exchanges


@dataclass(frozen=True)
class Course:
    """The places of a run, for one site."""

    rounds: int = 0
    every: int = 1  # rounds between evaluations
    once: bool = False  # the run ends with the first round that counts, which may be any
    trains: bool = True  # false: this site is held out of training
    secure: bool = False
    asks: list[str] = field(default_factory=list)  # the step of each exchange of a round
    tells: list[str] = field(default_factory=list)  # names that messages of these exchanges may have in `extra`
    diagnoses: bool = False

    @classmethod
    def of(cls, config: Config, method: Method, trains: bool) -> Course:
        merge = method.merge
        told = [*merge.tells, *(method.initial if merge.tells_by_parameter else ())]
        told += method.privacy.server_state() if method.privacy else ()
        return cls(
            rounds=config.rounds if method.trains else 0,
            every=config.evaluate_every,
            once=method.local.one_round,
            trains=trains,
            secure=config.secure,
            asks=list(merge.asks),
            tells=told,
            diagnoses=isinstance(method.adapter, HasDiagnostics) and config.dp == "none" and not config.secure,
        )

    def place(self, header: Header, message: Message) -> int:
        """The place of a request in its round, or an error that says why there is none."""
        step, round, exchange = header.step, header.round, header.exchange
        kind = "train" if step.startswith(SECURE) else step
        if self.secure and step == "train":
            raise Refused("was asked for its own update, and the run has secure=true")
        if not 0 <= round <= self.rounds:
            raise Refused(f"was asked for round {round} of a plan with {self.rounds}")
        last = round == self.rounds or self.once
        if kind in ("score", "diagnose"):
            due = (last or round % self.every == 0) if kind == "score" else (last and self.diagnoses)
            if exchange or not due:
                raise Refused(f"was asked for {step} where the plan has none (round {round}, exchange {exchange})")
            names: list[str] = []
        else:
            due = self.trains and round > 0 and self.asks[exchange : exchange + 1] == [kind]
            if exchange < 0 or not due or (kind != step) > self.secure:
                raise Refused(f"was asked for {step} where the plan has none (round {round}, exchange {exchange})")
            names = self.tells
        if odd := sorted(message.extra.keys() - set(names)):
            raise Refused(f"was told {odd[0]} with {step}, which this method does not tell")
        return SCORE if kind == "score" else DIAGNOSE if kind == "diagnose" else exchange


class Diary:
    """The requests of the current round and their answers, in private files of the client's folder. One process at a time
    keeps it."""

    def __init__(self, folder: Path, sync: bool):
        self.folder, self.sync = folder, sync  # sync: what was taken is on the disk before anything is computed
        self.round, self.taken, self.opened = -1, dict[int, str](), set[int]()
        path = folder / DIARY
        for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
            with contextlib.suppress(ValueError):  # cut when the machine stopped: nothing was computed for it
                self._take(*json.loads(line))

    def admit(self, round: int, place: int, request: str, new: bool = True) -> bytes | None:
        """Take a place for a request. The stored answer, where there is one; an error where the place is taken."""
        if round < self.round:
            raise Refused(f"was asked for round {round}, and round {self.round} has begun")
        taken = self.taken if round == self.round else {}
        if round == self.round and place in self.opened and new:
            raise Refused(f"has helped to open a sum of round {round} before")
        if taken.get(place, request) != request:
            raise Refused(f"was asked for something else before, in the same place of round {round}")
        path = self.folder / f"answer-{place}"
        if place in taken:
            return path.read_bytes() if path.exists() else None
        if place < max(taken, default=place):
            raise Refused(f"was asked for what comes earlier in round {round} than its last answer")
        for old in self.folder.glob("answer-*") if round > self.round else ():
            old.unlink()
        self._note(round, place, request, False)
        return None

    def keep(self, place: int, answer: bytes) -> None:
        files.write(self.folder / f"answer-{place}", answer, private=True)

    def open(self, place: int) -> None:
        """Notes that this client helps to open the secure sum of this place: there is no second one."""
        self._note(self.round, place, self.taken[place], True)

    def _take(self, round: int, place: int, request: str, opened: bool) -> None:
        if round != self.round:
            self.round, self.taken, self.opened = round, {}, set()
        self.taken[place] = request
        self.opened |= {place} if opened else set()

    def _note(self, *entry: int | str | bool) -> None:
        """Appends a line, which is many times as fast as a new file in the place of the old one."""
        path = self.folder / DIARY
        with files.writing(path), files.opened(path, "ab", private=True) as file:
            file.write(f"\n{json.dumps(entry)}\n".encode())  # behind one that was cut
            file.flush()
            if self.sync:
                os.fsync(file.fileno())
        self._take(*entry)  # type: ignore[arg-type]
