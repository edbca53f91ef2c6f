"""The feature store with many segments, full and read-only disks, other processes at work, and encoders that fail."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from colours import BatchDependent, Colours, expected, small_store, write_images
from fullness import Disk, read_only

from fedvlm.backbones.base import ViewFormat
from fedvlm.cli import main
from fedvlm.config import catalogue
from fedvlm.data import encoding, store
from fedvlm.data.source import Source, digest, open_source
from fedvlm.data.store import View, features, listing, open_view, prune, text_embeddings
from fedvlm.errors import FedvlmError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    return small_store(tmp_path, monkeypatch)


@pytest.fixture
def source(tmp_path) -> Source:
    return open_source(str(write_images(tmp_path / "pets", 22)))


def row(number: float) -> np.ndarray:
    return np.full((1, 3), number, np.float32)


def key(number: int) -> bytes:
    return digest(str(number).encode())


def small_view(folder: Path) -> View:
    return View(folder, ViewFormat((3,)))


def segments(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.rows"))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# Many segments


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted on Linux")
def test_open_files_do_not_grow_with_segments(tmp_path, monkeypatch):
    """Of 1,100 segments there was one open file each, and the next could not be opened."""
    monkeypatch.setattr(store, "MANY", 10**6)
    view = small_view(tmp_path / "view")
    table = np.zeros(1, view.record_dtype)
    (tmp_path / "view").mkdir()
    for k in range(1100):
        table["key"], table["row"] = np.void(key(k)), k
        table["check"] = store.checksum(key(k), table["row"][0])
        (tmp_path / "view" / f"{k:020d}-0.rows").write_bytes(table.tobytes())
    before = open_files()
    view = small_view(tmp_path / "view")
    assert all(np.array_equal(view.get(key(k)), row(k)[0]) for k in range(1100))
    assert view.broken == 0 and open_files() - before <= store.MOST_OPEN


def test_small_segments_are_joined_and_every_row_stays_the_same(tmp_path, monkeypatch):
    """Of several copies the oldest is used before and after; damaged ones are left out."""
    monkeypatch.setattr(store, "MANY", 8)
    monkeypatch.setattr(encoding, "SEGMENT_BYTES", 200)
    folder = tmp_path / "view"
    view = small_view(folder)
    view.put([key(k) for k in range(100, 110)], np.concatenate([row(k) for k in range(100, 110)]))  # a large segment
    for k in range(6):
        view.put([key(k)], row(k))
    view.put([key(0), key(100), key(50)], np.concatenate([row(-1)] * 3))  # computed again by another process
    damaged = segments(folder)[3]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    expected = {k: small_view(folder).get(key(k)) for k in (*range(6), 50, *range(100, 110))}
    assert [k for k, r in expected.items() if r is None] == [2]
    view.put([key(6)], row(6))  # the eighth small one
    assert len(segments(folder)) == 2 and not list(folder.glob("*.part"))
    for seen in (view, small_view(folder)):
        assert {k: None if r is None else r.tolist() for k, r in expected.items()} == {
            k: None if (r := seen.get(key(k))) is None else r.tolist() for k in expected
        }
        assert np.array_equal(seen.get(key(6)), row(6)[0])


def test_the_number_of_segments_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MANY", 8)
    view = small_view(tmp_path / "view")
    for k in range(100):
        view.put([key(k)], row(k))
        assert len(segments(tmp_path)) <= 8
    assert all(np.array_equal(view.get(key(k)), row(k)[0]) for k in range(100))


def test_a_reader_finds_rows_whose_segments_were_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MANY", 8)
    monkeypatch.setattr(store, "MOST_OPEN", 2)
    writer = small_view(tmp_path / "view")
    for k in range(7):
        writer.put([key(k)], row(k))
    reader = small_view(tmp_path / "view")
    assert np.array_equal(reader.get(key(0)), row(0)[0])
    writer.put([key(7)], row(7))
    assert len(segments(tmp_path)) == 1
    assert all(np.array_equal(reader.get(key(k)), row(k)[0]) for k in range(8)) and reader.broken == 0


def test_a_kill_or_a_full_disk_while_segments_are_joined_costs_nothing(tmp_path, monkeypatch):
    for room in (150, 200, 250):
        for dies in (False, True):
            folder = tmp_path / f"{room}-{dies}"
            view = small_view(folder)
            for k in range(7):
                view.put([key(k)], row(k))
            with monkeypatch.context() as patch:
                patch.setattr(store, "MANY", 8)
                try:
                    with Disk(folder, room, dies):
                        view.put([key(7)], row(7))
                except BaseException as error:
                    assert dies and type(error).__name__ == "Killed"
            after = small_view(folder)
            assert all(np.array_equal(after.get(key(k)), row(k)[0]) for k in range(8))


def test_many_that_write_and_join_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MANY", 6)
    wrong: list[str] = []

    def play(number: int) -> None:
        view = small_view(tmp_path / "view")
        for k in range(40):
            view.put([key(100 * number + k)], row(100 * number + k))
            for other in range(0, 300, 100):
                found = view.get(key(other + k))
                if (found is None and other == 100 * number) or (found is not None and found[0] != other + k):
                    wrong.append(f"{other + k}: {found}")

    threads = [threading.Thread(target=play, args=(number,)) for number in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    view = small_view(tmp_path / "view")
    everything = [100 * number + k for number in range(3) for k in range(40)]
    assert not wrong and all(np.array_equal(view.get(key(k)), row(k)[0]) for k in everything)


# Disks


@pytest.mark.parametrize("room", [288, 300, 500])
def test_a_full_disk_is_an_error_that_damages_nothing(source, cache, room):
    with pytest.raises(FedvlmError, match=r"No space left.*fedvlm cache --prune.*FEDVLM_CACHE"), Disk(cache, room):
        features(source, Colours())
    assert len(segments(cache)) == 1 and not list(cache.rglob("*.part"))
    model = Colours()
    assert torch.equal(features(source, model)[0], expected(source))
    assert sum(model.batches) == 22 - 8


def test_a_read_only_cache_is_used_as_it_is(source, tmp_path, cache, capsys):
    """What it holds is read, the rest is computed each time, with one warning; and the same rows are used throughout."""
    before, _, _ = features(source, BatchDependent())
    wider = open_source(str(write_images(tmp_path / "pets", 40)))
    (tmp_path / "pets" / "dog" / "zz.png").write_bytes((tmp_path / "pets" / "cat" / "025.png").read_bytes())
    wider = open_source(str(tmp_path / "pets"))
    capsys.readouterr()
    with read_only(tmp_path / "cache"):
        model = BatchDependent()
        x, keys, _ = features(wider, model)
        texts = text_embeddings(model, ["a cat", "a dog"])
    assert sum(model.batches) == 18 and texts.shape == (2, 4)
    assert capsys.readouterr().err.count("cannot be written (Read-only file system)") == 2  # one for each view
    assert x.isfinite().all() and torch.equal(x[keys.index(keys[-1])], x[-1])
    known = dict(zip(keys, x, strict=True))
    assert all(torch.equal(known[digest(data)], r) for (_, data), r in zip(source.read(), before, strict=True))


def test_a_catalogue_that_cannot_be_kept_is_made_each_time(tmp_path, monkeypatch):
    known, made = catalogue.read_catalogue(catalogue.SHIPPED, catalogue.current_digest()) or catalogue.load(), []
    monkeypatch.setattr(catalogue, "SHIPPED", tmp_path / "none.json")
    monkeypatch.setattr(catalogue, "make", lambda digest: made.append(digest) or known._replace(digest=digest))
    load, cache = catalogue.load.__wrapped__, tmp_path / "kept"
    monkeypatch.setenv("FEDVLM_CACHE", str(cache))
    cache.mkdir()
    with read_only(cache):
        assert load().methods == load().methods == known.methods and len(made) == 2
    with Disk(cache, 1000):
        assert load().methods == known.methods and not any(cache.iterdir())
    assert load().methods == load().methods == known.methods and len(made) == 4  # kept from the last but one on


def test_a_bad_block_costs_one_row(source, cache):
    first, _, _ = features(source, Colours())
    view, bad = open_view(Colours()), segments(cache)[1]
    read = view._read

    def failing(path: Path, i: int) -> bytes:
        if (path, i) == (bad, 2):
            raise OSError(5, "Input/output error")
        return read(path, i)

    view._read = failing  # type: ignore[method-assign]
    found = [view.get(digest(data)) for _, data in source.read()]
    assert sum(r is None for r in found) == 1 and view.broken == 1
    assert all(r is None or np.array_equal(r, f) for r, f in zip(found, first.numpy(), strict=True))


def test_pruning_a_read_only_cache_is_one_sentence(source, tmp_path, capsys):
    features(source, Colours())
    with read_only(tmp_path / "cache"):
        assert main(["cache", "--prune"]) == 1
        told = capsys.readouterr().err
        assert main(["cache"]) == 0
    assert "Read-only file system" in told and "defect" not in told
    assert len(list(listing())) == 1


# Other processes


def test_a_view_pruned_at_any_moment_gives_no_missing_rows(source, monkeypatch):
    """Between storing rows and reading them, rows were NaN."""
    for place in ("before", "after"):
        inner = View.put

        def pruned(self: View, keys: list[bytes], rows: np.ndarray, inner=inner, place=place) -> None:
            if place == "before":
                prune()
            inner(self, keys, rows)
            if place == "after":
                prune()

        with monkeypatch.context() as patch:
            patch.setattr(View, "put", pruned)
            assert torch.equal(features(source, Colours())[0], expected(source))
            model = Colours()
            assert torch.equal(text_embeddings(model, ["a cat", "a dog"]), model.texts(["a cat", "a dog"]))


def test_a_view_pruned_while_a_segment_is_written(source, monkeypatch):
    inner = Path.replace

    def gone(self: Path, target: Path) -> Path:
        prune()
        return inner(self, target)

    monkeypatch.setattr(Path, "replace", gone)
    assert torch.equal(features(source, Colours())[0], expected(source))


def test_pruning_while_others_read_and_write(source):
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            x, _, _ = features(source, Colours())
            if not torch.equal(x, expected(source)):
                wrong.append(x)

    reader = threading.Thread(target=read)
    reader.start()
    end = time.monotonic() + 1.5
    try:
        while time.monotonic() < end:
            prune()
            list(listing())
    finally:
        stop.set()
        reader.join()
    assert not wrong


def test_what_an_interrupted_prune_left_is_removed_by_the_next(source, cache):
    features(source, Colours())
    (folder,) = cache.iterdir()
    left = folder.rename(cache / "0123.part")
    assert list(listing()) == [] and prune() == [] and left.exists()
    os.utime(left, (time.time() - 7200,) * 2)
    assert prune() == [] and not left.exists()


# Encoders


class Failing(Colours):
    def __init__(self, error: Exception):
        super().__init__()
        self.error = error

    def images(self, images):
        raise self.error


@pytest.mark.parametrize("error", [ValueError("bad shape"), RuntimeError("CUDA error"), TypeError("no"), KeyError("x")])
def test_an_error_of_the_encoder_is_no_broken_image(source, error):
    with pytest.raises(FedvlmError, match=r"hub/colours failed on 4 images \(\w+Error"):
        features(source, Failing(error))


def test_a_sentence_of_the_encoder_stays_as_it_is(source):
    with pytest.raises(FedvlmError, match=r"^the server is gone$"):
        features(source, Failing(FedvlmError("the server is gone")))


@pytest.mark.parametrize("wrong", ["fewer", "wider", "nan", "inf"])
def test_rows_that_do_not_belong_to_the_images_are_an_error(source, cache, wrong):
    """Fewer rows than images were given to the wrong images."""

    class Wrong(Colours):
        def images(self, images):
            rows = super().images(images)
            if wrong in ("nan", "inf"):
                rows[1, 1] = float(wrong)
            return {"fewer": rows[:-1], "wider": rows.repeat(1, 2)}.get(wrong, rows)

        def texts(self, phrases):
            rows = super().texts(phrases)
            if wrong in ("nan", "inf"):
                rows[0, 1] = float(wrong)
            return {"fewer": rows[:-1], "wider": rows.repeat(1, 2)}.get(wrong, rows)

    with pytest.raises(FedvlmError, match=r"colours returned (an array of shape|numbers that are not finite)"):
        features(source, Wrong())
    with pytest.raises(FedvlmError, match=r"colours returned (an array of shape|numbers that are not finite)"):
        text_embeddings(Wrong(), ["a cat", "a dog"])
    assert not segments(cache)


def test_only_what_the_decoder_refuses_is_skipped(source, tmp_path):
    (tmp_path / "pets" / "cat" / "broken.png").write_bytes(b"no image")
    mixed = open_source(str(tmp_path / "pets"))
    x, _, skipped = features(mixed, Colours())
    assert list(skipped) == ["cat/broken.png"]
    assert [bool(r.isnan().any()) for r in x] == [i.path == "cat/broken.png" for i in mixed.items]
