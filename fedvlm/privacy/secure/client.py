"""A client's side of the protocol."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from fedvlm.errors import BadMessage
from fedvlm.privacy.secure.graph import SMALLEST
from fedvlm.privacy.secure.keys import KeyPair, add_mask, commitment, derive, seal, unseal
from fedvlm.privacy.secure.messages import (
    KEY,
    KINDS,
    PUBLIC,
    SEALED,
    Integers,
    Parameters,
    pack_records,
    unpack_records,
    unpack_sets,
)
from fedvlm.privacy.secure.shamir import SHARE, split_secret

MASK, SHARES, OWN = b"fedvlm secure mask", b"fedvlm secure shares", b"fedvlm secure own mask"


class Client:
    """One client in one round. It answers each kind of question once and in order; a question that it refuses (BadMessage)
    is its last. All its keys are of this round only, and leave it only as shares."""

    parameters: Parameters  # known once it was asked for keys

    def __init__(self, client: int, smallest: int = SMALLEST):
        """`smallest`: clients that must be in a sum, as this client's own rule."""
        self.id, self.smallest = client, max(smallest, SMALLEST)
        self.expected = list(KINDS)

    def answer(self, kind: str, payload: bytes, vector: Callable[[], Integers] | None = None) -> bytes:
        """`vector` is called when the masked vector is asked for; the kind of integers decides the modulus."""
        following = self.expected[:1]
        remaining, self.expected = self.expected[1:], []
        if [kind] != following:
            raise BadMessage(f"was asked for {kind[:20]}, and {(following or ['nothing more'])[0]} comes next")
        if kind == "masked":
            if vector is None:
                raise ValueError("the masked vector needs the client's own")
            reply = self.masked(payload, vector)
        else:
            reply = {"keys": self.keys, "shares": self.shares, "unmask": self.unmask}[kind](payload)
        self.expected = remaining
        return reply

    def keys(self, payload: bytes) -> bytes:
        self.parameters = Parameters.unpack(payload, self.smallest)
        if self.id not in self.parameters.ids:
            raise BadMessage("was asked to take part in a secure round of others")
        self.neighbours, self.binding = self.parameters.neighbours(self.id), self.parameters.binding
        self.threshold = self.parameters.size.threshold
        self.sealer, self.masker = (KeyPair(secrets.token_bytes(KEY)) for _ in range(2))
        self.own_mask = secrets.token_bytes(KEY)
        return self.sealer.public + self.masker.public

    def shares(self, payload: bytes) -> bytes:
        found = unpack_records(payload, PUBLIC, self.neighbours, "public keys")
        self.enough(len(found), "public keys")
        halves = [key for both in found.values() for key in (both[:KEY], both[KEY:])]
        if len({self.sealer.public, self.masker.public, *halves}) < 2 + len(halves):
            raise BadMessage("public keys: two are the same")
        self.sealing = {i: self.sealer.agree(keys[:KEY], self.binding, SHARES) for i, keys in found.items()}
        self.pairs = {i: self.masker.agree(keys[KEY:], self.binding, MASK) for i, keys in found.items()}
        holders = [*found, self.id]
        of_key, of_own = (
            split_secret(secret, self.threshold, holders) for secret in (self.masker.private, self.own_mask)
        )
        self.held = {self.id: of_key[self.id] + of_own[self.id]}
        sealed = {
            i: seal(key, self.id, self.context(self.id, i), of_key[i] + of_own[i]) for i, key in self.sealing.items()
        }
        return commitment(self.own_mask) + pack_records(sealed)

    def masked(self, payload: bytes, vector: Callable[[], Integers]) -> bytes:
        sealed = unpack_records(payload, SEALED, self.pairs, "sealed shares")
        self.enough(len(sealed), "sealed shares")
        self.others = frozenset(sealed)
        for i, box in sealed.items():
            content = unseal(self.sealing[i], i, self.context(i, self.id), box)
            if content is not None:  # else the others may hold enough shares
                self.held[i] = content
        total = vector().copy()
        add_mask(total, derive(self.own_mask, self.binding, OWN))
        for i in sealed:
            add_mask(total, self.pairs[i], subtract=i < self.id)
        return total.astype(total.dtype.newbyteorder("<"), copy=False).tobytes()

    def unmask(self, payload: bytes) -> bytes:
        present, absent = unpack_sets(payload, self.parameters.ids)
        if both := present & absent:
            raise BadMessage(f"was asked for both secrets of client {min(both)}, which would open what it sent")
        if self.id not in present:
            raise BadMessage("was told that it is not in the sum, and it has sent its vector")
        if len(present) < self.parameters.threshold:
            raise BadMessage(f"was asked to open a sum of {len(present)}, and {self.parameters.threshold} were agreed")
        if wrong := (present & self.neighbours) - self.others - {self.id}:
            raise BadMessage(f"was told that client {min(wrong)} is in the sum, and got no shares of it")
        of_own = {i: held[SHARE:] for i, held in self.held.items() if i in present}
        of_key = {i: held[:SHARE] for i, held in self.held.items() if i in absent}
        return pack_records(of_own | of_key)

    def enough(self, others: int, what: str) -> None:
        if others + 1 < self.threshold:
            raise BadMessage(f"{what} of {others} neighbours came, and {self.threshold - 1} are needed")

    def context(self, sender: int, receiver: int) -> bytes:
        return self.binding + sender.to_bytes(4, "little") + receiver.to_bytes(4, "little")
