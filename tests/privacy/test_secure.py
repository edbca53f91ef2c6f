"""Secure aggregation: the primitives against published vectors, sums with dropouts to the integer, what a curious or an
active server finds, and runs against the plain mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import ABLE, build, close, example, same, small_setup, train_small
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography")

from fedvlm.config.config import resolve
from fedvlm.core.cohort import Cohort
from fedvlm.core.state import Message, State
from fedvlm.data.pool import Pools
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import BadMessage, FedvlmError, NoQuorum, VoidRound
from fedvlm.federation import ledger, wire, worker
from fedvlm.parts import registry
from fedvlm.parts.merge.mean import Mean
from fedvlm.privacy.secure import graph, keys, shamir
from fedvlm.privacy.secure.client import Client
from fedvlm.privacy.secure.fixed import SumPlan
from fedvlm.privacy.secure.messages import HEAD, KINDS, Parameters, pack_records, pack_sets, traffic, unpack_records
from fedvlm.privacy.secure.server import Total, aggregate, draw
from fedvlm.privacy.secure.settings import Secure, Summation, Summed, message_fingerprint
from fedvlm.privacy.secure.sums import FINE, Summand, needs_replies, sums_only
from fedvlm.rounds.method import Method, name_of
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.train import train

LENGTH = 50
Vectors = dict[int, np.ndarray]
Change = Callable[[int, str, bytes], bytes | None]


def vectors(clients: int, dtype: type = np.uint64, length: int = LENGTH, seed: int = 0) -> Vectors:
    """Integers over the whole range, of clients whose ids are not 0, 1, 2, …"""
    rng, top = np.random.default_rng(seed), np.iinfo(dtype).max
    return {5 * i + 2: rng.integers(0, top, length, dtype, endpoint=True) for i in range(clients)}


def threshold(clients: int) -> int:
    return max(3, -(-6 * clients // 10))


class Network:
    """Carries questions to clients in this process; `lost[kind]` are the clients that do not answer it."""

    def __init__(self, given: Vectors, lost: dict[str, set[int]] | None = None, change: Change = lambda i, k, b: b):
        self.given, self.lost, self.change = given, lost or {}, change
        self.clients = {i: Client(i) for i in given}
        self.uploads: dict[int, bytes] = {}
        self.refused: dict[int, str] = {}

    def ask(self, kind: str, questions: dict[int, bytes]) -> Iterator[tuple[int, bytes]]:
        for i, question in questions.items():
            if i in self.lost.get(kind, ()):
                continue
            try:
                answer = self.change(i, kind, self.clients[i].answer(kind, question, partial(self.given.get, i)))
            except BadMessage:
                continue
            if kind == "masked" and answer is not None:
                self.uploads[i] = answer
            if answer is not None:
                yield i, answer

    def run(self, parameters: Parameters | None = None) -> Total:
        first = next(iter(self.given.values()))
        chosen = parameters or draw(self.given, threshold(len(self.given)), len(self.given), 1.0)
        return aggregate(chosen, len(first), first.dtype, self.ask, self.refused.__setitem__)


def check_sum(total: Total, given: Vectors) -> None:
    expected = np.zeros_like(total.sum)
    for i in total.ids:
        expected += given[i]
    assert total.sum.dtype == expected.dtype and (total.sum == expected).all()


# Primitives


def test_the_field_has_a_prime_number_of_elements():
    p = shamir.PRIME
    odd, twos = p - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 60):  # Miller and Rabin
        x = pow(base, odd, p)
        assert x in (1, p - 1) or any((x := x * x % p) == p - 1 for _ in range(twos - 1))


def interpolated(points: dict[int, int]) -> int:
    """f(0) by Gaussian elimination on the Vandermonde system."""
    p = shamir.PRIME
    rows = [[pow(i + 1, power, p) for power in range(len(points))] + [y] for i, y in points.items()]
    for at in range(len(rows)):
        pivot = next(r for r in range(at, len(rows)) if rows[r][at])
        rows[at], rows[pivot] = rows[pivot], rows[at]
        inverse = pow(rows[at][at], p - 2, p)
        rows[at] = [v * inverse % p for v in rows[at]]
        for r in range(len(rows)):
            if r != at:
                rows[r] = [(a - rows[r][at] * b) % p for a, b in zip(rows[r], rows[at], strict=True)]
    return rows[0][-1]


@settings(max_examples=20, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.data())
def test_shares_give_the_secret_as_brute_force_interpolation_does(secret, need, data):
    holders = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=need, max_size=8, unique=True))
    shares = shamir.split_secret(secret, need, holders)
    some = {i: shares[i] for i in data.draw(st.permutations(holders))[:need]}
    assert shamir.join_shares(some) == secret
    brute = interpolated({i: int.from_bytes(share, "little") for i, share in some.items()})
    assert brute == int.from_bytes(secret, "little")


def test_fewer_shares_fit_every_secret():
    """Two of three shares: for any secret there is a third share that makes it."""
    shares = shamir.split_secret(bytes(range(32)), 3, [4, 9, 11])
    weights = shamir.lagrange((4, 9, 11))
    for wanted in (bytes(32), bytes([255] * 32), b"x" * 32):
        known = sum(weights[i] * int.from_bytes(shares[i], "little") for i in (4, 9))
        third = (int.from_bytes(wanted, "little") - known) * pow(weights[11], -1, shamir.PRIME) % shamir.PRIME
        assert shamir.join_shares({4: shares[4], 9: shares[9], 11: third.to_bytes(33, "little")}) == wanted


def test_key_agreement_and_derivation_follow_the_rfcs():
    """RFC 7748, section 6.1; RFC 5869, test case 1 (its first 32 bytes)."""
    alice = keys.KeyPair(bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"))
    bob = keys.KeyPair(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"))
    assert alice.public.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert bob.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    shared = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert alice.agree(bob.public, b"seed", b"use") == bob.agree(alice.public, b"seed", b"use")
    assert alice.agree(bob.public, b"seed", b"use") == keys.derive(shared, b"seed", b"use")
    found = keys.derive(bytes([11] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert found.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_masks_are_the_chacha20_stream_and_cancel(dtype):
    """RFC 8439, appendix A.1, test vector 1."""
    vector = np.zeros(64 // np.dtype(dtype).itemsize, dtype)
    keys.add_mask(vector, bytes(32))
    assert vector.tobytes().hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    long = np.arange(keys.BLOCK // 2 + 3, dtype=dtype)  # several blocks, and a part of one
    masked = long.copy()
    keys.add_mask(masked, b"k" * 32)
    stream = masked - long
    assert len(np.unique(stream)) > 0.99 * len(stream)  # the blocks differ
    keys.add_mask(masked, b"k" * 32, subtract=True)
    assert (masked == long).all()


def test_a_key_of_small_order_is_refused():
    with pytest.raises(BadMessage, match="not a key"):
        keys.KeyPair(b"a" * 32).agree(bytes(32), b"seed", b"use")


def test_the_rule_for_neighbours():
    """Complete for few; for many the union bounds of graph.py, computed here from the definition."""
    assert graph.graph_size(10, 6) == graph.Size(9, 6)
    k, t = graph.graph_size(1000, 600)
    assert (k, t) == (98, 54) and 2 * t > k + 1
    assert 1000 * graph.tail(999, 200, k, t) <= 2**-40 and 1000 * 0.4 ** (k / 2) <= 2**-40
    assert 1000 * graph.tail(999, 200, k, k - t + 1) <= 2**-20
    assert sum(graph.tail(20, 6, 5, i) for i in range(1, 6)) == Fraction(5 * 6, 20)  # the mean of a hypergeometric


def test_the_graph_is_regular_symmetric_and_drawn_by_the_seed():
    ids = tuple(range(3, 203))
    near = graph.neighbours(b"s" * 32, ids, 74)
    assert all(len(n) == 74 and i not in n for i, n in near.items())
    assert all(i in near[j] for i, n in near.items() for j in n)
    assert near != graph.neighbours(b"t" * 32, ids, 74)


# Sums


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("kind", ["", *KINDS])
def test_sums_are_right_with_dropouts_in_every_exchange(kind, dtype):
    network = Network(given := vectors(8, dtype), {kind: {2, 12, 37}})
    total = network.run()
    gone = set() if kind in ("", "unmask") else {2, 12, 37}  # who sent its vector is in the sum
    assert set(total.ids) == given.keys() - gone and not network.refused
    check_sum(total, given)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["", "", "", *KINDS]), min_size=3, max_size=9))
def test_any_pattern_of_dropouts_gives_the_sum_or_none(fates):
    given = vectors(len(fates), length=5)
    lost = {kind: {i for i, fate in zip(given, fates, strict=True) if fate == kind} for kind in KINDS}
    for before, after in pairwise(KINDS):
        lost[after] |= lost[before]
    need = threshold(len(fates))
    if len(fates) - len(lost["unmask"]) >= need:
        total = Network(given, lost).run()
        assert set(total.ids) == given.keys() - lost["masked"]
        check_sum(total, given)
    else:
        with pytest.raises(NoQuorum):
            Network(given, lost).run()


def test_sums_of_many_clients_need_few_neighbours():
    given = vectors(100, length=20)
    ids = list(given)
    lost = {kind: set(ids[4 * at : 4 * at + 4]) for at, kind in enumerate(KINDS)}
    network = Network(given, lost)
    total = network.run()
    assert set(total.ids) == set(ids[12:]) and len(network.clients[ids[50]].pairs) < 80
    check_sum(total, given)


@pytest.mark.parametrize("kind", KINDS)
def test_below_the_threshold_there_is_no_sum(kind):
    """Of five clients three must be in the sum and three must help to open it."""
    given = vectors(5)
    check_sum(Network(given, {kind: {2, 7}}).run(), given)
    with pytest.raises(NoQuorum, match=r"(2 of 5 clients .* needs 3|2 shares .* 3 are needed)"):
        Network(given, {kind: {2, 7, 12}}).run()


def test_the_bytes_are_those_that_are_counted():
    down, up = 0, 0

    class Counting(Network):
        def ask(self, kind, questions):
            nonlocal down, up
            for i, answer in super().ask(kind, questions):
                down, up = down + len(questions[i]), up + len(answer)
                yield i, answer

    Counting(given := vectors(6)).run()
    per_down, per_up = traffic(6, threshold(6))
    assert (down, up) == (6 * per_down, 6 * (per_up + given[2].nbytes))


# What the server learns


def looks_random(data: bytes) -> bool:
    """Chi-square of the bytes' frequencies, 255 degrees of freedom: beyond 6 standard deviations by chance once in 10⁹."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = len(data) / 256
    chi = float(((counts - expected) ** 2 / expected).sum())
    return abs(chi - 255) < 6 * (2 * 255) ** 0.5


