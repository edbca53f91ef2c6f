"""Draws by hashing: uniform, independent of the other clients, and independent of global random states."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedvlm.core.data import Data
from fedvlm.core.seeds import generator, key, keys, numpy_generator, shuffled

seeds = st.integers(0, 2**63 - 1)


def pieces(flat: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(counts)[:-1])


def chi_square(found: np.ndarray) -> float:
    expected = found.sum() / found.size
    return float(((found - expected) ** 2 / expected).sum())


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), seeds)
@example([0, 0, 0], 0)
@example([0, 5, 0], 1)
@settings(deadline=None, max_examples=80)
def test_every_client_gets_a_permutation(counts, seed):
    counts = np.array(counts)
    flat = shuffled(keys(seed, clients=np.arange(len(counts))), counts)
    assert len(flat) == counts.sum()
    for part, count in zip(pieces(flat, counts), counts, strict=True):
        assert sorted(part.tolist()) == list(range(count))


@given(st.data(), seeds)
@settings(deadline=None, max_examples=80)
def test_an_order_does_not_depend_on_the_other_clients(data, seed):
    sizes = data.draw(st.dictionaries(st.integers(0, 10**6), st.integers(1, 12), min_size=2, max_size=10))
    ids = data.draw(st.permutations(sorted(sizes)))
    subset = data.draw(st.lists(st.sampled_from(ids), min_size=1, unique=True))

    def orders(clients: list[int]) -> dict[int, list[int]]:
        counts = np.array([sizes[c] for c in clients])
        flat = shuffled(keys(seed, 4, clients=np.array(clients)), counts)
        return {c: p.tolist() for c, p in zip(clients, pieces(flat, counts), strict=True)}

    all_orders, some = orders(list(ids)), orders(subset)
    assert some == {c: all_orders[c] for c in subset}


@given(st.lists(seeds, min_size=1, max_size=5), st.data())
@settings(deadline=None, max_examples=80)
def test_a_key_changes_with_every_part(parts, data):
    at = data.draw(st.integers(0, len(parts) - 1))
    other = [*parts]
    other[at] = data.draw(seeds.filter(lambda v: v != parts[at]))
    clients = np.arange(50)
    assert (keys(*parts, clients=clients) != keys(*other, clients=clients)).all()
    assert key(*parts) != key(*other)
    assert key(*parts) != key(*parts, 0)
    assert len(set(keys(*parts, clients=clients).tolist())) == 50


def test_the_order_of_parts_matters():
    assert key(1, 2) != key(2, 1)


def test_no_two_draws_of_a_long_run_share_a_key():
    found = [keys(s, r, e, clients=np.arange(200)) for s in (0, 1, 50) for r in range(100) for e in range(3)]
    assert len(np.unique(np.concatenate(found))) == 3 * 100 * 3 * 200


def test_every_order_of_four_is_equally_likely():
    clients = 24_000
    orders = shuffled(keys(5, clients=np.arange(clients)), np.full(clients, 4)).reshape(-1, 4)
    _, found = np.unique(orders, axis=0, return_counts=True)
    assert len(found) == 24
    assert 5 < chi_square(found) < 60  # 23 degrees of freedom; below 5 would be too uniform for random draws


@pytest.mark.parametrize("vary", ["client", "round", "seed"])
def test_every_example_is_equally_likely_at_every_position(vary):
    """Over many clients, rounds or seeds: 64 cells, 49 degrees of freedom."""
    draws, n = 4000, 8
    if vary == "client":
        found = keys(0, 0, clients=np.arange(draws))
    elif vary == "round":
        found = np.concatenate([keys(0, r, clients=np.array([3])) for r in range(draws)])
    else:
        found = np.concatenate([keys(s, 0, clients=np.array([3])) for s in range(draws)])
    orders = shuffled(found, np.full(draws, n)).reshape(draws, n)
    table = np.stack([np.bincount(orders[:, position], minlength=n) for position in range(n)])
    assert chi_square(table) < 100


def test_rounds_are_independent():
    draws, n = 4000, 6
    now, then = (shuffled(keys(9, r, clients=np.arange(draws)), np.full(draws, n)).reshape(draws, n) for r in (0, 1))
    table = np.zeros((n, n))
    np.add.at(table, (now[:, 0], then[:, 0]), 1)
    assert chi_square(table) < 80  # 35 degrees of freedom


def test_generators_depend_on_their_key_only():
    assert torch.equal(torch.randn(5, generator=generator(3, 1)), torch.randn(5, generator=generator(3, 1)))
    assert not torch.equal(torch.randn(5, generator=generator(3, 1)), torch.randn(5, generator=generator(3, 2)))
    assert numpy_generator(3, 1).random() == numpy_generator(3, 1).random() != numpy_generator(3, 2).random()


def test_batches_neither_change_nor_depend_on_global_states():
    bounds = np.array([[0, 9, 9, 9], [9, 13, 13, 13]])
    data = Data(torch.arange(13.0)[:, None], torch.arange(13), bounds, np.array([4, 7]), seed=2, round=3)

    def drawn(state: int) -> list[list[list[int]]]:
        random.seed(state), np.random.seed(state), torch.manual_seed(state)  # noqa: NPY002
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
        found = [b.y.tolist() for b in data.batches(4, epochs=2)]
        assert random.getstate() == before[0]
        assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
        assert torch.equal(torch.get_rng_state(), before[2])
        return found

    assert drawn(0) == drawn(1)


def test_every_round_has_its_own_order():
    bounds = np.array([[0, 20, 20, 20]])
    first, second = (Data(torch.zeros(20, 1), torch.arange(20), bounds, np.array([0]), seed=2, round=r) for r in (0, 1))
    order = [[y for b in d.batches(20) for y in b.y.flatten().tolist()] for d in (first, second)]
    assert order[0] != order[1]
    assert sorted(order[0]) == sorted(order[1]) == list(range(20))


def test_every_epoch_of_a_round_has_its_own_order():
    data = Data(torch.zeros(20, 1), torch.arange(20), np.array([[0, 20, 20, 20]]), np.array([0]), seed=2)
    first, second = (batch.y.flatten().tolist() for batch in data.batches(20, epochs=2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))
