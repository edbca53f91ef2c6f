"""The server's side of the protocol: four exchanges, over whatever carries bytes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from fedvlm.errors import BadMessage, NoQuorum, VoidRound
from fedvlm.privacy.secure.client import MASK, OWN
from fedvlm.privacy.secure.keys import KeyPair, add_mask, commitment, derive
from fedvlm.privacy.secure.messages import (
    KEY,
    PUBLIC,
    SEALED,
    Integers,
    Parameters,
    pack_records,
    pack_sets,
    unpack_records,
)
from fedvlm.privacy.secure.shamir import SHARE, join_shares

# kind of question, and what each client is asked → answers as they arrive; clients that do not answer are absent
Ask = Callable[[str, dict[int, bytes]], Iterable[tuple[int, bytes]]]
Refuse = Callable[[int, str], None]  # is told which client's answer was refused, and why


class Total(NamedTuple):
    sum: Integers
    ids: tuple[int, ...]  # of the clients in it


def draw(ids: Iterable[int], threshold: int, planned: int, limit: float, model: bytes = bytes(32)) -> Parameters:
    """The public parameters of a round."""
    return Parameters(secrets.token_bytes(KEY), tuple(sorted(ids)), threshold, planned, limit, model)


def aggregate(
    parameters: Parameters, length: int, dtype: DTypeLike, ask: Ask, refuse: Refuse = lambda client, reason: None
) -> Total:
    """The sum of the clients' vectors modulo 2³² or 2⁶⁴, by dtype; an error where too few are left to open one."""
    return Server(parameters, length, np.dtype(dtype), ask, refuse).run()