def ramp(length: int = 1 << 14) -> np.ndarray:
    """As far from random as can be: small numbers in order."""
    return np.arange(length, dtype=np.uint64)


def test_a_single_upload_looks_random_whatever_was_sent():
    given = {i: ramp() if i % 2 else np.zeros(1 << 14, np.uint64) for i in range(4)}
    assert not looks_random(ramp().tobytes())
    network = Network(given)
    check_sum(network.run(), given)
    for data in network.uploads.values():
        assert looks_random(data)
        words = np.frombuffer(data, np.uint64)
        assert abs(np.corrcoef(words.astype(float), ramp().astype(float))[0, 1]) < 6 / len(words) ** 0.5
    again = Network(given)
    again.run()
    apart = [np.frombuffer(n.uploads[1], np.uint64) for n in (network, again)]
    assert looks_random((apart[0] - apart[1]).tobytes())  # other keys in every round


def test_two_inputs_under_the_same_keys_cannot_be_told_apart_by_one_upload():
    """And both uploads together would give the difference away: so the client answers once."""
    client, uploads = Client(0), []
    others = [Client(i) for i in (1, 2)]
    parameters = draw(range(3), 3, 3, 1.0).pack()
    public = {c.id: c.answer("keys", parameters) for c in (client, *others)}
    shares = {
        c.id: c.answer("shares", pack_records({i: k for i, k in public.items() if i != c.id}))
        for c in (client, *others)
    }
    boxes = pack_records({c.id: unpack_records(shares[c.id][32:], 82, {0, 1, 2}, "")[0] for c in others})
    for vector in (ramp(), 7 * ramp()):
        client.expected = ["masked"]  # made to answer twice
        uploads.append(client.answer("masked", boxes, lambda vector=vector: vector))
    assert all(looks_random(u) for u in uploads)
    one, other = (np.frombuffer(u, np.uint64) for u in uploads)
    assert (other - one == 6 * ramp()).all()
    with pytest.raises(BadMessage, match="nothing more"):
        client.answer("masked", boxes, ramp)


