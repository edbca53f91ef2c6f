"""Names that others chose (clients, classes, files): never a path elsewhere, never a control sequence on a terminal."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from helpers import train_small
from PIL import Image
from rich.console import Console

from fedvlm.backbones import objects
from fedvlm.cli import main
from fedvlm.errors import FedvlmError
from fedvlm.predict import predictor
from fedvlm.system import console
from fedvlm.system.formatting import counted
from fedvlm.system.names import RESERVED, file_name, printable
from fedvlm.system.table import Table
from fedvlm.training.folder import RunFolder

HOSTILE = [
    "../../../x",
    "..",
    ".",
    "/etc/passwd",
    "C:\\x",
    "\\\\host\\share",
    "a\nb",
    "\x1b[2J",
    "con",
    "NUL.txt",
    "com1 .x",
    "",
    " ",
    "a" * 400,
    "é" * 200,
    "猫" * 150,
    "\U0001f600" * 100,
    "\ud800",
    "a\0b",
    "[/red]",
    "\u202egpj.exe",
    "~",
]


@pytest.mark.parametrize("name", HOSTILE, ids=repr)
def test_any_name_becomes_one_plain_file_name(name, tmp_path):
    made = file_name(name)
    assert Path(made).name == made and made not in ("", ".", "..") and not {"/", "\\", ":", "\0"} & set(made)
    assert len(f"0000-{made}.png".encode()) <= 255 and made.isprintable() and made.strip(" .") == made
    assert made.lower().split(".")[0].strip() not in RESERVED
    (tmp_path / made).write_text("x")
    assert [p.name for p in tmp_path.iterdir()] == [made]


def test_names_stay_apart_and_plain_ones_as_they_are():
    assert len({file_name(n) for n in HOSTILE}) == len(HOSTILE)
    assert len({file_name("é" * n) for n in range(90, 200)}) == 110
    for plain in ("photo", "Art Painting", "fedot-emoji-all-s50-0a1b2c3d", "x" * 100, "猫" * 60):
        assert file_name(plain) == plain


def test_printable():
    assert printable("a\r\nb\tc  d") == "a  b c  d" and printable("\x1b[31mred\x07") == "?[31mred?"
    assert printable("\u202eabc\ud800\u200b") == "?abc??" and printable("naïve – 猫 …") == "naïve – 猫 …"
    assert printable("x" * 400) == "x" * 400 and len(printable("x" * 5000)) == 1000
    short = printable("beginning and end", 7)
    assert len(short) == 7 and short.startswith("beg") and short.endswith("end") and "…" in short
    assert printable(ValueError("a\nb")) == "a b"


MARKUP = "runs/[/red]/[bold]x :smile:"


@pytest.mark.parametrize("terminal", [True, False])
def test_names_are_shown_as_they_are(terminal, monkeypatch, capsys):
    """rich read [/red] in a path as markup and ended the run, and :smile: as a picture."""
    stream = io.StringIO()
    shown = console.plain(file=stream, force_terminal=terminal, width=200, color_system=None)
    for name in ("out", "err"):
        monkeypatch.setattr(console, name, shown)
    console.note(MARKUP)
    console.warn(MARKUP)
    console.show(Table([MARKUP, "x\x1b[2J"], [{MARKUP: MARKUP, "x\x1b[2J": "y\ny"}], [MARKUP]))
    with console.progress(MARKUP, 3) as update:
        update(3, MARKUP)
    text = stream.getvalue() + capsys.readouterr().out
    assert text.count(MARKUP) >= 5 and "\x1b[2J" not in text and "y y" in text
    assert isinstance(console.out, Console)


def test_errors_are_shown_without_control_characters(tmp_path, capsys):
    assert main(["compare", f"{tmp_path}/a\x1b[2J\nfedvlm: all is well"]) == 1
    err = capsys.readouterr().err
    assert "\x1b" not in err and not any(line == "fedvlm: all is well" for line in err.splitlines())


@pytest.fixture(scope="module")
def done(images, tmp_path_factory) -> RunFolder:
    return train_small(images, tmp_path_factory.mktemp("names") / "run", rounds=1)


@pytest.mark.parametrize("name", ["../../../x", "/x", "a\x1b[2J\nb", "n" * 400, "[/red]"], ids=repr)
def test_a_hostile_client_stays_in_its_folder(name, done, images, tmp_path, capsys):
    folder = tmp_path / "a" / "b" / "c" / "received"
    shutil.copytree(done.folder, folder)
    record = json.loads((folder / "run.json").read_text())
    record["clients"][0], record["homes"] = name, {name: name}
    record["data"]["classes"][0] = name
    (folder / "run.json").write_text(json.dumps(record))
    before = {p for p in tmp_path.rglob("*") if folder not in p.parents}
    picture = next((images / "noto" / "bird").glob("*.png"))
    assert main(["export", str(folder), "--client", name]) == 0
    assert main(["predict", str(folder), str(picture), "--client", name, "--csv", str(tmp_path / "a" / "t.csv")]) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    after = {p for p in tmp_path.rglob("*") if folder not in p.parents}
    assert after - before == {tmp_path / "a" / "t.csv"}
    assert main(["export", str(folder), "--client", "nobody\x1b[2J"]) == 1
    assert "\x1b" not in capsys.readouterr().err


def test_classes_domains_and_files_with_long_names_run(images, tmp_path, capsys):
    """Most systems take 255 bytes, and 85 characters of Chinese are that long."""
    longest = {"noto": "é" * 100, "openmoji": "[b]$x$\\frac", "twemoji": "n" * 250}
    for style, name in longest.items():
        for label, other in {"bird": "猫" * 80, "clock": ":smile:"}.items():
            target = tmp_path / "data" / name / other
            target.mkdir(parents=True)
            for file in sorted((images / style / label).iterdir())[:6]:
                shutil.copy(file, target / f"{'f' * 200}-{file.name[:40]}")
    words = [
        "run",
        "fedot",
        f"data={tmp_path / 'data'}",
        "rounds=1",
        "unseen=[b]$x$\\frac",
        f"out={tmp_path / 'run[/b]'}",
    ]
    assert main(words) == 0
    picture = next((tmp_path / "data").rglob("*.png"))
    client = "é" * 100
    assert main(["predict", str(tmp_path / "run[/b]"), str(picture), "--client", client]) == 0
    assert "run[/b]" in capsys.readouterr().out


def test_masks_of_files_with_long_names(monkeypatch, tmp_path):
    from fedvlm.cli.commands import predict
    from fedvlm.core.tasks import SEGMENTATION

    class Model:
        def masks(self, paths: list[Path]) -> list[Image.Image]:
            return [Image.new("L", (2, 2))]

        class model:
            class adapter:
                task_type = SEGMENTATION

    predict.write_masks(Model(), [tmp_path / f"{'é' * 120}.png", tmp_path / "a:b.png"], tmp_path / "masks")
    assert len(list((tmp_path / "masks").iterdir())) == 2


def test_an_object_with_an_odd_name_stays_in_the_cache():
    path = objects.description("object:../../../../etc/passwd")
    assert path.parent.name == "objects" and ".." not in path.parts
    with pytest.raises(FedvlmError, match="was a Python object"):
        objects.load_object("object:../../../../etc/passwd")


def test_a_client_is_found_by_its_whole_name(done, tmp_path):
    """A client whose name is the safe form of another's is another client."""
    with pytest.raises(FedvlmError, match="no such client"):
        predictor.from_run(done, file_name("../x"))


def test_a_count_of_one_is_singular():
    assert [counted(n, "round") for n in (0, 1, 2, 1234)] == ["0 rounds", "1 round", "2 rounds", "1,234 rounds"]
