"""Data files that are damaged, hostile or odd: left out or refused with a reason, in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from corpus import CORPUS, encoded, good_images, tried, vectors, zipped
from helpers import train_small
from PIL import Image

from fedvlm.backbones.base import ViewFormat
from fedvlm.data import source
from fedvlm.data.formats import folder, text
from fedvlm.data.images import Unreadable, decode
from fedvlm.data.pool import image_pool, with_outsiders
from fedvlm.data.source import open_outsiders, open_source
from fedvlm.errors import FedvlmError
from fedvlm.system.machine import cores
from fedvlm.system.names import file_name


class Colours:
    """The mean colour as an embedding."""

    name, fingerprint, dim, scale, black_box = "colours", "0123456789abcdef", 3, 8.0, True

    def images(self, images):
        return torch.stack([torch.tensor(i.resize((1, 1)).getpixel((0, 0))).float() + 1 for i in images])

    def texts(self, phrases):
        return None


@pytest.fixture(autouse=True)
def small_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_BYTES", 1 << 22)  # the bomb of text takes a second to reach the real one
    monkeypatch.chdir(tmp_path)  # relative paths are short enough for sockets


@pytest.mark.parametrize("bad", CORPUS, ids=lambda bad: bad.name[:30])
@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_bad_files_are_named_with_the_reason(tmp_path, bad):
    for found in tried(tmp_path, Colours(), [bad]):
        assert re.search(bad.reason, found.said), found.said
        assert found.seconds < 10


def test_the_corpus_is_large():
    assert len(CORPUS) == len({(b.kind, b.name) for b in CORPUS}) >= 60


@pytest.mark.parametrize("name", ["pipe.png", "strip.png", "postscript.png", "circle.png", "scans.jpg", "count.tif"])
def test_a_bad_image_stops_the_run_where_that_is_asked(tmp_path, name):
    (bad,) = (b for b in CORPUS if b.name == name)
    root = good_images(tmp_path / "pets")
    try:
        bad.make(root / "cat" / name)
    except (AttributeError, OSError):
        pytest.skip("this system cannot make it")
    with pytest.raises(FedvlmError, match=rf"cat/{name}: .*({bad.reason}).*; .*broken=skip"):
        image_pool(open_source(str(root)), Colours(), "{}", broken="refuse")
    pool = image_pool(open_source(str(root)), Colours(), "{}")
    assert list(pool.skipped) == [f"cat/{name}"] and len(pool.x) == 4


def test_what_took_the_place_of_a_file_does_not_block(tmp_path, monkeypatch):
    """A pipe that appears after the check."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("no pipes with names")
    os.mkfifo(tmp_path / "x.png")
    monkeypatch.setattr("stat.S_ISREG", lambda mode: True)
    with pytest.raises(ValueError, match="empty"):
        decode(source.read_file(tmp_path / "x.png"))


def test_links_to_files_and_folders_are_followed(tmp_path):
    root = good_images(tmp_path / "pets")
    (root / "cat" / "linked.png").symlink_to(root / "dog" / "0.png")
    (root / "bird").symlink_to(root / "dog")
    pool = image_pool(open_source(str(root)), Colours(), "{}")
    assert pool.skipped == {} and len(pool.x) == 7


# Zip files