def test_all_but_one_secret_open_nothing():
    """The server holds every upload, and every client's own mask but one's: what is left still looks random. And with the
    last one it is the sum."""
    network = Network(given := {i: ramp() for i in range(4)})
    total = network.run()
    left = sum(np.frombuffer(u, np.uint64) for u in network.uploads.values())
    for client in network.clients.values():
        assert looks_random(left.tobytes())
        keys.add_mask(left, keys.derive(client.own_mask, client.binding, b"fedvlm secure own mask"), True)
    assert (left == total.sum).all() and not looks_random(left.tobytes())
    one, last = network.clients[0], np.frombuffer(network.uploads[0], np.uint64).copy()
    keys.add_mask(last, keys.derive(one.own_mask, one.binding, b"fedvlm secure own mask"), True)
    for i in (1, 2, 3):  # its own mask and its neighbours' do not help without the last
        assert looks_random(last.tobytes())
        keys.add_mask(last, one.pairs[i], subtract=True)
    assert (last == given[0]).all()


# What clients refuse


def at_unmask(clients: int = 5) -> Network:
    """Everybody has sent its masked vector, and was asked nothing more."""
    network = Network(vectors(clients), {"unmask": set(vectors(clients))})
    with pytest.raises(NoQuorum):
        network.run()
    return network


