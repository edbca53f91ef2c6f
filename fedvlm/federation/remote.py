"""Engines whose clients are elsewhere and answer in bytes: what they have in common.

An engine of this kind says how a frame reaches clients and how theirs come back (`exchange`). Reading replies, telling the
guard of those that fail, and writing down what came from whom (received.jsonl, the server's side of the ledger) is here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from enum import StrEnum

import numpy as np
import torch

from fedvlm.core.schema import Schema
from fedvlm.core.state import Message, Params, Reply
from fedvlm.engines.base import Engine, Job
from fedvlm.errors import BadMessage, FedvlmError
from fedvlm.federation import ledger
from fedvlm.federation.wire import OVERHEAD, SECURE, Header, longest_reply, octets, pack, pack_message, to_reply, unpack
from fedvlm.privacy.secure.settings import Summation, Summed, message_fingerprint
from fedvlm.rounds.steps import STEPS
from fedvlm.system.names import printable

SHARES = 256  # bytes of secure aggregation's smaller answers, for each client of the round


class Silence(StrEnum):
    """Why there is no reply."""

    DIED = "its process ended twice"
    LATE = "no answer in time"
    GONE = "it is not there"
    RESTS = "it failed too often"


class Remote(Engine):
    def __init__(self, job: Job):
        if job.federation.pooled:
            raise FedvlmError("partition=pooled has no clients that could be apart; use engine=serial")
        if job.federation.task.novel is not None:
            raise FedvlmError(
                "protocol=base-to-novel scores every model on everybody's test images, which are kept apart here; use "
                "engine=stacked"
            )
        config = job.setup.config
        self.names, self.guard, self.run_name = job.federation.names, job.guard, job.run
        self.timeout, self.grace, self.quorum = config.timeout, config.grace, config.quorum
        self.tickets = 0
        self.agreement = job.run  # what all clients must have been told the same of
        self.received = ledger.Ledger(job.folder / ledger.RECEIVED, sync=False)

    @abstractmethod
    def exchange(self, frames: dict[int, bytes], limits: dict[int, int]) -> dict[int, bytes | Silence]:
        """Sends each client its frame; what they answer, of at most so many bytes each, in the order of the frames. Once a
        quorum has answered, the others have `grace` seconds left."""

    def where(self, client: int) -> str:
        """The place that says more about a client that failed."""
        return ""

    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
        header = self.header(step, round, exchange)
        limits = self.limits(step, ids, message)
        for i, answer in self.exchange(dict.fromkeys(limits, pack_message(message, header)), limits).items():
            if (parts := self.read(i, answer, header)) is not None:
                try:
                    yield to_reply(i, parts)
                except BadMessage as error:
                    self.guard.offence(i, round, str(error))

    def sums(self, ids: np.ndarray, message: Message, round: int, exchange: int, wanted: Summation) -> Summed:
        """Add up by secure aggregation: only masked vectors cross, and the server opens their sum."""
        from fedvlm.privacy.secure import server  # needs `cryptography`

        def ask(kind: str, payloads: dict[int, bytes]) -> Iterator[tuple[int, bytes]]:
            header = self.header(SECURE + kind, round, exchange)
            parts = message.parts() if kind == "masked" else {}
            header = header._replace(stage=message.stage)
            frames = {i: pack(header, parts | {SECURE: {"payload": octets(p)}}) for i, p in sorted(payloads.items())}
            most = OVERHEAD + (wanted.plan.nbytes if kind == "masked" else SHARES * len(ids))
            for i, answer in self.exchange(frames, dict.fromkeys(frames, most)).items():
                found = self.read(i, answer, header)
                payload = found.get(SECURE, {}).get("payload") if found else None
                if payload is not None and payload.dtype == torch.uint8:
                    yield i, payload.numpy().tobytes()
                elif found is not None:
                    self.guard.offence(i, round, f"sent no answer to {header.step}")

        told = message_fingerprint(message, self.agreement, SECURE, round, exchange)
        parameters = server.draw([int(i) for i in ids], wanted.threshold, wanted.plan.clients, wanted.limit, told)
        total = server.aggregate(
            parameters,
            wanted.plan.length,
            wanted.plan.dtype,
            ask,
            lambda client, reason: self.guard.offence(client, round, reason),
        )
        return Summed(total.sum, np.array(total.ids))

    def header(self, step: str, round: int, exchange: int) -> Header:
        """The header of the next request; each has a ticket, so that late answers to earlier ones are recognised."""
        self.tickets += 1
        return Header(step, round, exchange, self.tickets)

    def read(self, client: int, answer: bytes | Silence, asked: Header) -> dict[str, Params] | None:
        """What a client answered; None where that is nothing, and the guard knows why."""
        if answer is Silence.RESTS:  # which was said when it began
            return None
        if isinstance(answer, Silence):
            self.guard.failed(client, asked.round, f"{answer}{self.where(client)}", answer is not Silence.DIED)
            return None
        try:
            header, parts = unpack(answer)
            self.note(client, answer, header, asked)
            if header.error:
                self.failed(client, asked, header.error)
                return None
            if header.ticket != asked.ticket:
                raise BadMessage("sent an answer to another request")
            return parts
        except BadMessage as error:
            self.guard.offence(client, asked.round, str(error))
            return None

    def failed(self, client: int, asked: Header, error: str) -> None:
        """A client could not do what it was asked for."""
        self.guard.failed(client, asked.round, error)

    def note(self, client: int, answer: bytes, header: Header, asked: Header) -> None:
        """Writes down what came."""
        line = ledger.Sent(
            self.run_name,
            self.names[client],
            asked.step,
            asked.round,
            asked.exchange,
            direction="received",
            refused=printable(header.error),
            site_head=ledger.LedgerHead.parse(header.ledger),
            clipped=header.clipped,
            noised=header.noised,
            masked=header.masked,
        )
        self.received.append(ledger.line_of(answer, line))

    def limits(self, step: str, ids: np.ndarray, message: Message) -> dict[int, int]:
        """Bytes that each client's reply may have."""
        schema = self.guard.schema(step) if step in STEPS else Schema({})
        examples = self.guard.declared[:, 0]
        return {int(i): longest_reply(schema, message.shared, int(examples[i])) for i in np.sort(ids)}
