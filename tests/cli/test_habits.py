"""Habits of other tools: python -m, --quiet, --json, --log, arrays, tables with columns of their own, short names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from run_folders import many, write

import fedvlm
from fedvlm import api, backbones
from fedvlm.cli import main
from fedvlm.config.config import resolve
from fedvlm.core.hub_names import WEIGHTS
from fedvlm.data.pool import Pools
from fedvlm.data.source import open_source
from fedvlm.errors import FedvlmError
from fedvlm.system import console


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "fedvlm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fedvlm.__version__


@pytest.mark.parametrize(
    "words", [["compare", "runs"], ["ls", "runs"], ["show", "runs/fedavg-art-1-3"], ["ls", "methods"]]
)
def test_json_is_all_that_is_printed(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    many(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDVLM_RUNS", str(tmp_path / "runs"))
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tables"] and all(t["rows"] for t in found["tables"])
    if words[0] == "compare":
        (table,) = found["tables"]
        assert {r["method"]: r["G"] for r in table["rows"]}["fedot"] == 76.5 and table["answer"][0].startswith(
            "fedot is"
        )
    assert console.Mode.collected is None


def test_quiet_prints_results_only(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "fedavg", f"data={images}", "partition=iid", "clients=60", "rounds=1"]
    assert main([*words, f"out={tmp_path / 'a'}"]) == 0
    loud = capsys.readouterr()
    assert main([*words, f"out={tmp_path / 'b'}", "--quiet", "--log", str(tmp_path / "log.txt")]) == 0
    quiet = capsys.readouterr()
    assert "fewer than 10 test images" in loud.err and quiet.err == ""
    assert "method " in quiet.out and f"run folder: {tmp_path / 'b'}" in quiet.out and len(quiet.out) < len(loud.out)
    log = (tmp_path / "log.txt").read_text()
    assert "fewer than 10 test images" in log and "run folder: " in log and "\x1b" not in log and "method " in log


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "fedavg", "art")
    assert main(["compare", str(tmp_path), "--log", str(tmp_path / "no" / "log.txt")]) == 1
    assert "--log " in capsys.readouterr().err


def test_arrays_are_predicted_as_their_images(images: Path, tmp_path: Path) -> None:
    run = api.run("fedavg", data=str(images), rounds=1, out=str(tmp_path / "run"))
    paths = sorted((images / "noto").rglob("*.png"))[:3]
    pixels = [np.asarray(Image.open(p).convert("RGB").resize((32, 32))) for p in paths]
    wanted = run.predict([Image.fromarray(x) for x in pixels])
    assert run.predict(pixels) == wanted == run.predict(np.stack(pixels))
    assert run.predict(pixels[0]) == wanted[:1] == run.predict(np.stack(pixels)[:1].transpose(0, 3, 1, 2))
    assert run.predict(pixels[0].astype(np.float32) / 255) == wanted[:1]
    with pytest.raises(FedvlmError, match="an image must be"):
        run.predict(np.zeros(3))


@pytest.fixture
def hospital(images: Path, tmp_path: Path) -> Path:
    """A table of somebody's own: file; diagnosis; hospital; path (which is another thing)."""
    lines = ["file;diagnosis;hospital;path"]
    for k, picture in enumerate(sorted(images.rglob("*.png"))[:40]):
        shutil.copy(picture, tmp_path / f"{k}.png")
        lines.append(f"{k}.png;{picture.parent.name};{picture.parent.parent.name};pathway {k}")
    (tmp_path / "own.csv").write_text("\n".join(lines))
    return tmp_path / "own.csv"


def test_a_table_with_columns_of_its_own(hospital: Path) -> None:
    source = open_source(str(hospital), columns=("path:file", "label:diagnosis", "client:hospital"))
    assert (
        len(source.items) == 40
        and source.items[0].path == "0.png"
        and {i.client for i in source.items} <= set(source.domains)
    )
    with pytest.raises(FedvlmError, match=r"no column label; .*columns=label:file"):
        open_source(str(hospital))
    with pytest.raises(FedvlmError, match=r"has no column diagnose; did you mean diagnosis\?"):
        open_source(str(hospital), columns=("label:diagnose",))
    with pytest.raises(FedvlmError, match="expected NAME:COLUMN, with one of path, label"):
        open_source(str(hospital), columns=("lable:diagnosis",))


def test_all_errors_of_a_table_are_told_at_once(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "bad.csv").write_text("path,label\na.png,cat\na.png,dog\nb.png,\n../c.png,cat\nd.png,dog\n")
    with pytest.raises(FedvlmError) as told:
        open_source(str(tmp_path / "bad.csv"))
    for words in (
        "row 4 has no label",
        "rows 2 and 3 are the same image",
        "row 5: ",
        "row 4, 6 names a file that is not there",
    ):
        assert words in str(told.value)


def test_short_names_stand_for_weights_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(backbones.form_of(name) == "hub" for name in WEIGHTS)
    asked = list[tuple[str, bool]]()

    def folder_of(name: str, fetch: bool) -> Path:
        asked.append((name, fetch))
        raise FedvlmError("no network")

    monkeypatch.setattr("fedvlm.backbones.model_folder.folder_of", folder_of)
    with pytest.raises(FedvlmError, match="no network"):
        backbones.load("clip-b16")
    assert asked == [("openai/clip-vit-base-patch16", True)]
    assert main(["ls", "backbones"]) == 0
    text = capsys.readouterr().out
    assert all(name in text and about.licence in text for name, about in WEIGHTS.items())


def test_a_broken_image_is_named_once(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However many methods read the data, each in a view of its own."""
    data = tmp_path / "data"
    shutil.copytree(images, data)
    (next(data.rglob("*.png")).with_name("broken.png")).write_bytes(b"\x89PNG")
    pools = Pools()
    for method in ("fedavg", "fedlora", "fedavg"):
        pools.encode(resolve(method, {"data": str(data)}))
    assert capsys.readouterr().err.count("left out: ") == 1