@pytest.mark.parametrize(
    ("present", "absent", "words"),
    [
        ({2, 7, 12, 17, 22}, {7}, "both secrets of client 7"),
        ({7, 12, 17, 22}, {2}, "not in the sum"),
        ({2, 7}, {12, 17, 22}, "a sum of 2, and 3"),
        ({2}, set(), "a sum of 1, and 3"),
    ],
)
def test_a_client_gives_no_shares_that_would_open_single_vectors(present, absent, words):
    client = at_unmask().clients[2]
    with pytest.raises(BadMessage, match=words):
        client.answer("unmask", pack_sets(client.parameters.ids, present, absent))
    with pytest.raises(BadMessage, match="nothing more"):  # nor afterwards, for an honest question
        client.answer("unmask", pack_sets(client.parameters.ids, {2, 7, 12}, {17, 22}))


def test_a_client_answers_once_and_in_order():
    client = at_unmask().clients[2]
    question = pack_sets(client.parameters.ids, {2, 7, 12}, {17, 22})
    assert client.answer("unmask", question)
    with pytest.raises(BadMessage, match="was asked for unmask, and nothing more comes next"):
        client.answer("unmask", pack_sets(client.parameters.ids, {2, 17, 22}, {7, 12}))
    with pytest.raises(BadMessage, match="was asked for masked, and keys comes next"):
        Client(2).answer("masked", b"")


def test_no_two_answers_of_honest_clients_open_both_secrets():
    """Five clients told different stories about client 7, as an active server may: three shares are needed of each of its
    secrets, and there are five holders."""
    network = at_unmask()
    ids = network.clients[2].parameters.ids
    stories = {2: ({2, 7, 12}, {17, 22}), 7: ({2, 7, 12}, {17}), 12: ({2, 7, 12}, set())}
    stories |= {17: ({12, 17, 22}, {7}), 22: ({2, 17, 22}, {7})}
    found = {"own": 0, "key": 0}
    for i, (present, absent) in stories.items():
        answer = network.clients[i].answer("unmask", pack_sets(ids, present, absent))
        if 7 in unpack_records(answer, 33, ids, ""):
            found["own" if 7 in present else "key"] += 1
    assert min(found.values()) < 3 <= max(found.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threshold": 2}, "3 or more"),
        ({"threshold": 5, "ids": tuple(range(10)), "planned": 10}, "more than half"),
        ({"threshold": 6}, "3 or more"),
        ({"ids": (1, 2, 3, 3, 4)}, "ascending"),
        ({"ids": (0, 2, 3, 4, 5)}, "of others"),
        ({"planned": 4}, "3 or more"),
        ({"limit": float("nan")}, "clipped to ±nan"),
    ],
)
def test_parameters_that_would_open_more_than_a_sum_are_refused(changes, words):
    honest = draw(range(5), 3, 5, 1.0)
    assert Client(1).answer("keys", honest.pack())
    with pytest.raises(BadMessage, match=words):
        Client(1).answer("keys", honest._replace(**changes).pack())


@pytest.mark.parametrize("changes", [{"model": b"m" * 32}, {"threshold": 4}, {"limit": 2.0}, {"seed": b"s" * 32}])
def test_a_client_that_was_told_something_else_is_in_no_sum_with_the_others(changes):
    """All keys depend on the parameters: what it sends does not cancel, so that its vector stays hidden."""

    class Different(Network):
        def ask(self, kind, questions):
            if kind == "keys":
                questions = questions | {7: draw_again.pack()}
            yield from super().ask(kind, questions)

    parameters = draw(vectors(5), 3, 5, 1.0)
    draw_again = parameters._replace(**changes)
    network = Different(vectors(5))
    with pytest.raises(VoidRound):
        network.run(parameters)
    assert all(set(c.held) == set(network.given) - {7} for i, c in network.clients.items() if i != 7)


def test_the_fingerprint_is_of_everything_that_is_sent():
    message = Message({"w": torch.ones(2)}, stage="one", reference={"w": torch.zeros(1)})
    others = [
        replace(message, stage="two"),
        replace(message, shared={"v": torch.ones(2)}),
        replace(message, reference={}),
    ]
    others += [replace(message, shared={"w": torch.ones(1, 2)}), replace(message, shared={"w": torch.ones(2).half()})]
    assert message_fingerprint(message) == message_fingerprint(replace(message, shared={"w": torch.ones(2)}))
    assert len({message_fingerprint(m) for m in (message, *others)}) == 6