class Server:
    def __init__(self, parameters: Parameters, length: int, dtype: np.dtype[Any], ask: Ask, refuse: Refuse):
        self.parameters, self.length, self.dtype = parameters, length, dtype
        self.ask, self.refuse, self.binding = ask, refuse, parameters.binding
        self.neighbours = {i: parameters.neighbours(i) for i in parameters.ids}

    def run(self) -> Total:
        keys = self.keys()
        commitments, sealed = self.shares(keys)
        total, present = self.masked(sealed)
        absent = frozenset(sealed) - present
        shares = self.unmask(present, absent)
        for i in sorted(present):
            secret = self.open(i, shares)
            if commitment(secret) != commitments[i]:
                raise VoidRound(f"the shares of client {i}'s own mask do not belong together; the round has no sum")
            add_mask(total, derive(secret, self.binding, OWN), subtract=True)
        for i in sorted(absent):
            if with_masks := self.neighbours[i] & present:
                self.remove_pairs(total, i, self.open(i, shares), keys, with_masks)
        return Total(total, tuple(sorted(present)))

    def keys(self) -> dict[int, bytes]:
        """Two public keys by client, of those with enough neighbours that sent theirs."""
        request, found, halves = self.parameters.pack(), dict[int, bytes](), set[bytes]()
        probe = KeyPair(secrets.token_bytes(KEY))
        for i, answer in self.answers("keys", dict.fromkeys(self.parameters.ids, request)):
            try:
                if len(answer) != PUBLIC:
                    raise BadMessage(f"public keys: {len(answer)} bytes, not {PUBLIC}")
                pair = {answer[:KEY], answer[KEY:]}
                if len(pair) < 2 or pair & halves:  # a client refuses such keys, so one liar would stop all others
                    raise BadMessage("public keys: two are the same")
                for half in pair:
                    probe.agree(half, b"", b"")
            except BadMessage as error:
                self.refuse(i, str(error))
            else:
                found[i] = answer
                halves |= pair
        return {i: found[i] for i in self.connected(found, "sent public keys")}

    def shares(self, keys: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, dict[int, bytes]]]:
        """Commitments to the own masks, and sealed shares by sender and receiver."""
        commitments, sealed = dict[int, bytes](), dict[int, dict[int, bytes]]()
        known = {i: self.neighbours[i] & keys.keys() for i in keys}
        requests = {i: pack_records({j: keys[j] for j in known[i]}) for i in keys}
        for i, answer in self.answers("shares", requests):
            try:
                boxes = unpack_records(answer[KEY:], SEALED, known[i], "sealed shares")
                if len(boxes) < len(known[i]):
                    raise BadMessage("sealed shares: some are missing")
                commitments[i], sealed[i] = answer[:KEY], boxes
            except BadMessage as error:
                self.refuse(i, str(error))
        return commitments, {i: sealed[i] for i in self.connected(sealed, "sent shares")}

    def masked(self, sealed: Mapping[int, Mapping[int, bytes]]) -> tuple[Integers, frozenset[int]]:
        """The sum of the masked vectors, and whose they are; added up as they arrive."""
        total: Integers = np.zeros(self.length, self.dtype)
        present, wire = set[int](), self.dtype.newbyteorder("<")
        requests = {i: pack_records({j: sealed[j][i] for j in self.neighbours[i] & sealed.keys()}) for i in sealed}
        for i, answer in self.answers("masked", requests):
            if len(answer) != total.nbytes:
                self.refuse(i, f"sent a masked vector of {len(answer)} bytes, not {total.nbytes}")
                continue
            total += np.frombuffer(answer, wire)
            present.add(i)
        self.check(len(present), "sent a masked vector")
        return total, frozenset(present)

    def unmask(self, present: frozenset[int], absent: frozenset[int]) -> dict[int, dict[int, bytes]]:
        """The shares of each client's own mask (of those present) or of its mask key (of those absent), by client and
        holder."""
        found: dict[int, dict[int, bytes]] = {i: {} for i in present | absent}
        request = pack_sets(self.parameters.ids, present, absent)
        for i, answer in self.answers("unmask", dict.fromkeys(sorted(present), request)):
            try:
                allowed = (self.neighbours[i] | {i}) & found.keys()
                for of, share in unpack_records(answer, SHARE, allowed, "shares").items():
                    found[of][i] = share
            except BadMessage as error:
                self.refuse(i, str(error))
        return found

    def open(self, client: int, shares: Mapping[int, Mapping[int, bytes]]) -> bytes:
        """The secret of a client whose shares were given."""
        found, need = shares[client], self.parameters.size.threshold
        if len(found) < need:
            raise NoQuorum(
                f"{len(found)} shares of client {client}'s masks came, and {need} are needed; the round has no sum. Bring "
                "clients back and `fedvlm resume` the run"
            )
        try:
            return join_shares({i: found[i] for i in sorted(found)[:need]})
        except ValueError as error:
            raise VoidRound(f"client {client}: {error}; the round has no sum") from error

    def remove_pairs(
        self, total: Integers, client: int, mask_key: bytes, keys: Mapping[int, bytes], others: Collection[int]
    ) -> None:
        """Removes the masks that others share with a client that dropped out."""
        pair = KeyPair(mask_key)
        if pair.public != keys[client][KEY:]:
            raise VoidRound(f"the shares of client {client}'s mask key do not belong together; the round has no sum")
        for i in sorted(others):
            shared = pair.agree(keys[i][KEY:], self.binding, MASK)
            add_mask(total, shared, subtract=i < client)  # what client i did the other way round

    def connected(self, clients: Collection[int], did: str) -> list[int]:
        """The clients with enough neighbours among themselves to open their secrets later."""
        self.check(len(clients), did)
        left, need = set(clients), self.parameters.size.threshold - 1
        while lonely := {i for i in left if len(self.neighbours[i] & left) < need}:
            left -= lonely
        self.check(len(left), f"{did} and have enough neighbours that did, too,")
        return sorted(left)

    def check(self, clients: int, did: str) -> None:
        if clients < self.parameters.threshold:
            raise NoQuorum(
                f"{clients} of {len(self.parameters.ids)} clients {did}, and a sum needs {self.parameters.threshold} "
                "(threshold=); bring clients back and `fedvlm resume` the run"
            )

    def answers(self, kind: str, questions: dict[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """The first answer of each client that was asked."""
        seen = set[int]()
        for i, answer in self.ask(kind, questions):
            if i in questions and i not in seen:
                seen.add(i)
                yield i, answer
