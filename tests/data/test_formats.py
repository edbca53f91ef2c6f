"""Formats of data: each is one file, found by its name or by an entry point, and the one on the page works as it stands."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedvlm.cli import main
from fedvlm.config import catalogue
from fedvlm.data import format
from fedvlm.data.images import decode
from fedvlm.data.source import open_source
from fedvlm.errors import FedvlmError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs the package lab with this format, under the name that the page gives it."""

    def install(text: str) -> None:
        (tmp_path / "site" / "lab").mkdir(parents=True)
        (tmp_path / "site" / "lab" / "__init__.py").touch()
        (tmp_path / "site" / "lab" / "npz.py").write_text(text, encoding="utf-8")
        groups = tomllib.loads("".join(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)))["project"]["entry-points"]
        info = tmp_path / "site" / "lab-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
        entries = [f"{name} = {value}" for name, value in groups["fedvlm.formats"].items()]
        (info / "entry_points.txt").write_text("\n".join(["[fedvlm.formats]", *entries]))
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.chdir(tmp_path)
        forget()

    yield install
    monkeypatch.undo()
    forget()


def forget() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "lab"]:
        del sys.modules[name]
    for kept in (format.known, format.decoders, format.image_endings):
        kept.cache_clear()


def on_the_page() -> str:
    return re.findall(r"```python\n# npz\.py\n(.*?)```", PAGE, re.DOTALL)[0]


def write_scans(path: Path) -> None:
    random = np.random.default_rng(0)
    y, site = np.tile(["cat", "dog"], 30), np.repeat(["north", "south", "east"], 20)
    x = random.integers(0, 256, (60, 12, 12, 3)).astype(np.uint8) // 2 + 120 * (y == "dog")[:, None, None, None]
    np.savez(path, x=x.astype(np.uint8), y=y, site=site)


def test_the_format_on_the_page_is_installed_and_used(installed, tmp_path, capsys):
    """30 lines and no edit: listed, recognised, asked for by name, and trained on."""
    text = on_the_page()
    assert len([line for line in text.splitlines() if line]) <= 30
    installed(text)
    write_scans(tmp_path / "scans.npz")
    assert main(["ls", "data"]) == 0 and "from lab.npz" in capsys.readouterr().out
    source = open_source("scans.npz")
    assert source.domains == ["east", "north", "south"] and source.classes == ["cat", "dog"] and source.format == "npz"
    (tmp_path / "scans.npz").rename(tmp_path / "scans")
    assert open_source("npz:scans").items == source.items
    assert main(["run", "fedavg", "data=npz:scans", "unseen=south", "rounds=1", "out=run"]) == 0
    assert format.absolute("npz:scans") == f"npz:{tmp_path / 'scans'}" and format.absolute("emoji") == "emoji"


def test_an_error_in_a_format_names_its_line(installed, tmp_path):
    text = on_the_page()
    installed(text)
    np.savez(tmp_path / "scans.npz", x=np.zeros((2, 8, 8, 3), np.uint8), y=["a", "b"])
    line = 2 + text[: text.index('found["site"]')].count("\n") - 1
    with pytest.raises(FedvlmError, match=rf"format=npz failed in opening data=scans\.npz, .*npz\.py:{line}: KeyError"):
        open_source("scans.npz")


def test_image_files_of_a_further_kind_lie_in_folders(installed, tmp_path):
    """A format may decode a kind of file; one whose package is missing says so before anything is read."""
    code = '''"""Grey images of 64 bytes."""
from PIL import Image

from fedvlm.parts import Format


class Grey(Format):
    endings = (".grey",)

    def picture(self, data, most_pixels):
        return Image.frombytes("L", (8, 8), data) if len(data) == 64 else None
'''
    installed(code)
    for label, value in {"dark": 10, "light": 200}.items():
        (tmp_path / "scans" / label).mkdir(parents=True)
        (tmp_path / "scans" / label / "0.grey").write_bytes(bytes([value] * 64))
    source = open_source("scans")
    assert [i.path for i in source.items] == ["dark/0.grey", "light/0.grey"]
    assert [decode(data).getpixel((0, 0)) for _, data in source.read()] == [(10,) * 3, (200,) * 3]
    format.known()["npz"].lacks = lambda: "pip install greys"  # type: ignore[method-assign]
    with pytest.raises(FedvlmError, match=r"0\.grey is a NPZ file, which needs a further package: pip install greys"):
        open_source("scans")


def test_every_format_of_the_package_is_described():
    """Each file of the folder is one, and says in its first line what it reads."""
    files = {p.stem for p in (ROOT / "fedvlm" / "data" / "formats").glob("*.py")} - {"__init__"}
    assert files == set(format.known()) and list(format.known())[-1] == format.FOLDER
    assert all(info.summary.endswith((".", ")")) for info in catalogue.load().parts["format"].values())