def test_a_site_may_ask_for_more_than_three():
    with pytest.raises(BadMessage, match="it must have 4 or more"):
        Client(1, smallest=4).answer("keys", draw(range(5), 3, 5, 1.0).pack())


@pytest.mark.parametrize("kind", ["few", "twice", "own", "stranger"])
def test_public_keys_are_checked(kind):
    clients = [Client(i) for i in range(4)]
    parameters = draw(range(4), 3, 4, 1.0).pack()
    public = {c.id: c.answer("keys", parameters) for c in clients}
    mine = public.pop(0)
    if kind == "few":
        public = {1: public[1]}
    elif kind == "twice":
        public[2] = public[1]
    elif kind == "own":
        public[1] = mine
    else:
        public[9] = public.pop(1)
    words = {"few": "1 neighbours came, and 2", "stranger": "client 9 does not belong"}.get(kind, "two are the same")
    with pytest.raises(BadMessage, match=words):
        clients[0].answer("shares", pack_records(public))


# Messages that are not what was agreed


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.binary(max_size=400))
def test_a_client_refuses_any_other_bytes(kind, data):
    client = Client(0)
    others = [Client(1), Client(2)]
    parameters = draw(range(3), 3, 3, 1.0).pack()
    for step in KINDS[: KINDS.index(kind)]:
        if step == "keys":
            public = {c.id: c.answer(step, parameters) for c in (client, *others)}
        elif step == "shares":
            sealed = [
                c.answer(step, pack_records({i: k for i, k in public.items() if i != c.id})) for c in (client, *others)
            ]
        else:
            boxes = {i: unpack_records(sealed[i][32:], 82, {0, 1, 2}, "")[0] for i in (1, 2)}
            client.answer(step, pack_records(boxes), lambda: np.zeros(2, np.uint64))
    with pytest.raises(BadMessage):
        client.answer(kind, data, lambda: np.zeros(2, np.uint64))
    with pytest.raises(BadMessage):
        client.answer(kind, data, lambda: np.zeros(2, np.uint64))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.one_of(st.binary(max_size=600), st.integers(0, 2000)))
def test_a_client_that_answers_nonsense_never_makes_a_wrong_sum(kind, junk):
    """Bytes, or the answer with one bit changed: the sum of those in it is right, or there is none. (With the wrong mask
    key or masked vector a client in the sum changes it, as it can by its own vector: see the next test.)"""

    def change(i: int, step: str, answer: bytes) -> bytes:
        if (i, step) != (7, kind):
            return answer
        if isinstance(junk, bytes):
            return junk
        changed = bytearray(answer)
        changed[junk % len(answer)] ^= 1 << junk % 8
        return bytes(changed)

    network = Network(given := vectors(6), change=change)
    try:
        total = network.run()
    except VoidRound:
        assert kind != "masked"
    else:
        if 7 not in total.ids or kind not in ("keys", "masked"):
            check_sum(total, given)


def test_a_sum_that_is_not_one_is_noticed():
    """A client whose masks do not cancel: with the weights' range in 64 bits, once in 2⁴⁰ by chance."""
    plan = SumPlan.of(Mean().ranges(None, {"w": torch.zeros(4)}, 64.0), 5)
    values = {"weight": torch.ones(1), "loss": torch.ones(1), "update/w": torch.ones(1, 4)}
    network = Network(
        dict.fromkeys(vectors(5), plan.encode(values)[0]),
        change=lambda i, kind, answer: (
            answer[:32] + keys.KeyPair(b"k" * 32).public if (i, kind) == (7, "keys") else answer
        ),
    )
    with pytest.raises(VoidRound, match="is beyond what they can have sent"):
        plan.decode(network.run().sum, 5)


@pytest.mark.parametrize("key", [bytes(32), b""])
def test_one_client_with_a_bad_key_does_not_stop_the_others(key):
    """A key of small order, or a copy of another client's."""
    known: list[bytes] = []

    def change(i: int, kind: str, answer: bytes) -> bytes:
        known.append(answer)
        return answer[:32] + (key or known[0][32:]) if (i, kind) == (7, "keys") else answer

    network = Network(given := vectors(5), change=change)
    total = network.run()
    assert set(total.ids) == given.keys() - {7} and "public keys" in network.refused[7]
    check_sum(total, given)


def test_shares_that_do_not_belong_together_are_noticed():
    def forge(i: int, kind: str, answer: bytes) -> bytes:
        return answer[:4] + bytes(33) + answer[37:] if (i, kind) == (2, "unmask") else answer

    for lost in ({}, {"masked": {2 + 5 * 4}}):
        with pytest.raises(VoidRound, match="belong together"):
            Network(vectors(5), lost, forge).run()


