"""Data of other projects: what is written can be opened, and holds what the files say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedvlm.cli import main
from fedvlm.data.convert.leaf import text_of
from fedvlm.data.source import open_source


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
    assert main(["convert", "leaf", str(source), str(out), "users=f1,f2"]) == 0
    assert "4 images of 2 users" in capsys.readouterr().out
    found = open_source(str(out))
    assert [(i.domain, i.label) for i in found.items] == [("f1", "3"), ("f1", "upper A"), ("f2", "3"), ("f2", "4")]
    pixels = np.array(Image.open(out / "f1" / "3" / "0.png")).flatten()
    assert np.abs(pixels / 255 - image).max() < 1 / 500
    assert main(["convert", "leaf", str(source), str(tmp_path / "digits"), "classes=10", "at_least=2"]) == 0
    assert {i.label for i in open_source(str(tmp_path / "digits")).items} == {"3", "4"}


def test_shakespeare(tmp_path):
    text = "".join(np.random.default_rng(0).choice(list("to be or not"), 300))
    windows, following = [text[k : k + 80] for k in range(220)], [text[k + 80] for k in range(220)]
    assert text_of(windows, following) == text
    source = leaf(tmp_path / "in" / "x.json", HAMLET=(windows, following), LEAR=(windows[:50], following[:50]))
    assert main(["convert", "leaf", str(source), str(tmp_path / "roles.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "roles.jsonl").read_text().splitlines()]
    assert lines == [{"role": "HAMLET", "text": text}, {"role": "LEAR", "text": text[:130]}]
    assert open_source(str(tmp_path / "roles.jsonl")).domains == ["HAMLET", "LEAR"]


def test_coop(tmp_path, capsys):
    for k in range(3):
        (tmp_path / "in" / "images" / "pets").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (k, 0, 0)).save(tmp_path / "in" / "images" / "pets" / f"{k}.png")
    parts = {
        "train": [["pets/0.png", 0, "beagle"], ["pets/1.png", 1, "great dane"]],
        "val": [],
        "test": [["pets/2.png", 0, "beagle"]],
    }
    source = tmp_path / "in" / "split_zhou_Pets.json"
    source.write_text(json.dumps(parts))
    assert main(["convert", "coop", str(source), str(tmp_path / "out")]) == 0
    assert "3 images of 2 classes" in capsys.readouterr().out
    found = open_source(str(tmp_path / "out"))
    assert [(i.label, i.path.split("/")[-1]) for i in found.items] == [
        ("beagle", "test-0.png"),
        ("beagle", "train-0.png"),
        ("great dane", "train-1.png"),
    ]
    source.write_text(json.dumps(parts | {"val": [["../../secret.png", 0, "beagle"]]}))
    (tmp_path / "secret.png").write_bytes(b"x")
    assert main(["convert", "coop", str(source), str(tmp_path / "other")]) == 1
    assert "no such image; give images=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("leaf", "{}", "not a file of LEAF"),
        ("leaf", "[", "not a file of LEAF"),
        ("coop", "{}", "not a split file of CoOp"),
    ],
)
def test_what_is_no_such_file(kind, text, says, tmp_path, capsys):
    (tmp_path / "x.json").write_text(text)
    assert main(["convert", kind, str(tmp_path / "x.json"), str(tmp_path / "out")]) == 1
    assert says in capsys.readouterr().err
    (tmp_path / "there.jsonl").write_text("")
    assert main(["convert", kind, str(tmp_path / "x.json"), str(tmp_path / "there.jsonl")]) == 1
    assert "is there already" in capsys.readouterr().err
