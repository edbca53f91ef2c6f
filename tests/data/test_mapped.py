"""Partitions without Python lists, and tables in mapped files: the same numbers as before, whatever the size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import numbered

from fedvlm.config.config import Config
from fedvlm.core.seeds import numpy_generator
from fedvlm.data import mapped, partition
from fedvlm.data.clients import federate
from fedvlm.data.columns import NumberedItems, Words
from fedvlm.data.formats.embeddings import open_embeddings, write_embeddings
from fedvlm.data.pool import embedding_pool
from fedvlm.data.source import NO_DOMAIN, Item


def few_shot_by_loop(labels, owner, part, shots, seed):
    """As earlier versions computed it."""
    keep, count = np.ones(len(labels), bool), dict[tuple[int, int], int]()
    for i in numpy_generator(seed, 13).permutation(len(labels)):
        if part[i] == 0:
            cell = (int(owner[i]), int(labels[i]))
            count[cell] = count.get(cell, 0) + 1
            keep[i] = count[cell] <= shots
    return keep


def assigned_by_class(labels, part, shares, seed):
    """As earlier versions computed it."""
    owner, start = np.zeros(len(labels), np.int64), np.zeros(3, np.int64)
    for label in range(shares.shape[0]):
        for piece in range(3):
            members = np.flatnonzero((labels == label) & (part == piece))
            members = numpy_generator(seed, 23, label, piece).permutation(members)
            rotated = np.roll(shares[label], -start[piece])
            counts = np.roll(partition.apportion(len(members), rotated), start[piece])
            owner[members] = np.repeat(np.arange(shares.shape[1]), counts)
            start[piece] = (start[piece] + len(members)) % shares.shape[1]
    return owner


@pytest.mark.parametrize("seed", range(4))
def test_partitions_are_as_they_were(seed):
    draw = np.random.default_rng(seed)
    labels, part = draw.integers([1, 5, 300, 2][seed], size=211), draw.integers(3, size=211)
    part[labels == 0] = 0  # cells without a member
    shares = draw.random((labels.max() + 1, 7))
    owner = partition._assign(labels, part, shares, seed)
    assert np.array_equal(owner, assigned_by_class(labels, part, shares, seed))
    for shots in (1, 3):
        found = partition.few_shot(labels, owner, part, shots, seed)
        assert np.array_equal(found, few_shot_by_loop(labels, owner, part, shots, seed))
    part[:3] = 0, 1, 2  # all three are given, so that none is drawn
    given = [("train", "val", "test")[k] for k in part]
    assert np.array_equal(partition.given_split(given, ["a"] * 211, ["b"] * 211, [""] * 211, seed, (6, 2, 2)), part)


@pytest.mark.parametrize("largest", [0, 9, 1 << 16, 1 << 40, 1 << 61])
def test_a_stable_order_is_that_of_argsort(largest):
    cells = np.random.default_rng(0).integers(0, largest + 1, size=50) // 7 * 7
    assert np.array_equal(partition.stable_order(cells), np.argsort(cells, kind="stable"))
    repeated = np.tile(cells, 3)
    assert np.array_equal(partition.stable_order(repeated), np.argsort(repeated, kind="stable"))
    assert len(partition.stable_order(cells[:0])) == 0


def test_no_training_items_are_no_shots():
    part = np.full(3, 2)
    assert partition.few_shot(np.arange(3), np.zeros(3, np.int64), part, 1, 0).all()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Every table is large, and a block has a few rows."""
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(mapped, "LARGE", 1)
    monkeypatch.setattr(mapped, "BLOCK", 40)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float16])
def test_a_mapped_table_has_the_same_numbers(small, dtype):
    x = (100 * torch.rand(23, 2, 3)).to(dtype)
    rows = np.random.default_rng(0).permutation(23)[:19]
    found = mapped.gathered(x, rows)
    assert torch.equal(found, x[torch.from_numpy(rows)]) and found.dtype == dtype and found.is_contiguous()
    assert torch.equal(mapped.mapped_rows(x, lambda part: part + 1), x + 1)
    assert mapped.gathered(x, rows[:0]).shape == (0, 2, 3)
    assert list((small / "cache" / "mapped").iterdir()) == []  # no name, or gone with the tensor


def test_a_place_that_cannot_be_written_is_named(small):
    (small / "cache").write_text("a file")
    with pytest.raises(mapped.files.FedvlmError, match=r"mapped cannot be written .* set FEDVLM_CACHE"):
        mapped.gathered(torch.ones(3, 20), np.arange(3))


def test_a_federation_of_mapped_embeddings_is_that_of_small_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "cache"))
    draw = np.random.default_rng(1)
    x, y = torch.from_numpy(draw.normal(size=(90, 5)).astype(np.float32)), draw.integers(3, size=90).tolist()
    write_embeddings(tmp_path / "e.safetensors", x, y, ["a", "b", "c"], text=torch.eye(5)[:3])

    def made():
        pool = embedding_pool(open_embeddings(tmp_path / "e.safetensors"))
        return pool, federate(pool, Config(partition="iid", clients=4), 3)

    pool, plain = made()
    monkeypatch.setattr(mapped, "LARGE", 1)
    monkeypatch.setattr(mapped, "BLOCK", 100)
    other, large = made()
    assert pool.fingerprint == other.fingerprint and torch.equal(pool.x, other.x)
    assert torch.equal(plain.data.x, large.data.x) and torch.equal(plain.data.y, large.data.y)
    assert np.array_equal(plain.data.bounds, large.data.bounds) and np.array_equal(plain.items, large.items)


def test_columns_of_one_word_take_no_memory():
    words = Words.coded(["same"], np.zeros(1000, np.int64))
    assert words.codes.strides == (0,) and words.only(np.arange(7)).codes.strides == (0,)
    assert list(words[2:5]) == ["same"] * 3
    items = NumberedItems(words, words, words)
    assert items.number is None and items[-1].path == "999" and items.only(np.array([5, 2]))[1].path == "2"


def test_splits_of_many_items_are_one_column():
    items = [Item(str(k), NO_DOMAIN, "ab"[k % 2], "", ("train", "test")[k % 3 == 0]) for k in range(30)]
    federation = federate(numbered(items), Config(partition="iid", clients=2, split=(100.0, 0.0, 0.0)), 0)
    tests = np.concatenate([federation.items[low:high] for _, _, low, high in federation.data.bounds])
    assert sorted(tests.tolist()) == list(range(0, 30, 3)) and not federation.data.counts("val").any()