def test_answers_of_others_and_second_answers_do_not_count():
    class Twice(Network):
        def ask(self, kind, questions):
            for i, answer in super().ask(kind, questions):
                yield i, answer
                yield i, answer
                yield 999, answer

    check_sum(Twice(given := vectors(4)).run(), given)


# Fixed point


def test_integers_are_exact_to_half_a_step_and_clipping_is_counted():
    plan = SumPlan.of({"w": Summand((3,), 1.0, weight="n"), "n": Summand((), 1000.0, 1.0)}, 10)
    values = {"w": torch.tensor([[0.1, -0.7, 5.0], [1 / 3, -2.0, 9.0]]), "n": torch.tensor([7.0, 2000.0])}
    rows = plan.encode(values)
    assert rows.shape == (2, plan.length) and plan.bits == 64
    sums = plan.decode(rows.sum(0, dtype=rows.dtype), 2)
    expected = 7 * torch.tensor([0.1, -0.7, 1.0]).double() + 1000 * torch.tensor([1 / 3, -1.0, 1.0]).double()
    assert float((sums["w"] - expected).abs().max()) <= plan.steps["w"] * 2 / 2
    assert sums["n"] == 1007 and sums["clipped"] == 4
    with pytest.raises(FedvlmError, match="not finite"):
        plan.encode(values | {"n": torch.tensor([torch.nan, 1.0])})


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3000), st.floats(0.001, 1e4), st.booleans(), st.integers(1, 2**20), st.sampled_from([FINE, 2.0**-10])
)
def test_the_largest_sum_never_wraps(clients, high, weighted, most, step):
    try:
        plan = SumPlan.of({"w": Summand((1,), high, step, "n" * weighted), "n": Summand((), float(most), 1.0)}, clients)
    except FedvlmError as error:
        assert "can add up to more than 64 bits" in str(error)
        return
    for sign in (1, -1):
        row = plan.encode(
            {"w": torch.full((1, 1), sign * high, dtype=torch.float64), "n": torch.tensor([float(most)])}
        )[0]
        sums = plan.decode(row * row.dtype.type(clients), clients)
        assert float(sums["w"]) == pytest.approx(
            sign * clients * high * (most if weighted else 1), rel=1e-12, abs=clients * step
        )
        assert sums["n"] == clients * most and plan.steps["w"] <= step


def test_32_bits_where_they_are_enough_else_64_else_an_error():
    def bits(clients: int, high: float) -> int:
        return SumPlan.of({"update": Summand((10,), high)}, clients).bits

    assert (bits(100, 1.0), bits(127, 1.0), bits(128, 1.0), bits(4, 64.0)) == (32, 32, 64, 64)
    with pytest.raises(FedvlmError, match=r"update of 1000000 clients, each up to 1e\+06, .* smaller secure_range="):
        bits(10**6, 1e6)


def test_a_sum_that_honest_clients_cannot_reach_is_noticed():
    plan = SumPlan.of({"update": Summand((2,), 1.0)}, 8)
    total = plan.encode({"update": torch.ones(3, 2)}).sum(0, dtype=plan.dtype)
    assert plan.decode(total, 3)["update"].tolist() == [3, 3]
    with pytest.raises(VoidRound, match="sum of update over 2 clients is beyond"):
        plan.decode(total, 2)


# Runs

SECURE = Secure(0.6, 64.0)


class Masked(Stacked):
    """The clients of a stacked engine behind the four exchanges, in bytes."""

    dropped: dict[str, set[int]] = {}

    def sums(self, ids: np.ndarray, message: Message, round: int, exchange: int, wanted: Summation) -> Summed:
        clients = {int(i): Client(int(i)) for i in ids}

        def vector(i: int) -> np.ndarray:
            assert clients[i].parameters.model == message_fingerprint(message)  # a real client refuses
            (reply,) = self.run("train", np.array([i]), message, round, exchange)
            return wanted.contributions(reply)[0]

        def ask(kind: str, questions: dict[int, bytes]) -> Iterator[tuple[int, bytes]]:
            for i, question in questions.items():
                if i not in self.dropped.get(kind, ()):
                    yield i, clients[i].answer(kind, question, partial(vector, i))

        parameters = draw(clients, wanted.threshold, wanted.plan.clients, wanted.limit, message_fingerprint(message))
        total = aggregate(parameters, wanted.plan.length, wanted.plan.dtype, ask)
        return Summed(total.sum, np.array(total.ids))


def played(
    method: Method, engine: Stacked, secure: Secure | None, lost: frozenset[int] = frozenset()
) -> tuple[State, Cohort]:
    state = method.init(len(engine.data))
    for round in (1, 2) if "head" in method.initial else (1,):
        cohort = Cohort(engine, ABLE, round, lost=lost, secure=secure)
        state = method.round(state, cohort)
    return state, cohort


