"""The clients of one round, and the one channel between them and the server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedvlm.core.observers import Observer
from fedvlm.core.state import EFFECT, Message, Note, Params, Reply
from fedvlm.errors import FedvlmError, NoQuorum

if TYPE_CHECKING:
    from fedvlm.core.model import Model
    from fedvlm.engines.base import Engine
    from fedvlm.privacy.secure.settings import Secure, Summation
    from fedvlm.privacy.secure.sums import Summable
    from fedvlm.rounds.guard import Guard


@dataclass
class Cohort:
    """The clients of one round. All communication goes through `stream` and `sums`, which count every byte."""

    engine: Engine
    ids: np.ndarray
    round: int
    quorum: float = 0.0
    rounds: int = 1  # of the whole run, for schedules
    population: int = 0  # clients that could have been sampled
    lost: frozenset[int] = frozenset()  # clients that will not answer (dropout=, a rehearsal of failures)
    guard: Guard | None = None  # checks what clients answer; None: everything is accepted
    secure: Secure | None = None  # secure aggregation (secure=true): only sums of training replies are seen
    observers: tuple[Observer, ...] = ()  # see the replies to `train`
    bytes_down: int = 0
    bytes_up: int = 0
    exchange: int = 0
    notes: dict[str, Note] = field(default_factory=dict)  # goes into the round's record
    # what the mechanisms of local rule and merge did, by name (their `effects`), a list over clients each
    effects: dict[str, list[float]] = field(default_factory=dict)

    def stream(self, step: str, message: Message) -> Iterator[Reply]:
        """Replies a few clients at a time, so that memory does not grow with the cohort."""
        return self._replies(step, message, self.observers)

    def _replies(self, step: str, message: Message, observers: tuple[Observer, ...] = ()) -> Iterator[Reply]:
        if self.secure and step == "train":
            raise FedvlmError("secure=true: this merge asks for the replies of single clients; use merge=mean")
        asked, clients = self._to_ask()
        self.bytes_down += clients * message.nbytes
        inspection = self.guard.inspect(step, message, self.round) if self.guard else None
        answered = 0
        for came in self.engine.run(step, asked, message, self.round, self.exchange):
            self.bytes_up += came.nbytes
            for reply in inspection.passed(came) if inspection else (came,):
                answered += self._noted(step, reply, observers)
                yield reply
        for reply in inspection.rest() if inspection else ():
            answered += self._noted(step, reply, observers)
            yield reply
        self._end_exchange(answered)

    def _noted(self, step: str, reply: Reply, observers: tuple[Observer, ...]) -> int:
        """Shows a reply to the observers and keeps what the mechanisms of its clients did; how many clients it is of."""
        self._observe(step, reply, observers)
        for name in (k for k in reply.values if k.startswith(EFFECT)):
            self.effects.setdefault(name.removeprefix(EFFECT), []).extend(reply.values[name].tolist())
        return len(reply.ids)

    def _observe(self, step: str, reply: Reply, observers: tuple[Observer, ...]) -> None:
        for observer in observers if step == "train" else ():
            observer.add(reply)

    def acted(self, **effects: float) -> None:
        """What a merge did in this round, by the names of its `effects`."""
        self.effects |= {name: [value] for name, value in effects.items()}

    def sums(self, merge: Summable, model: Model, message: Message) -> Params:
        """Train, and return the sums over clients of the merge's `summands`, and nothing of single clients."""
        if self.secure is None:
            raise ValueError("sums are asked for with secure=true only")
        asked, clients = self._to_ask()
        wanted = self.secure.summation(merge, model, message.shared, clients)
        self._check_threshold(len(asked), clients, wanted)
        down, up = wanted.traffic()
        self.bytes_down += clients * (message.nbytes + down)
        found = self.engine.sums(asked, message, self.round, self.exchange, wanted)
        self.bytes_up += len(found.ids) * up
        self._end_exchange(len(found.ids))
        self._check_threshold(len(found.ids), clients, wanted)
        sums = wanted.plan.decode(found.total, len(found.ids))
        self.notes |= {"in_sum": found.ids.tolist(), "fixed_point_step": wanted.plan.step}
        self.notes |= {"clipped_values": int(sums["clipped"]), "bound": "does not act: replies are masked"}
        return sums

    def _to_ask(self) -> tuple[np.ndarray, int]:
        """The clients to ask, and how many that are with those that will not answer (dropout=)."""
        alive = self.ids[~np.isin(self.ids, list(self.lost))] if self.lost else self.ids
        last = self.round == self.rounds
        asked = self.guard.to_ask(alive, self._need, self.round, last) if self.guard else alive
        return asked, len(self.ids) - len(alive) + len(asked)

    @property
    def _need(self) -> int:
        return max(1, int(np.ceil(self.quorum * len(self.ids))))

    def _end_exchange(self, answered: int) -> None:
        self.exchange += 1
        self.notes["answered"] = answered
        if answered < self._need:
            why = f" ({self.guard.last})" if self.guard and self.guard.last else ""
            raise NoQuorum(
                f"round {self.round}: {answered} of {len(self.ids)} clients answered{why} and quorum={self.quorum:g} needs "
                f"{self._need}; bring clients back and `fedvlm resume` the run, or lower quorum="
            )

    def _check_threshold(self, present: int, clients: int, wanted: Summation) -> None:
        if present < wanted.threshold:
            raise NoQuorum(
                f"round {self.round}: {present} of {clients} clients can be in a sum, and secure=true needs "
                f"{wanted.threshold} (threshold=); bring clients back and `fedvlm resume` the run"
            )

    def ask(self, step: str, message: Message) -> Reply:
        """All replies at once, ordered by client id; a client that failed is absent."""
        replies = list(self._replies(step, message))
        ids = np.concatenate([r.ids for r in replies]) if replies else np.empty(0, np.int64)
        order = np.argsort(ids)
        at = torch.from_numpy(order)

        def joined(parts: list[Params]) -> Params:
            return {k: torch.cat([p[k] for p in parts])[at] for k in (parts[0] if parts else {})}

        reply = Reply(ids[order], joined([r.values for r in replies]), joined([r.shared for r in replies]))
        self._observe(step, reply, self.observers)
        return reply

    def ask_some(self, ids: np.ndarray, step: str, message: Message) -> Reply:
        """Ask these clients only, otherwise like `ask`; the bytes count for this cohort."""
        part = replace(self, ids=ids, notes={})
        try:
            return part.ask(step, message)
        finally:
            self.bytes_down, self.bytes_up = part.bytes_down, part.bytes_up
