"""What crosses in the four exchanges, as bytes: fixed structs, all checked by the receiver. An exchange is a question of the
server and an answer of the client:

| kind | question | answer |
|---|---|---|
| keys | `Parameters` | two public keys: for sealing shares, for masks |
| shares | the neighbours' public keys | a commitment; for each neighbour sealed shares of the mask key and of the own mask |
| masked | the sealed shares for this client | the masked vector |
| unmask | who is in the sum, and who sent shares but is not | for each neighbour one share: own mask, or mask key |
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedvlm.errors import BadMessage
from fedvlm.privacy.secure import graph
from fedvlm.privacy.secure.shamir import SHARE

Integers = NDArray[np.unsignedinteger[Any]]  # of 32 or 64 bits

KINDS = ("keys", "shares", "masked", "unmask")
KEY = 32  # bytes of every key, private or public
TAG = 16  # bytes that sealing adds
PUBLIC, SEALED = 2 * KEY, 2 * SHARE + TAG  # bytes
HEAD = struct.Struct("<32s32sIIdI")  # of Parameters; the ids follow
MOST_CLIENTS = 1 << 20


class Parameters(NamedTuple):
    """What everybody knows of a round. Graph and thresholds follow from it, so the server cannot choose others; and all keys
    depend on it, so the masks of clients that were told different things do not cancel."""

    seed: bytes  # 32 bytes, drawn by the server for this round
    ids: tuple[int, ...]  # ascending
    threshold: int  # clients that must be in the sum
    planned: int  # clients that the fixed-point numbers leave room for
    limit: float  # each number of an update is clipped to ± this
    model: bytes = bytes(
        32
    )  # SHA-256 of what clients train on: not another model for each (settings.message_fingerprint)

    @property
    def binding(self) -> bytes:
        """The bytes that enter every key of the round."""
        return hashlib.sha256(self.pack()).digest()

    @property
    def size(self) -> graph.Size:
        return graph.graph_size(len(self.ids), self.threshold)

    def neighbours(self, client: int) -> frozenset[int]:
        return graph.neighbours(self.seed, self.ids, self.size.neighbours)[client]

    def pack(self) -> bytes:
        head = HEAD.pack(self.seed, self.model, self.threshold, self.planned, self.limit, len(self.ids))
        return head + np.array(self.ids, "<u4").tobytes()

    @classmethod
    def unpack(cls, data: bytes, smallest: int) -> Parameters:
        if len(data) < HEAD.size:
            raise BadMessage(f"a secure round begins with {HEAD.size} bytes, and {len(data)} came")
        seed, model, threshold, planned, limit, clients = HEAD.unpack(data[: HEAD.size])
        if clients > MOST_CLIENTS or len(data) != HEAD.size + 4 * clients:
            raise BadMessage(f"a secure round of {clients} clients came as {len(data)} bytes")
        ids = tuple(np.frombuffer(data, "<u4", offset=HEAD.size).tolist())
        if any(a >= b for a, b in pairwise(ids)):
            raise BadMessage("the clients of a secure round are not in ascending order")
        if not max(smallest, clients // 2 + 1) <= threshold <= clients <= planned <= MOST_CLIENTS:
            raise BadMessage(
                f"a sum of at least {threshold} of {clients} clients is asked for; it must have {smallest} or more, and "
                "more than half of them"
            )
        if not 0 < limit < np.inf:
            raise BadMessage(f"updates would be clipped to ±{limit:g}")
        return cls(seed, ids, threshold, planned, limit, model)


def pack_records(records: Mapping[int, bytes]) -> bytes:
    return b"".join(i.to_bytes(4, "little") + record for i, record in sorted(records.items()))


def unpack_records(data: bytes, size: int, allowed: Collection[int], what: str) -> dict[int, bytes]:
    """Records of this size by client; no client twice, and only those allowed."""
    if len(data) % (4 + size):
        raise BadMessage(f"{what}: {len(data)} bytes are not whole records of {4 + size}")
    found: dict[int, bytes] = {}
    for at in range(0, len(data), 4 + size):
        i = int.from_bytes(data[at : at + 4], "little")
        if i in found or i not in allowed:
            raise BadMessage(f"{what}: client {i} {'comes twice' if i in found else 'does not belong there'}")
        found[i] = data[at + 4 : at + 4 + size]
    return found


def pack_sets(ids: tuple[int, ...], *sets: Collection[int]) -> bytes:
    """Sets of clients, a bit for each of `ids`."""
    return b"".join(np.packbits([i in members for i in ids]).tobytes() for members in sets)


def unpack_sets(data: bytes, ids: tuple[int, ...]) -> tuple[frozenset[int], frozenset[int]]:
    size = -(-len(ids) // 8)
    if len(data) != 2 * size:
        raise BadMessage(f"who is in the sum came as {len(data)} bytes, not {2 * size}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8).reshape(2, size), axis=1)
    if bits[:, len(ids) :].any():
        raise BadMessage("the list of who is in the sum is longer than the list of clients")
    present, absent = (frozenset(np.array(ids)[row[: len(ids)] == 1].tolist()) for row in bits)
    return present, absent


def traffic(clients: int, threshold: int) -> tuple[int, int]:
    """Bytes down to and up from a client beside the masked vector, where nobody drops out."""
    k = graph.graph_size(clients, threshold).neighbours
    down = HEAD.size + 4 * clients + k * (4 + PUBLIC) + k * (4 + SEALED) + 2 * -(-clients // 8)
    up = PUBLIC + KEY + k * (4 + SEALED) + (k + 1) * (4 + SHARE)
    return down, up