METHODS = [
    ("head", "sgd", Mean()),
    ("head", "sgd", Mean(weights="uniform")),
    ("rotation", "prox", Mean()),
    ("outsiders", "sgd", registry.find("merge", "classwise")()),
    ("prompt", "sgd", registry.find("merge", "classwise")(weights="uniform")),
    ("attention", "ditto", registry.find("merge", "classwise")()),
    ("head", "sgd", registry.find("merge", "adaptive")(server_rule="momentum", server_lr=1.0)),
]


@pytest.mark.parametrize(("adapter", "local", "merge"), METHODS)
def test_secure_rounds_are_the_plain_rounds_within_the_step(double, adapter, local, merge):
    """For one round, to half a step; the same bits for clients one by one, side by side, and behind masks."""
    method, data = replace(build(adapter, local, name_of(merge)), merge=merge), example(adapter)[1]
    sent = method.init(len(data))
    one = method.round(sent, plain := Cohort(Stacked(method, data, 1), ABLE, 1))
    other = method.round(sent, masked := Cohort(Stacked(method, data, 1), ABLE, 1, secure=SECURE))
    step = float(masked.notes["fixed_point_step"])
    assert 0 < step <= FINE
    for k, v in one.shared.items():
        assert float((v - other.shared[k]).abs().max()) <= step / 2 + 1e-12
        assert float((v - sent.shared[k]).abs().max()) > 100 * step  # or it would say little
    assert masked.notes["loss"] == pytest.approx(plain.notes["loss"], abs=1e-3)
    lost = frozenset({int(ABLE[1])})
    serial, cohort = played(method, Stacked(method, data, 1), SECURE, lost)
    same(serial.shared, played(method, Masked(method, data, 1), SECURE, lost)[0].shared)
    close(serial.shared, played(method, Stacked(method, data, 6), SECURE, lost)[0].shared, tolerance=1e-8)
    assert cohort.notes["in_sum"] == [i for i in ABLE.tolist() if i not in lost] and cohort.notes["answered"] == 4


def test_clients_that_drop_out_behind_masks_are_not_in_the_sum(double):
    method, data = build("head", "sgd", "mean"), example("head")[1]
    engine = Masked(method, data, 1)
    engine.dropped = {"shares": {0}, "unmask": {2}}
    cohort = Cohort(engine, ABLE, 1, secure=SECURE)
    found = method.round(method.init(len(data)), cohort)
    without = Cohort(Stacked(method, data, 1), ABLE, 1, lost=frozenset({0}), secure=SECURE)
    same(found.shared, method.round(method.init(len(data)), without).shared)
    assert cohort.notes["in_sum"] == without.notes["in_sum"] == [1, 2, 3, 4]
    engine.dropped = {"masked": {0, 1, 2}}
    with pytest.raises(NoQuorum):
        method.round(method.init(len(data)), Cohort(engine, ABLE, 1, secure=SECURE))


def test_a_class_that_nobody_has_stays_as_it_was(double):
    method, data = build("head", "sgd", "classwise"), example("head")[1]
    data = replace(data, y=data.y.clamp(max=3))
    sent = method.init(len(data))
    found = method.round(sent, Cohort(Stacked(method, data, 1), ABLE, 1, secure=SECURE))
    assert torch.equal(found.shared["head"][4], sent.shared["head"][4])
    assert not torch.equal(found.shared["head"][3], sent.shared["head"][3])


def test_values_beyond_the_range_are_clipped_and_counted(double):
    method, data = build("head", "sgd", "mean"), example("head")[1]
    sent = method.init(len(data))
    cohort = Cohort(Stacked(method, data, 1), ABLE, 1, secure=Secure(0.6, 1e-3))
    found = method.round(sent, cohort)
    moved = max(float((found.shared[k] - v).abs().max()) for k, v in sent.shared.items())
    assert 0.9e-3 < moved <= 1e-3 + cohort.notes["fixed_point_step"] and cohort.notes["clipped_values"] > 0


def test_too_few_clients_are_not_even_asked(double):
    method, data = build("head", "sgd", "mean"), example("head")[1]
    for ids, lost in ((ABLE[:2], frozenset()), (ABLE, frozenset(ABLE[:3].tolist()))):
        with pytest.raises(NoQuorum, match=r"2 of \d clients can be in a sum, and secure=true needs 3"):
            method.round(method.init(len(data)), Cohort(None, ids, 1, lost=lost, secure=SECURE))


@pytest.mark.parametrize(
    "name", [n for n in registry.names("merge") if n not in ("mean", "classwise", "moments", "adaptive")]
)
def test_merges_that_look_at_single_replies_are_refused(name):
    assert needs_replies(registry.find("merge", name)()).startswith("works on the replies of single clients")


