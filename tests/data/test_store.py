"""The feature store: rows are computed once and stay correct after crashes, with full disks and concurrent writers."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from colours import BatchDependent, Colours, expected, small_store, write_images
from PIL import Image
from torch import Tensor

from fedvlm.backbones.arithmetic import arithmetic
from fedvlm.backbones.base import ViewFormat
from fedvlm.data import encoding
from fedvlm.data.source import Source, digest, open_source
from fedvlm.data.store import (
    corrupted,
    data_fingerprint,
    features,
    listing,
    open_view,
    prune,
    text_embeddings,
)
from fedvlm.errors import FedvlmError


class Patched(Colours):
    """One with a second view."""

    def view_format(self, view: str) -> ViewFormat | None:
        return {"embedding": ViewFormat((4,)), "patches@7": ViewFormat((2, 3), "u1")}.get(view)

    def encode(self, images: Sequence[Image.Image], view: str) -> Tensor:
        return torch.arange(6, dtype=torch.uint8).view(1, 2, 3).repeat(len(images), 1, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    return small_store(tmp_path, monkeypatch)


@pytest.fixture
def source(tmp_path) -> Source:
    return open_source(str(write_images(tmp_path / "pets", 22)))


def segments(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.rows"))


def test_batches_and_segments_have_the_configured_size(source, cache):
    model = Colours()
    x, keys, skipped = features(source, model)
    assert model.batches == [4, 4, 4, 4, 4, 2]
    assert [len(p.read_bytes()) // (16 + 4 + 4 * 4) for p in segments(cache)] == [8, 8, 6]
    assert torch.equal(x, expected(source)) and x.dtype == torch.float32
    assert keys == [digest(data) for _, data in source.read()] and skipped == {}


def test_nothing_is_computed_twice(source):
    first, keys, _ = features(source, Colours())
    again = Colours()
    second, keys_again, _ = features(source, again)
    assert again.batches == []
    assert torch.equal(first, second) and keys == keys_again


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
@pytest.mark.parametrize("shared", ["", "1"])
def test_nobody_else_reads_features_unless_the_cache_is_shared(source, cache, monkeypatch, shared):
    monkeypatch.setenv("FEDVLM_CACHE_SHARED", shared)
    before = os.umask(0o022)
    try:
        features(source, Colours())
    finally:
        os.umask(before)
    modes = {p.stat().st_mode & 0o077 for path in segments(cache) for p in (path, path.parent)}
    assert modes == ({0o44, 0o55} if shared else {0})


def test_only_new_images_are_computed(source, tmp_path):
    features(source, Colours())
    more = Colours()
    wider = open_source(str(write_images(tmp_path / "pets", 25)))
    x, _, _ = features(wider, more)
    assert more.batches == [3]
    assert torch.equal(x, expected(wider))


def test_a_moved_or_renamed_file_is_the_same_image(source, tmp_path):
    features(source, Colours())
    (tmp_path / "pets" / "cat" / "001.png").rename(tmp_path / "pets" / "dog" / "zzz.png")
    model = Colours()
    moved = open_source(str(tmp_path / "pets"))
    x, _, _ = features(moved, model)
    assert model.batches == [] and torch.equal(x, expected(moved))


def test_backbones_and_views_are_stored_apart(source):
    features(source, Colours())
    other = Colours(fingerprint="fedcba9876543210")
    features(source, other)
    assert sum(other.batches) == 22
    assert len(list(listing())) == 2
    with pytest.raises(FedvlmError, match="gives no patches@7"):
        open_view(other, "patches@7")
    more = Patched(fingerprint=other.fingerprint)
    plain, grid = open_view(more), open_view(more, "patches@7")
    assert plain.folder != grid.folder and len(plain.index) == 22 and len(grid.index) == 0
    assert "@" not in grid.folder.name
    for _ in range(2):
        x, _, _ = features(source, more, view="patches@7")
        assert x.shape == (22, 2, 3) and x.dtype == torch.uint8 and x[5].flatten().tolist() == list(range(6))


def test_duplicates_are_encoded_once(tmp_path, source):
    """Within a batch, in a later batch and after a stored segment: 22 files and 12 copies."""
    for i in (0, 1, 2, 3, 9, 20):
        data = (tmp_path / "pets" / ("cat" if i % 2 else "dog") / f"{i:03d}.png").read_bytes()
        (tmp_path / "pets" / "cat" / f"{i:03d}-copy.png").write_bytes(data)
        (tmp_path / "pets" / "dog" / f"zz-{i:03d}.png").write_bytes(data)
    copied = open_source(str(tmp_path / "pets"))
    model = Colours()
    x, keys, _ = features(copied, model)
    assert len(copied.items) == 34 and sum(model.batches) == 22 == len(set(keys))
    assert torch.equal(x, expected(copied))


@pytest.mark.parametrize("field", ["key", "check", "row"])
def test_a_flipped_bit_costs_one_image(source, cache, field):
    features(source, Colours())
    segment = segments(cache)[1]
    data = bytearray(segment.read_bytes())
    data[36 * 3 + {"key": 5, "check": 17, "row": 22}[field]] ^= 0x10
    segment.write_bytes(data)
    model = Colours()
    x, _, _ = features(source, model)
    assert model.batches == [1]
    assert torch.equal(x, expected(source))
    rebuilt = Colours()
    assert torch.equal(features(source, rebuilt)[0], x) and rebuilt.batches == []


@pytest.mark.parametrize("left", [0, 1, 36 * 3 + 1, 36 * 8 - 1])
def test_a_truncated_segment_is_rebuilt(source, cache, left):
    features(source, Colours())
    segment = segments(cache)[0]
    segment.write_bytes(segment.read_bytes()[:left])
    model = Colours()
    x, _, _ = features(source, model)
    assert sum(model.batches) == 8 and torch.equal(x, expected(source))
    assert not segment.exists()
    rebuilt = Colours()
    assert torch.equal(features(source, rebuilt)[0], x) and rebuilt.batches == []


def test_a_segment_truncated_between_rows_keeps_the_others(source, cache):
    features(source, Colours())
    segment = segments(cache)[0]
    segment.write_bytes(segment.read_bytes()[: 36 * 5])
    model = Colours()
    assert torch.equal(features(source, model)[0], expected(source))
    assert sum(model.batches) == 3


def test_temporary_files_are_never_read_and_old_ones_are_pruned(source, cache):
    features(source, Colours())
    segment = segments(cache)[0]
    part = segment.with_name("00000000000000000001-dead.part")
    part.write_bytes(segment.read_bytes()[:50])
    segment.unlink()
    model = Colours()
    assert torch.equal(features(source, model)[0], expected(source))
    assert sum(model.batches) == 8
    assert prune(older_than_days=1) == [] and part.exists()  # another process may be writing it
    os.utime(part, (time.time() - 7200,) * 2)
    assert prune(older_than_days=1) == [] and not part.exists()
    assert len(segments(cache)) == 3


def test_a_cache_path_that_is_a_file_is_an_error(source, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "taken"))
    with pytest.raises(FedvlmError, match=r"cannot be written.*FEDVLM_CACHE"):
        features(source, Colours())


def write_concurrently(folder: str, barrier) -> None:
    """Run in a process of its own: writes many small segments, starting at the same time as the other process."""
    encoding.BATCH, encoding.SEGMENT_ROWS = 2, 3
    source = open_source(folder)
    barrier.wait(60)
    x, _, _ = features(source, Colours())
    assert torch.equal(x, expected(source))
    assert torch.equal(text_embeddings(Colours(), ["a cat", "a dog"]), Colours().texts(["a cat", "a dog"]))


def test_two_processes_may_write_at_once(tmp_path, cache):
    folder = write_images(tmp_path / "pets", 60)
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(2)
    writers = [spawn.Process(target=write_concurrently, args=(str(folder), barrier)) for _ in range(2)]
    for w in writers:
        w.start()
    for w in writers:
        w.join(90)
    assert [w.exitcode for w in writers] == [0, 0]
    source, model = open_source(str(folder)), Colours()
    x, keys, _ = features(source, model)
    assert model.batches == [] and torch.equal(x, expected(source))
    assert text_embeddings(model, ["a cat", "a dog"]) is not None and model.phrases == []
    view = open_view(model)
    assert set(view.index) == set(keys) and view.broken == 0
    assert not list(cache.rglob("*.part"))


def test_text_is_encoded_once(cache):
    model = Colours()
    first = text_embeddings(model, ["a cat", "a dog"])
    assert torch.equal(text_embeddings(model, ["a cat", "a dog"]), first)
    assert torch.equal(text_embeddings(model, ["a dog", "a cat"]), first.flip(0))
    assert torch.equal(text_embeddings(model, ["a dog"]), first[1:])
    assert model.phrases == [["a cat", "a dog"]]
    assert text_embeddings(model, ["a dog", "a cow"]).shape == (2, 4) and len(model.phrases) == 2
    data = bytearray(segments(cache)[0].read_bytes())
    data[-3] ^= 1
    segments(cache)[0].write_bytes(data)
    assert torch.equal(text_embeddings(model, ["a cat", "a dog"]), first)


def test_text_and_images_have_their_own_folders(source):
    model = Colours()
    features(source, model)
    text_embeddings(model, ["a cat", "a dog"])
    names = [f"colours-0123456789ab-{view}-{arithmetic().mark}" for view in ("embedding", "text")]
    assert sorted(e["view"] for e in listing()) == names
    assert len(open_view(model).index) == 22 and len(open_view(model, "text").index) == 2


def test_what_another_machine_computes_has_no_mark_of_this_one():
    class Service(Colours):
        elsewhere = True

    assert open_view(Service()).folder.name == "colours-0123456789ab-embedding"


def test_every_image_has_noise_of_its_own():
    grey = Image.new("RGB", (16, 16), (99, 99, 99))
    keys = [digest(data) for data in (b"one", b"two", b"one")]
    one, two, again = (corrupted(key, ("gaussian_noise", 3))[1](grey).tobytes() for key in keys)
    assert one != two and one == again


def test_without_a_text_tower_nothing_is_stored(cache):
    model = Colours(has_text=False)
    assert text_embeddings(model, ["a cat", "a dog"]) is None
    assert segments(cache) == []


def test_listing_and_pruning(source, cache):
    assert list(listing()) == [] and prune() == []
    for weights in ("a" * 16, "b" * 16, "c" * 16):
        features(source, Colours(fingerprint=weights))
    held = {e["view"]: e for e in listing()}
    assert [(e["segments"], e["bytes"]) for e in held.values()] == [(3, 22 * 36)] * 3
    assert all(abs(e["used"] - time.time()) < 60 for e in held.values())
    a, b, c = sorted(held)
    for path in (cache / b).iterdir():
        os.utime(path, (time.time() - 10 * 86400,) * 2)
    assert prune(older_than_days=30) == []
    assert prune(older_than_days=7) == [b]
    assert prune(names=[c]) == [c]
    assert [e["view"] for e in listing()] == [a]
    (cache / ".DS_Store").write_text("written by a file manager")
    assert prune() == [a] and list(listing()) == []
    model = Colours(fingerprint="a" * 16)
    assert torch.equal(features(source, model)[0], expected(source)) and sum(model.batches) == 22


def test_progress_counts_every_image(source):
    calls: list[tuple[int, int]] = []
    features(source, Colours(), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(k + 1, 22) for k in range(22)]


def test_a_fingerprint_changes_with_contents_labels_and_order():
    one, two = digest(b"1"), digest(b"2")
    fingerprints = [
        data_fingerprint([one, two], ["a/x", "a/y"]),
        data_fingerprint([two, one], ["a/x", "a/y"]),
        data_fingerprint([one, two], ["a/y", "a/x"]),
        data_fingerprint([one, two], ["a/x", "a/x"]),
        data_fingerprint([one], ["a/x"]),
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert data_fingerprint([one, two], ["a/x", "a/y"]) == fingerprints[0]


def test_the_row_stored_first_is_used(tmp_path):
    """Neither encoding more rows nor a second copy from another process may change a stored row."""
    model = BatchDependent()
    before = text_embeddings(model, ["a dog", "a cat"])
    wider = text_embeddings(model, ["a dog", "a bird", "a cat"])
    assert torch.equal(before, wider[[0, 2]]) and model.phrases == [["a dog", "a cat"], ["a bird"]]
    assert torch.equal(text_embeddings(BatchDependent(), ["a dog", "a cat"]), before)
    source = open_source(str(write_images(tmp_path / "pets", 6)))
    first = features(source, model)[0]
    view = open_view(model)
    view.put([digest(data) for _, data in source.read()], first.numpy() + 1e-5)  # another process, later
    assert torch.equal(features(source, BatchDependent())[0], first)


def test_a_damaged_row_is_replaced_by_a_later_copy(tmp_path):
    source, model = open_source(str(write_images(tmp_path / "pets", 6))), Colours()
    first = features(source, model)[0]
    (segment,) = open_view(model).folder.glob("*.rows")
    data = bytearray(segment.read_bytes())
    data[30] ^= 255
    segment.write_bytes(data)
    assert torch.equal(features(source, model)[0], first) and model.batches[-1] == 1  # rebuilt once
    count = len(model.batches)
    assert torch.equal(features(source, model)[0], first) and len(model.batches) == count  # and found again
