"""Many rows, examples and clients: the compact forms give what the plain ones give."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from colours import Colours, expected, mean_colour, small_store, write_images
from helpers import build, close, message, random_data, random_task
from PIL import Image

from fedvlm.backbones.base import ViewFormat
from fedvlm.core.client_names import MANY, compact, count_of, expanded, summarised
from fedvlm.core.data import Data, stretches
from fedvlm.core.seeds import numpy_generator
from fedvlm.data import ahead, store
from fedvlm.data.columns import NumberedItems, Words, column
from fedvlm.data.index import Index
from fedvlm.data.partition import apportion, split
from fedvlm.data.source import Item, digest, open_source
from fedvlm.data.store import View, data_fingerprint
from fedvlm.engines import stacked

# The feature store


def filled(folder: Path, count: int = 20) -> list[bytes]:
    keys = [digest(bytes([k])) for k in range(count)]
    View(folder, ViewFormat((3,))).put(keys, np.arange(3 * count, dtype=np.float32).reshape(-1, 3))
    return keys


def rows(view: View, keys: list[bytes]) -> list[list[float] | None]:
    return [None if (row := view.get(key)) is None else row.tolist() for key in keys]


@pytest.fixture
def apart(monkeypatch) -> None:
    monkeypatch.setattr(store, "KEYS_APART", 5)


def test_a_long_segment_is_opened_by_its_keys_alone(tmp_path, apart, monkeypatch):
    keys = filled(tmp_path / "view")
    (segment,) = (tmp_path / "view").glob("*.rows")
    assert segment.with_suffix(".keys").stat().st_size == 16 * len(keys) + 4
    opened = []
    inner = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(self.suffix) or inner(self, *a, **k))
    view = View(tmp_path / "view", ViewFormat((3,)))
    assert ".rows" not in opened and set(view.index) == set(keys)
    assert rows(view, keys) == [[3 * k, 3 * k + 1, 3 * k + 2] for k in range(20)]


@pytest.mark.parametrize("damage", ["none there", "cut off", "a bit", "of another length"])
def test_damaged_or_missing_keys_are_made_anew(tmp_path, apart, damage):
    """`none there` is a store of an earlier version."""
    keys = filled(tmp_path / "view")
    (kept,) = (tmp_path / "view").glob("*.keys")
    data = kept.read_bytes()
    wrong = {"cut off": data[:-20], "a bit": bytes([data[0] ^ 1]) + data[1:], "of another length": data + b"0" * 16}
    kept.unlink() if damage == "none there" else kept.write_bytes(wrong[damage])
    view = View(tmp_path / "view", ViewFormat((3,)))
    assert None not in rows(view, keys) and view.broken == 0
    assert kept.read_bytes() == data


def test_joined_segments_leave_no_keys_behind(tmp_path, apart, monkeypatch):
    monkeypatch.setattr(store, "MANY", 3)
    view = View(tmp_path / "view", ViewFormat((3,)))
    keys = [digest(bytes([k])) for k in range(60)]
    for first in range(0, 60, 6):
        view.put(keys[first : first + 6], np.full((6, 3), first, np.float32))
    assert {p.stem for p in view.folder.glob("*.keys")} == {p.stem for p in view.folder.glob("*.rows")}
    assert rows(View(view.folder, view.format), keys) == [[6 * (k // 6)] * 3 for k in range(60)]


def test_an_index_finds_what_a_dictionary_finds():
    """Keys whose first halves agree, several copies, and segments added one at a time."""
    draw = np.random.default_rng(0)
    known: dict[bytes, list[tuple[Path, int]]] = {}
    index = Index()
    for number in range(30):
        keys = [bytes([0] * 7 + [draw.integers(4)] + [0] * 7 + [draw.integers(9)]) for _ in range(draw.integers(1, 9))]
        index.add([(Path(str(number)), b"".join(keys))])
        for row, key in enumerate(keys):
            known.setdefault(key, []).append((Path(str(number)), row))
    assert set(index) == set(known) and len(index) == len(known) and bytes(16) in index and bytes([9] * 16) not in index
    for key, copies in known.items():
        for place in copies:
            assert index.oldest(key) == place
            index.drop_oldest(key)
        assert index.oldest(key) is None
    assert len(index.tables) <= 8


# Examples


def test_columns_are_the_items_fields():
    items = [Item(str(k), "ab"[k % 2], "xyz"[k % 3], "") for k in range(12)]
    table = NumberedItems(
        Words.coded(["b", "a", "none"], 1 - np.arange(12) % 2), Words.of(i.label for i in items), Words.of([""] * 12)
    )
    assert (
        list(table) == items
        and table[3:5][1] == items[4]
        and list(table.only(np.array([7, 2]))) == [items[7], items[2]]
    )
    for name in ("domain", "label", "group", "client"):
        assert list(column(table, name)) == list(column(items, name)) == [getattr(i, name) for i in items]
        assert column(table, name).names == column(items, name).names


def split_by_lists(labels: list[str], domains: list[str], seed: int, shares: list[float]) -> np.ndarray:
    """As earlier versions computed it."""
    parts, strata = np.zeros(len(labels), np.int64), dict[tuple[str, str], list[int]]()
    for i, stratum in enumerate(zip(domains, labels, strict=True)):
        strata.setdefault(stratum, []).append(i)
    for number, (_, members) in enumerate(sorted(strata.items())):
        counts = apportion(len(members), np.asarray(shares, float))
        if counts[0] == 0:
            counts[counts.argmax()] -= 1
            counts[0] = 1
        order = numpy_generator(seed, 11, number).permutation(len(members))
        for part, chosen in enumerate(np.split(order, np.cumsum(counts)[:-1])):
            for unit in chosen:
                parts[members[unit]] = part
    return parts


@pytest.mark.parametrize("seed", range(5))
def test_splits_are_as_they_were(seed):
    draw = np.random.default_rng(seed)
    labels = [["Zebra", "äpfel", "apple", "9"][k] for k in draw.integers(4, size=97)]
    domains = [["b", "a", "B"][k] for k in draw.integers(3, size=97)]
    shares = [[60, 20, 20], [0.1, 5, 5], [1, 0, 0]][seed % 3]
    found = split(labels, domains, [""] * 97, seed, shares)
    assert np.array_equal(found, split_by_lists(labels, domains, seed, shares))


def test_fingerprints_are_as_they_were(monkeypatch):
    monkeypatch.setattr(store, "LABELS", 3)
    for labels in ([], ["a/ü"], ['a/"b"', "c/d", "a/x", "c/d", "é/\u2028", "c/d", "a/x"]):
        assert data_fingerprint([b"k" * 16], labels) == digest(b"k" * 16 + json.dumps(labels).encode()).hex()[:16]


def test_stretches_and_class_counts():
    assert stretches(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    data = random_data(random_task())
    expected = [torch.bincount(data.y[low:high], minlength=5).tolist() for low, high, *_ in data.bounds]
    assert data.class_counts(5).tolist() == expected


# Clients


@pytest.mark.parametrize("parts", [("head", "sgd", "mean"), ("rotation", "sgd", "mean")])
def test_outputs_of_many_clients_are_those_of_each(parts, monkeypatch):
    method = build(*parts)
    data: Data = random_data(method.task)
    engine = stacked.Stacked(method, data, chunk=4)
    alone = engine.outputs(message(method), 1)
    monkeypatch.setattr(stacked, "ONE_BY_ONE", 0)
    together = engine.outputs(message(method), 1)
    close(alone, together, 1e-5)
    assert alone["row"].tolist() == together["row"].tolist() == sorted(alone["row"].tolist())
    assert alone["client"].tolist() == np.repeat(data.ids, data.counts("test")).tolist()


def test_names_of_many_clients_are_ranges():
    few = [f"client-{k}" for k in range(MANY)]
    assert compact(few) == few
    names = [f"site-{k:04d}" for k in range(1500) if k not in (7, 900)]
    names += ["berlin", "7", "8", "08", "09", "10", "9", "10", "site-"]
    short = compact(names)
    assert short[:3] == ["site-0000 … site-0006", "site-0008 … site-0899", "site-0901 … site-1499"]
    assert len(short) < 12 and expanded(short) == names and count_of(short) == len(names)


@pytest.mark.parametrize("name", ["a0 … a999999999", "a5 … a1", "a5 … b9", "a05 … a9", "a1 … a1", "…", "٣ … ٥"])
def test_what_is_no_range_stays_as_it_is(name):
    assert expanded([name]) == [name]


def test_a_clients_own_name_may_look_like_a_range():
    few = ["a1 … a3", "b"]
    assert compact(few) == few == expanded(few) and count_of(few) == 2
    many = [f"site-{k:04d}" for k in range(MANY + 5)] + few
    assert expanded(compact(many)) == many and count_of(compact(many)) == len(many)


def test_a_round_of_many_clients_is_summarised():
    names = [f"client-{k:05d}" for k in range(2000)]
    record = {"round": 3, "weights": dict.fromkeys(names, 0.0005), "missing": names[5:1900], "P": 0.5}
    short = summarised(record)
    assert short["summaries"] == {
        "weights": {"clients": 2000, "least": 0.0005, "median": 0.0005, "mean": pytest.approx(0.0005), "most": 0.0005}
    }
    assert short["missing"] == ["client-00005 … client-01899"] and short["P"] == 0.5 and "weights" not in short
    assert len(json.dumps(short)) < 300
    few = {"round": 1, "weights": {"a": 1.0}, "missing": ["b"]}
    assert summarised(few) == few


# Decoding ahead


class Preparing(Colours):
    """Prepares images apart from encoding them, and records in which threads."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    def prepare(self, image: Image.Image, view: str) -> torch.Tensor:
        self.threads.append(threading.current_thread().name)
        return mean_colour(image)

    def images(self, images):
        self.batches.append(len(images))
        return torch.stack(list(images))