def test_a_subclass_says_for_itself_that_sums_are_enough():
    class Renamed(Mean):
        pass

    class Mine(Mean):
        def round(self, *args):
            return super().round(*args)

    class Marked(Mine):
        @sums_only
        def round(self, *args):
            return super().round(*args)

    assert needs_replies(Mean()) == needs_replies(Renamed()) == needs_replies(Marked()) == ""
    assert "single clients" in needs_replies(Mine()) and "cosine=true" in needs_replies(Mean(cosine=True))
    with pytest.raises(FedvlmError, match="replies of single clients"):
        list(Cohort(None, ABLE, 1, secure=SECURE).stream("train", Message({})))


@pytest.mark.parametrize(
    ("method", "keys_", "words"),
    [
        ("fft-gp", {}, "merge=faa works on the replies of single clients"),
        ("fedavg", {"merge": "krum"}, "merge=krum works on the replies"),
        ("fedavg", {"cosine": True}, "compares single clients with cosine=true"),
        ("fedavg", {"gaps": True}, "compares single clients with gaps=true"),
        ("fedavg", {"bound": 3}, "bound=3 needs the length of each update"),
        ("fedavg", {"clients": 2}, "a round asks 2 clients"),
        ("fedavg", {"participation": 0.5}, "a round asks 2 clients"),
        ("fedavg", {"secure_range": 1e12}, "more than 64 bits"),
        ("fedavg", {"threshold": 0.5}, "threshold"),
    ],
)
def test_runs_that_sums_cannot_serve_are_refused(images, tmp_path, method, keys_, words):
    layout = {"partition": "iid", "clients": 4, "unseen": "", "secure": True}
    with pytest.raises(FedvlmError, match=words):
        train_small(images, tmp_path / "run", method, **(layout | keys_))


def test_a_secure_run_is_the_plain_run_and_records_sums_only(images, tmp_path):
    layout = {"partition": "iid", "clients": 6, "unseen": "", "engine": "serial", "dropout": 0.1}
    run = train_small(images, tmp_path / "secure", "fedavg", secure=True, **layout)
    plain = train_small(images, tmp_path / "plain", "fedavg", bound=0, **layout)
    for one, other in zip(run.rounds(), plain.rounds(), strict=True):
        assert one["personal"] == pytest.approx(other["personal"], abs=1e-3)
        assert "weights" not in one and "void" not in one
        if one["round"]:
            assert len(one["in_sum"]) == one["answered"] == other["answered"] and set(one["in_sum"]) <= set(
                other["weights"]
            )
            assert one["clipped_values"] == 0 and 0 < one["fixed_point_step"] < FINE
            assert one["bound"].startswith("does not act") and one["loss"] == pytest.approx(other["loss"], rel=1e-4)
            assert one["bytes_up"] > other["bytes_up"]
    close(run.load()[0].shared, plain.load()[0].shared, tolerance=1e-5)
    assert small_setup(images, "fedavg").config.secure is False


def test_parameters_travel_as_they_are():
    parameters = draw([9, 2, 5], 3, 4, 0.5)
    data = parameters.pack()
    assert Parameters.unpack(data, 3) == parameters and len(data) == HEAD.size + 12


def test_clients_in_folders_give_the_sums_of_the_serial_engine_and_no_single_update(images, tmp_path, bytes_only):
    """Through engine=loopback: masked vectors in bytes, the same bits, and a second sum of a round is refused."""
    runs = {}
    for engine in ("serial", "loopback"):
        setup = resolve("fedavg", {"data": str(images), "rounds": 2, "secure": True, "engine": engine})
        runs[engine] = train(PlannedRun(setup, Pools().load(setup), tmp_path / engine))
    one, other = (run.load()[0].shared for run in runs.values())
    assert all(torch.equal(v, other[k]) for k, v in one.items())
    lines = list(ledger.entries(tmp_path / "loopback" / "clients" / "noto" / ledger.SENT))
    assert [e.masked for e in lines if e.step == "secure.masked"] == [True, True]
    assert not any(t.name.startswith("shared/") for e in lines for t in e.tensors)
    client = worker.SiteClient(tmp_path / "loopback" / "clients" / "noto")
    message = runs["loopback"].load()[0].message()
    payload = {wire.SECURE: {"payload": wire.octets(draw(range(3), 3, 3, 1.0).pack())}}
    for step, round, reason in (("train", 3, "own update"), ("secure.keys", 2, "sum of round 2 before")):
        frame = wire.pack(wire.Header(step, round), message.parts() | payload)
        assert reason in wire.unpack(client.answer(*wire.unpack(frame)))[0].error