def test_members_are_never_written_to_disk(tmp_path):
    (tmp_path / "a.zip").write_bytes(zipped([("../evil.png", encoded("PNG")), ("/tmp/evil.png", encoded("PNG"))]))
    with pytest.raises(FedvlmError, match="outside of it"):
        open_source(str(tmp_path / "a.zip"))
    assert [p.name for p in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize("method", [0, 8, 12, 14])
def test_ordinary_zips_are_read(tmp_path, method):
    (tmp_path / "a.zip").write_bytes(zipped([("cat/x.png", encoded("PNG", (200, 150)))], method))
    pool = image_pool(open_source(str(tmp_path / "a.zip")), Colours(), "{}")
    assert pool.skipped == {} and len(pool.x) == 5


def test_a_zip_that_disappears_is_one_sentence(tmp_path):
    (tmp_path / "a.zip").write_bytes(zipped([]))
    found = open_source(str(tmp_path / "a.zip"))
    (tmp_path / "a.zip").unlink()
    with pytest.raises(FedvlmError, match=r"a\.zip: cannot be read as a zip"):
        image_pool(found, Colours(), "{}")


# Folders


def test_a_folder_that_disappears_is_one_sentence(tmp_path):
    root = good_images(tmp_path / "pets")
    for k in range(4 * cores()):  # more than are read ahead
        shutil.copy(root / "cat" / "0.png", root / "cat" / f"more-{k}.png")
    reading = open_source(str(root)).read()
    next(reading)
    shutil.rmtree(root)
    with pytest.raises(FedvlmError, match="pets: no such folder; it was removed while it was read"):
        list(reading)


def test_a_file_that_disappears_is_left_out(tmp_path):
    root = good_images(tmp_path / "pets")
    found = open_source(str(root))
    (root / "cat" / "0.png").unlink()
    (_, gone), *others = found.read()
    assert isinstance(gone, Unreadable) and gone == b"" and "cannot be read" in gone.reason
    assert len(others) == 3 and all(data for _, data in others)


def test_an_unreadable_folder_is_not_passed_over(tmp_path, monkeypatch):
    root = good_images(tmp_path / "pets")
    (root / ".hidden").mkdir()
    listed = os.scandir

    def scandir(path):  # instead of chmod, which does not keep out root
        if str(path).endswith(("dog", ".hidden")):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(FedvlmError, match=r"the folder .*dog cannot be read \(Permission denied\)"):
        open_source(str(root))


def test_the_number_of_files_is_bounded(tmp_path, monkeypatch):
    root = good_images(tmp_path / "pets")
    monkeypatch.setattr(folder, "MAX_ITEMS", 6)
    for opened in (open_source, open_outsiders):
        with pytest.raises(FedvlmError, match="more than 6 files and folders"):
            opened(str(root))
    monkeypatch.setattr(folder, "MAX_ITEMS", 7)
    assert len(open_source(str(root)).items) == 4


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "a\0b", "x" * 5000])
def test_impossible_paths_are_one_sentence(name):
    for opened in (open_source, open_outsiders):
        with pytest.raises(FedvlmError, match=r"no such folder|cannot be opened"):
            opened(name)


# Masks


def with_masks(root, *sizes):
    for k, (size, mask) in enumerate(sizes):
        for part, side, colour in (("image", size, 90 + k), ("mask", mask, 255)):
            (root / "a" / part).mkdir(parents=True, exist_ok=True)
            Image.new("L", side, colour).save(root / "a" / part / f"{k}.png")
    return str(root)


class Squares(Colours):
    def view_format(self, view):
        return ViewFormat((3, 4, 4), "u1") if view == "pixels" else None

    def encode(self, images, view):
        return (
            torch.from_numpy(np.stack([np.asarray(i.resize((4, 4))) for i in images])).permute(0, 3, 1, 2).contiguous()
        )


def test_a_mask_of_another_shape_is_named_with_both_sizes(tmp_path):
    data = with_masks(
        tmp_path / "m", ((24, 24), (24, 24)), ((30, 20), (20, 30)), ((1000, 667), (250, 166)), ((24, 24), (24, 25))
    )
    pool = image_pool(open_source(data), Squares(), "{}", view="pixels")
    assert pool.skipped == {
        "a/image/1.png": "its mask has 20×30 pixels, and the image 30×20",
        "a/image/3.png": "its mask has 24×25 pixels, and the image 24×24",
    }
    assert len(pool.x) == len(pool.y) == len(pool.source.masks) == 2
    with pytest.raises(FedvlmError, match=r"a/image/1.png: its mask has 20×30 .*broken=skip"):
        image_pool(open_source(data), Squares(), "{}", "refuse", view="pixels")


