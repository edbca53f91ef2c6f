"""Prostate MRI (NIfTI, written by hand here) and DomainNet's lists as folders that data= takes."""

from __future__ import annotations

import contextlib
import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedvlm.cli import main
from fedvlm.core.tasks import SEGMENTATION
from fedvlm.data.convert.domainnet import CLASSES
from fedvlm.data.convert.nifti import read_volume
from fedvlm.data.source import open_source
from fedvlm.errors import FedvlmError


def nifti(path: Path, values: np.ndarray, code: int = 16, order: str = "<", slope: float = 0.0) -> Path:
    """By the standard (nifti1.h): offsets of dim 40, datatype 70, vox_offset 108, scl_slope 112, magic 344."""
    header = bytearray(352)
    struct.pack_into(order + "i", header, 0, 348)
    struct.pack_into(order + "8h", header, 40, 3, *values.shape, 1, 1, 1, 1)
    struct.pack_into(order + "h", header, 70, code)
    struct.pack_into(order + "3f", header, 108, 352, slope, 10.0)
    header[344:348] = b"n+1\0"
    kinds = {2: "u1", 4: "i2", 16: "f4", 512: "u2"}
    content = bytes(header) + values.astype(order + kinds[code]).tobytes(order="F")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize(("code", "order"), [(2, "<"), (4, "<"), (16, ">"), (512, ">")])
def test_volumes_are_read(code, order, tmp_path):
    values = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    for name in ("a.nii", "a.nii.gz"):
        path = nifti(tmp_path / name, values, code, order)
        np.testing.assert_array_equal(read_volume(path), values)
    scaled = nifti(tmp_path / "b.nii", values, code, order, slope=2.0)
    np.testing.assert_array_equal(read_volume(scaled), 2 * values + 10)


def test_damaged_volumes_are_refused(tmp_path):
    good = nifti(tmp_path / "a.nii", np.zeros((4, 4, 4))).read_bytes()

    def refused(content: bytes, says: str, name: str = "b.nii") -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FedvlmError, match=says):
            read_volume(tmp_path / name)

    refused(good[:-1], "ends before its 64 numbers")
    refused(good[:100], "not a NIfTI-1 file")
    refused(good[:344] + b"xx\0\0" + good[348:], "not a NIfTI-1 file")
    refused(good, "cannot be read as NIfTI-1", "c.nii.gz")
    refused(gzip.compress(good)[:-12], "cannot be read as NIfTI-1|ends before", "d.nii.gz")
    huge = bytearray(good)
    struct.pack_into("<8h", huge, 40, 3, 32767, 32767, 32767, 1, 1, 1, 1)
    refused(bytes(huge), "has the size 32767×32767×32767")
    flat = bytearray(good)
    struct.pack_into("<8h", flat, 40, 2, 4, 4, 1, 1, 1, 1, 1)
    refused(bytes(flat), "three axes")
    for seed in range(200):
        damaged = bytearray(good)
        where = np.random.default_rng(seed).integers(0, 352, 5)
        for at in where:
            damaged[at] = seed
        (tmp_path / "e.nii").write_bytes(damaged)
        with contextlib.suppress(FedvlmError):
            assert read_volume(tmp_path / "e.nii").size <= 4**3


def test_prostate(tmp_path, capsys):
    draw = np.random.default_rng(1)
    for site in ("RUNMC", "other"):
        for case in ("Case00", "Case01"):
            mask = np.zeros((8, 6, 5))
            mask[2:5, 1:3, 1:4] = 2
            nifti(tmp_path / "in" / site / f"{case}.nii.gz", draw.normal(100, 20, (8, 6, 5)))
            nifti(tmp_path / "in" / site / f"{case}_segmentation.nii.gz", mask, 2)
    assert main(["convert", "prostate", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert "12 slices of 4 volumes from 2 sites" in capsys.readouterr().out
    found = open_source(str(tmp_path / "out"))
    assert found.task_type is SEGMENTATION and set(found.domains) == {"A", "other"} and len(found.items) == 12
    mask = np.array(Image.open(tmp_path / "out" / "A" / "mask" / "Case00-002.png"))
    assert mask.shape == (6, 8) and (mask[1:3, 2:5] == 255).all() and (mask > 0).sum() == 6
    (tmp_path / "in" / "other" / "Case01_segmentation.nii.gz").unlink()
    assert main(["convert", "prostate", str(tmp_path / "in"), str(tmp_path / "two")]) == 1
    assert "Case01 has a volume or a segmentation, and not both" in capsys.readouterr().err


def test_domainnet(tmp_path, capsys):
    root = tmp_path / "in"
    lines: dict[str, list[str]] = {"train": [], "test": []}
    for k, name in enumerate([*CLASSES, "axe"]):
        for part, listed in lines.items():
            path = f"clipart/{name}/{part}.jpg"
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4), (k, 0, 0)).save(root / path)
            listed.append(f"{path} {k}")
    for part, listed in lines.items():
        (root / f"clipart_{part}.txt").write_text("\n".join(listed) + "\n")
    assert main(["convert", "domainnet", str(root), str(tmp_path / "ten")]) == 0
    assert "20 images of 10 classes in 1 domains" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "ten" / "clipart").iterdir()) == sorted(CLASSES)
    assert main(["convert", "domainnet", str(root), str(tmp_path / "one"), "classes=axe", "only=test"]) == 0
    assert [p.name for p in (tmp_path / "one").rglob("*.jpg")] == ["test.jpg"]
    assert main(["convert", "domainnet", str(root), str(tmp_path / "x"), "classes=axes"]) == 1
    assert "did you mean axe" in capsys.readouterr().err
    (root / "clipart_test.txt").write_text("../../etc/passwd 0\n")
    assert main(["convert", "domainnet", str(root), str(tmp_path / "y")]) == 1
    assert "clipart_test.txt:1: '../../etc/passwd 0' is not" in capsys.readouterr().err
