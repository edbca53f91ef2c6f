"""The feature store: computed once, never wrong, and none the worse for crashes, full disks and company."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from fedvlm.backbones.base import Form
from fedvlm.core import FedvlmError
from fedvlm.data import store
from fedvlm.data.source import Source, decode, digest, open_source
from fedvlm.data.store import class_names, features, fingerprint, listing, open_view, prune


class Colours:
    """A frozen model on one line, the mean colour; it counts what it is asked."""

    scale = 10.0
    black_box = False

    def __init__(self, fingerprint: str = "0123456789abcdef", name: str = "hub/colours", speaks: bool = True):
        self.name, self.fingerprint, self.dim, self.speaks = name, fingerprint, 4, speaks
        self.seen: list[int] = []
        self.read: list[list[str]] = []

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        self.seen.append(len(images))
        return torch.stack([seen(image) for image in images])

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        self.read.append(list(phrases))
        rows = torch.tensor([[*digest(p.encode())[:4]] for p in phrases], dtype=torch.float32)
        return F.normalize(rows + 1, dim=1) if self.speaks else None


class Patched(Colours):
    """One with more to show than embeddings."""

    def form(self, view: str) -> Form | None:
        return {"embedding": Form((4,)), "patches@7": Form((2, 3), "u1")}.get(view)

    def encode(self, images: Sequence[Image.Image], view: str) -> Tensor:
        return torch.arange(6, dtype=torch.uint8).view(1, 2, 3).repeat(len(images), 1, 1)


class Moody(Colours):
    """Its last bits depend on what else is in the batch, as a real encoder's do."""

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        return super().images(images) + 1e-6 * len(images)

    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        found = super().texts(phrases)
        return None if found is None else found + 1e-6 * len(phrases)


def seen(image: Image.Image) -> Tensor:
    return F.normalize(torch.tensor([*np.asarray(image, dtype=np.float32).mean((0, 1)), 9.0]), dim=0)


def paint(root: Path, count: int) -> Path:
    """`count` images of different colours, in two classes."""
    for i in range(count):
        path = root / ("cat" if i % 2 else "dog") / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (3, 2), (7 * i % 256, 90, i)).save(path)
    return root


def truth(source: Source) -> Tensor:
    return torch.stack([seen(decode(data)) for _, data in source.read()])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "BATCH", 4)
    monkeypatch.setattr(store, "SEGMENT", 8)
    return tmp_path / "cache" / "features"


@pytest.fixture
def source(tmp_path) -> Source:
    return open_source(str(paint(tmp_path / "pets", 22)))


