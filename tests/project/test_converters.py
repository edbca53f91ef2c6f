"""tools/convert_*.py: data of other projects. What is written can be opened, and holds what the files say."""

from __future__ import annotations

import contextlib
import gzip
import json
import struct
from pathlib import Path

import convert_domainnet
import convert_leaf
import convert_prostate
import numpy as np
import pytest
from nifti import read_volume
from PIL import Image

from fedvlm.core.tasks import SEGMENTATION
from fedvlm.data.source import open_source
from fedvlm.errors import FedvlmError


def leaf(path: Path, **users: tuple[list, list]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {u: {"x": x, "y": y} for u, (x, y) in users.items()}
    path.write_text(
        json.dumps({"users": list(users), "num_samples": [len(d["y"]) for d in data.values()], "user_data": data})
    )
    return path.parent


def test_femnist(tmp_path, capsys):
    image = np.linspace(0, 1, 784).tolist()
    leaf(tmp_path / "in" / "a.json", f1=([image, image], [3, 10]), f2=([image], [3]), f3=([image], [4]))
    source = leaf(tmp_path / "in" / "b.json", f2=([image], [4]))  # the rest of f2
    out = tmp_path / "out"
    assert convert_leaf.main([str(source), str(out), "--users", "f1", "f2"]) == 0
    assert "4 images of 2 users" in capsys.readouterr().out
    found = open_source(str(out))
    assert [(i.domain, i.label) for i in found.items] == [("f1", "3"), ("f1", "upper A"), ("f2", "3"), ("f2", "4")]
    pixels = np.array(Image.open(out / "f1" / "3" / "0.png")).flatten()
    assert np.abs(pixels / 255 - image).max() < 1 / 500
    assert convert_leaf.main([str(source), str(tmp_path / "digits"), "--classes", "10", "--at-least", "2"]) == 0
    assert {i.label for i in open_source(str(tmp_path / "digits")).items} == {"3", "4"}


def test_shakespeare(tmp_path):
    text = "".join(np.random.default_rng(0).choice(list("to be or not"), 300))
    windows, following = [text[k : k + 80] for k in range(220)], [text[k + 80] for k in range(220)]
    assert convert_leaf.text_of(windows, following) == text
    source = leaf(tmp_path / "in" / "x.json", HAMLET=(windows, following), LEAR=(windows[:50], following[:50]))
    assert convert_leaf.main([str(source), str(tmp_path / "roles.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "roles.jsonl").read_text().splitlines()]
    assert lines == [{"role": "HAMLET", "text": text}, {"role": "LEAR", "text": text[:130]}]
    assert open_source(str(tmp_path / "roles.jsonl")).domains == ["HAMLET", "LEAR"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "not a file of LEAF"),
        ("[", "not a file of LEAF"),
    ],
)
def test_what_is_no_such_file(text, says, tmp_path, capsys):
    (tmp_path / "x.json").write_text(text)
    assert convert_leaf.main([str(tmp_path / "x.json"), str(tmp_path / "out")]) == 1
    assert says in capsys.readouterr().err
    (tmp_path / "there.jsonl").write_text("")
    assert convert_leaf.main([str(tmp_path / "x.json"), str(tmp_path / "there.jsonl")]) == 1
    assert "is there already" in capsys.readouterr().err


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
    assert convert_prostate.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert "12 slices of 4 volumes from 2 sites" in capsys.readouterr().out
    found = open_source(str(tmp_path / "out"))
    assert found.task_type is SEGMENTATION and set(found.domains) == {"A", "other"} and len(found.items) == 12
    mask = np.array(Image.open(tmp_path / "out" / "A" / "mask" / "Case00-002.png"))
    assert mask.shape == (6, 8) and (mask[1:3, 2:5] == 255).all() and (mask > 0).sum() == 6
    (tmp_path / "in" / "other" / "Case01_segmentation.nii.gz").unlink()
    assert convert_prostate.main([str(tmp_path / "in"), str(tmp_path / "two")]) == 1
    assert "Case01 has a volume or a segmentation, and not both" in capsys.readouterr().err


def test_domainnet(tmp_path, capsys):
    root = tmp_path / "in"
    lines: dict[str, list[str]] = {"train": [], "test": []}
    for k, name in enumerate([*convert_domainnet.CLASSES, "axe"]):
        for part, listed in lines.items():
            path = f"clipart/{name}/{part}.jpg"
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4), (k, 0, 0)).save(root / path)
            listed.append(f"{path} {k}")
    for part, listed in lines.items():
        (root / f"clipart_{part}.txt").write_text("\n".join(listed) + "\n")
    assert convert_domainnet.main([str(root), str(tmp_path / "ten")]) == 0
    assert "20 images of 10 classes in 1 domains" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "ten" / "clipart").iterdir()) == sorted(convert_domainnet.CLASSES)
    assert convert_domainnet.main([str(root), str(tmp_path / "one"), "--classes", "axe", "--only", "test"]) == 0
    assert [p.name for p in (tmp_path / "one").rglob("*.jpg")] == ["test.jpg"]
    assert convert_domainnet.main([str(root), str(tmp_path / "x"), "--classes", "axes"]) == 1
    assert "did you mean axe" in capsys.readouterr().err
    (root / "clipart_test.txt").write_text("../../etc/passwd 0\n")
    assert convert_domainnet.main([str(root), str(tmp_path / "y")]) == 1
    assert "clipart_test.txt:1: '../../etc/passwd 0' is not" in capsys.readouterr().err