def test_images_are_prepared_in_threads_and_encoded_in_the_same_batches(tmp_path, monkeypatch):
    small_store(tmp_path, monkeypatch)
    source, model = open_source(str(write_images(tmp_path / "pets", 22))), Preparing()
    assert torch.equal(store.features(source, model)[0], expected(source))
    assert model.batches == [4, 4, 4, 4, 4, 2] and len(model.threads) == 22
    assert sum(name.startswith("decode") for name in model.threads) == 21  # the first loads what the others need


def test_the_images_ahead_have_bounded_pixels(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead.images, "PIXELS", 20)  # three images of six pixels
    source = open_source(str(write_images(tmp_path / "pets", 9)))
    files = [ahead.Wanted(k, data, digest(data), False, None) for k, data in source.read()]
    begun: list[int] = []

    def make(data: bytes, transform: ahead.Transform | None, image: Image.Image | None) -> ahead.DecodedImage:
        begun.append(len(begun))
        return ahead.DecodedImage(Image.new("RGB", (3, 2)), 6)

    for taken, (file, image) in enumerate(ahead.read_ahead(files, make, 128, 1)):
        assert file is files[taken] and image().pixels == 6 and len(begun) <= taken + 4


def test_every_copy_of_a_broken_image_is_reported(tmp_path, monkeypatch):
    small_store(tmp_path, monkeypatch)
    folder = write_images(tmp_path / "pets", 6)
    for name in ("a.png", "b.png"):
        (folder / "cat" / name).write_bytes(b"no image")
        (folder / "dog" / name).write_bytes((folder / "cat" / "001.png").read_bytes()[:50])
    _, _, skipped = store.features(open_source(str(folder)), Colours())
    assert sorted(skipped) == ["cat/a.png", "cat/b.png", "dog/a.png", "dog/b.png"]