def segments(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.rows"))


def test_batches_and_segments_are_as_large_as_said_and_nothing_is_lost(source, cache):
    model = Colours()
    x, keys, skipped = features(source, model)
    assert model.seen == [4, 4, 4, 4, 4, 2]
    assert [len(p.read_bytes()) // (16 + 4 + 4 * 4) for p in segments(cache)] == [8, 8, 6]
    assert torch.equal(x, truth(source)) and x.dtype == torch.float32
    assert keys == [digest(data) for _, data in source.read()] and skipped == {}


def test_the_second_time_nothing_is_computed(source):
    first, keys, _ = features(source, Colours())
    again = Colours()
    second, keys_again, _ = features(source, again)
    assert again.seen == []
    assert torch.equal(first, second) and keys == keys_again


def test_only_what_is_new_is_computed(source, tmp_path):
    features(source, Colours())
    more = Colours()
    wider = open_source(str(paint(tmp_path / "pets", 25)))
    x, _, _ = features(wider, more)
    assert more.seen == [3]
    assert torch.equal(x, truth(wider))


def test_a_moved_or_renamed_file_is_the_same_image(source, tmp_path):
    features(source, Colours())
    (tmp_path / "pets" / "cat" / "001.png").rename(tmp_path / "pets" / "dog" / "zzz.png")
    model = Colours()
    moved = open_source(str(tmp_path / "pets"))
    x, _, _ = features(moved, model)
    assert model.seen == [] and torch.equal(x, truth(moved))


def test_other_weights_or_another_view_never_mix(source):
    features(source, Colours())
    other = Colours(fingerprint="fedcba9876543210")
    features(source, other)
    assert sum(other.seen) == 22
    assert len(list(listing())) == 2
    with pytest.raises(FedvlmError, match="gives no patches@7"):
        open_view(other, "patches@7")
    more = Patched(fingerprint=other.fingerprint)
    plain, grid = open_view(more), open_view(more, "patches@7")
    assert plain.folder != grid.folder and len(plain.index) == 22 and len(grid.index) == 0
    assert "@" not in grid.folder.name
    for _ in range(2):
        x, _, _ = features(source, more, seen="patches@7")
        assert x.shape == (22, 2, 3) and x.dtype == torch.uint8 and x[5].flatten().tolist() == list(range(6))


def test_twins_are_encoded_once_wherever_they_lie(tmp_path, source):
    """Within a batch, beyond it, beyond a written segment: 22 files, 12 pictures more that are copies."""
    for i in (0, 1, 2, 3, 9, 20):
        picture = (tmp_path / "pets" / ("cat" if i % 2 else "dog") / f"{i:03d}.png").read_bytes()
        (tmp_path / "pets" / "cat" / f"{i:03d}-copy.png").write_bytes(picture)
        (tmp_path / "pets" / "dog" / f"zz-{i:03d}.png").write_bytes(picture)
    twins = open_source(str(tmp_path / "pets"))
    model = Colours()
    x, keys, _ = features(twins, model)
    assert len(twins.items) == 34 and sum(model.seen) == 22 == len(set(keys))
    assert torch.equal(x, truth(twins))


@pytest.mark.parametrize("at", ["key", "check", "row"])
def test_a_flipped_byte_costs_one_image(source, cache, at):
    features(source, Colours())
    victim = segments(cache)[1]
    data = bytearray(victim.read_bytes())
    data[36 * 3 + {"key": 5, "check": 17, "row": 22}[at]] ^= 0x10
    victim.write_bytes(data)
    model = Colours()
    x, _, _ = features(source, model)
    assert model.seen == [1]
    assert torch.equal(x, truth(source))
    rebuilt = Colours()
    assert torch.equal(features(source, rebuilt)[0], x) and rebuilt.seen == []


@pytest.mark.parametrize("left", [0, 1, 36 * 3 + 1, 36 * 8 - 1])
def test_a_segment_cut_short_is_rebuilt(source, cache, left):
    features(source, Colours())
    victim = segments(cache)[0]
    victim.write_bytes(victim.read_bytes()[:left])
    model = Colours()
    x, _, _ = features(source, model)
    assert sum(model.seen) == 8 and torch.equal(x, truth(source))
    assert not victim.exists()
    rebuilt = Colours()
    assert torch.equal(features(source, rebuilt)[0], x) and rebuilt.seen == []


def test_a_segment_cut_between_rows_keeps_the_rest(source, cache):
    features(source, Colours())
    victim = segments(cache)[0]
    victim.write_bytes(victim.read_bytes()[: 36 * 5])
    model = Colours()
    assert torch.equal(features(source, model)[0], truth(source))
    assert sum(model.seen) == 3


def test_what_a_crash_left_half_written_is_never_read(source, cache):
    features(source, Colours())
    whole = segments(cache)[0]
    part = whole.with_name("00000000000000000001-dead.part")
    part.write_bytes(whole.read_bytes()[:50])
    whole.unlink()
    model = Colours()
    assert torch.equal(features(source, model)[0], truth(source))
    assert sum(model.seen) == 8
    assert prune(older_than_days=1) == [] and part.exists()  # perhaps somebody is writing it just now
    os.utime(part, (time.time() - 7200,) * 2)
    assert prune(older_than_days=1) == [] and not part.exists()
    assert len(segments(cache)) == 3


@pytest.mark.parametrize("strikes_at", ["write_bytes", "rename"])
def test_a_full_disk_says_what_to_do_and_harms_nothing(source, cache, monkeypatch, strikes_at):
    real, calls = getattr(Path, strikes_at), []

    def fails_on_the_second(path: Path, argument):
        calls.append(path)
        if len(calls) < 2:
            return real(path, argument)
        if strikes_at == "write_bytes":
            real(path, argument[:50])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, strikes_at, fails_on_the_second)
        with pytest.raises(FedvlmError, match=r"No space left.*fedvlm cache --prune.*FEDVLM_CACHE"):
            features(source, Colours())
    assert len(segments(cache)) == 1 and not list(cache.rglob("*.part"))
    model = Colours()
    assert torch.equal(features(source, model)[0], truth(source))
    assert sum(model.seen) == 22 - 8


def test_a_cache_that_cannot_be_a_folder_says_what_to_do(source, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "taken"))
    with pytest.raises(FedvlmError, match=r"cannot be written.*FEDVLM_CACHE"):
        features(source, Colours())


def write_beside_others(folder: str, barrier) -> None:
    """In a process of its own: many small segments, begun at the same moment as the other's."""
    store.BATCH, store.SEGMENT = 2, 3
    source = open_source(folder)
    barrier.wait(60)
    x, _, _ = features(source, Colours())
    assert torch.equal(x, truth(source))
    assert torch.equal(class_names(Colours(), ["a cat", "a dog"]), Colours().texts(["a cat", "a dog"]))