# Text


def roles(path, *names, length=900, **more):
    with gzip.open(path, "wt", encoding="utf-8") as out:
        for k, role in enumerate(names):
            entry = {"role": role, "text": "abcdefgh "[k % 9 :] * (length // 9)} | more
            out.write(json.dumps(entry) + "\n")
    return str(path)


def test_roles_that_differ_in_punctuation_are_different_clients(tmp_path):
    names = ("A B", "A-B", "A.B", "A  B", "Zoë", "C")
    found = open_source(roles(tmp_path / "r.jsonl.gz", *names))
    assert len(found.domains) == len(names) and {"Zoë", "C"} <= set(found.domains)
    assert all(re.fullmatch(r"[\w-]+", d) for d in found.domains)
    fewer = open_source(roles(tmp_path / "f.jsonl.gz", "A B", "A.B"))
    assert set(fewer.domains) < set(found.domains), "a name does not depend on which others there are"
    assert open_source(roles(tmp_path / "one.jsonl.gz", "A. B!", play="p/q")).domains == ["p-q-A-B"]


def test_play_and_role_are_not_confused(tmp_path):
    with gzip.open(tmp_path / "r.jsonl.gz", "wt") as out:
        for play, role in (("a", "b-c"), ("a-b", "c")):
            out.write(json.dumps({"play": play, "role": role, "text": "xyz " * 99}) + "\n")
    assert len(open_source(str(tmp_path / "r.jsonl.gz")).domains) == 2


def test_long_names_of_roles(tmp_path):
    names = ("x" * 400, "x" * 399 + "y", "ü" * 400)
    data = roles(tmp_path / "r.jsonl.gz", *names, length=1000)
    found = open_source(data)
    assert sorted(found.domains) == sorted(names) and len({file_name(d) for d in found.domains}) == 3
    given = {
        "on": "lstm",
        "stride": 80,
        "domains": 0,
        "hidden": 4,
        "epochs": 1,
        "rounds": 1,
        "unseen": "",
        "engine": "serial",
    }
    run = train_small(data, tmp_path / "run", "fedavg", **given)
    assert sorted(run.record.clients) == sorted(names)


def test_examples_of_text_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_ITEMS", 100)
    data = roles(tmp_path / "r.jsonl.gz", "A", "B")
    with pytest.raises(FedvlmError, match=r"more than 100 examples; give a larger stride="):
        open_source(data, stride=1)
    assert len(open_source(data, stride=40).items) < 100


def test_unicode_that_is_not_valid_becomes_a_name(tmp_path):
    lines = [json.dumps({"role": role, "text": "ab\udfff " * 90}) for role in ("A\ud800", "A")]
    (tmp_path / "r.jsonl").write_text("\n".join(lines), "utf-8")
    found = open_source(str(tmp_path / "r.jsonl"))
    assert len(found.domains) == 2 and all(d.encode() for d in found.domains)


# Embeddings and outsiders


def test_labels_of_whole_numbers_may_be_floats(tmp_path):
    vectors(y=torch.tensor([0.0, 1, 0, 1, 0, 2]).numpy())(tmp_path / "a.safetensors")
    assert open_source(str(tmp_path / "a.safetensors")).classes == ["0", "1", "2"]


def test_bad_outsiders_are_left_out_too(tmp_path):
    pool = image_pool(open_source(str(good_images(tmp_path / "pets"))), Colours(), "{}")
    other = good_images(tmp_path / "other")
    (other / "strip.png").write_bytes(encoded("PNG", (60_000, 1), "1"))
    found = with_outsiders(pool, open_outsiders(str(other)), Colours(), "embedding")
    assert list(found.skipped) == ["outsiders/strip.png"] and len(found.extras["outsiders"].x) == 4