def test_two_processes_at_once_give_one_whole_store(tmp_path, cache):
    folder = paint(tmp_path / "pets", 60)
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(2)
    writers = [spawn.Process(target=write_beside_others, args=(str(folder), barrier)) for _ in range(2)]
    for w in writers:
        w.start()
    for w in writers:
        w.join(90)
    assert [w.exitcode for w in writers] == [0, 0]
    source, model = open_source(str(folder)), Colours()
    x, keys, _ = features(source, model)
    assert model.seen == [] and torch.equal(x, truth(source))
    assert class_names(model, ["a cat", "a dog"]) is not None and model.read == []
    view = open_view(model)
    assert set(view.index) == set(keys) and view.broken == 0
    assert not list(cache.rglob("*.part"))


def test_text_is_read_once(cache):
    model = Colours()
    first = class_names(model, ["a cat", "a dog"])
    assert torch.equal(class_names(model, ["a cat", "a dog"]), first)
    assert torch.equal(class_names(model, ["a dog", "a cat"]), first.flip(0))
    assert torch.equal(class_names(model, ["a dog"]), first[1:])
    assert model.read == [["a cat", "a dog"]]
    assert class_names(model, ["a dog", "a cow"]).shape == (2, 4) and len(model.read) == 2
    data = bytearray(segments(cache)[0].read_bytes())
    data[-3] ^= 1
    segments(cache)[0].write_bytes(data)
    assert torch.equal(class_names(model, ["a cat", "a dog"]), first)


def test_text_and_images_have_their_own_folders(source):
    model = Colours()
    features(source, model)
    class_names(model, ["a cat", "a dog"])
    assert sorted(e["view"] for e in listing()) == ["colours-0123456789ab-embedding", "colours-0123456789ab-text"]
    assert len(open_view(model).index) == 22 and len(open_view(model, "text").index) == 2


def test_a_model_without_words_keeps_none(cache):
    mute = Colours(speaks=False)
    assert class_names(mute, ["a cat", "a dog"]) is None
    assert segments(cache) == []


def test_listing_and_pruning(source, cache):
    assert list(listing()) == [] and prune() == []
    for mark in ("a" * 16, "b" * 16, "c" * 16):
        features(source, Colours(fingerprint=mark))
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
    (cache / ".DS_Store").write_text("what file managers leave")
    assert prune() == [a] and list(listing()) == []
    model = Colours(fingerprint="a" * 16)
    assert torch.equal(features(source, model)[0], truth(source)) and sum(model.seen) == 22


def test_progress_reaches_the_end_by_ones(source):
    said: list[tuple[int, int]] = []
    features(source, Colours(), progress=lambda done, of: said.append((done, of)))
    assert said == [(k + 1, 22) for k in range(22)]


def test_a_fingerprint_changes_with_contents_labels_and_order():
    one, two = digest(b"1"), digest(b"2")
    marks = [
        fingerprint([one, two], ["a/x", "a/y"]),
        fingerprint([two, one], ["a/x", "a/y"]),
        fingerprint([one, two], ["a/y", "a/x"]),
        fingerprint([one, two], ["a/x", "a/x"]),
        fingerprint([one], ["a/x"]),
    ]
    assert len(set(marks)) == len(marks)
    assert fingerprint([one, two], ["a/x", "a/y"]) == marks[0]


def test_what_was_stored_first_stands(tmp_path):
    """Encoding more beside it, or the same by another process, must not change a bit of what runs were trained on."""
    model = Moody()
    before = class_names(model, ["a dog", "a cat"])
    wider = class_names(model, ["a dog", "a bird", "a cat"])
    assert torch.equal(before, wider[[0, 2]]) and model.read == [["a dog", "a cat"], ["a bird"]]
    assert torch.equal(class_names(Moody(), ["a dog", "a cat"]), before)
    source = open_source(str(paint(tmp_path / "pets", 6)))
    first = features(source, model)[0]
    view = open_view(model)
    view.put([digest(data) for _, data in source.read()], first.numpy() + 1e-5)  # another process, later
    assert torch.equal(features(source, Moody())[0], first)


def test_a_damaged_first_row_gives_way_to_a_good_second(tmp_path):
    source, model = open_source(str(paint(tmp_path / "pets", 6))), Colours()
    whole = features(source, model)[0]
    (segment,) = open_view(model).folder.glob("*.rows")
    data = bytearray(segment.read_bytes())
    data[30] ^= 255
    segment.write_bytes(data)
    assert torch.equal(features(source, model)[0], whole) and model.seen[-1] == 1  # rebuilt once
    count = len(model.seen)
    assert torch.equal(features(source, model)[0], whole) and len(model.seen) == count  # and found again
