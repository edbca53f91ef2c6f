"""The same image more than once: counted and named before training, and on one side of the split."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from fedvlm import api
from fedvlm.cli import main
from fedvlm.config.config import resolve
from fedvlm.data.clients import federate
from fedvlm.data.duplicates import together, twins_of
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError


@pytest.fixture(scope="module")
def copied(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with 12 copies: eight in the same class and domain, three in another domain, one in another class."""
    root = tmp_path_factory.mktemp("copied") / "data"
    shutil.copytree(images, root)
    domains = sorted(p for p in root.iterdir())
    first, second = (sorted(p for p in domains[0].iterdir())[k] for k in (0, 1))
    pictures = sorted(first.iterdir())
    for k, picture in enumerate(pictures[:8]):
        shutil.copy(picture, first / f"copy-{k}{picture.suffix}")
    for k, picture in enumerate(sorted(second.iterdir())[:3]):
        shutil.copy(picture, domains[1] / second.name / f"other-{k}{picture.suffix}")
    shutil.copy(sorted(second.iterdir())[4], first / "mislabelled.png")
    return root


def splits(folder: Path, seed: int, **keys: object) -> dict[bytes, set[str]]:
    """Content → the parts of the split that its copies are in, over all clients."""
    setup = resolve("fedavg", {"data": str(folder), "seed": seed, **keys})
    pool = Pools().load(setup)
    found = federate(pool, setup.config, seed)
    out: dict[bytes, set[str]] = {}
    for low, a, b, high in found.data.bounds.tolist():
        for part, rows in (("train", range(low, a)), ("val", range(a, b)), ("test", range(b, high))):
            for k in rows:
                content = (folder / pool.source.items[found.items[k]].path).read_bytes()
                out.setdefault(content, set()).add(part)
    return out


def test_copies_are_on_one_side_of_the_split(copied: Path) -> None:
    torn = [sum(len(parts) > 1 for parts in splits(copied, seed, duplicates="keep").values()) for seed in (1, 2, 3)]
    assert sum(torn) > 5
    for seed in (1, 2, 3):
        assert all(len(parts) == 1 for parts in splits(copied, seed).values())


def test_copies_can_be_left_out(copied: Path, images: Path, tmp_path: Path) -> None:
    run = api.run("fedavg", data=str(copied), duplicates="drop", rounds=1, out=str(tmp_path / "run"))
    assert len(run.record.data.skipped) == 12
    assert all(why.startswith("a copy of ") for why in run.record.data.skipped.values())
    assert run.record.data.images == 12 + sum(p.is_file() for p in images.rglob("*")) - 12


def test_they_are_counted_and_named(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "fedavg", f"data={copied}", "rounds=1", f"out={tmp_path / 'run'}"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "12 images more than once (12 further files; 1 in several classes; 3 at several clients)" in told
    assert "such as " in told and "copy-0" in told and "same part of the split" in told


def test_without_copies_nothing_changes(images: Path) -> None:
    setups = [resolve("fedavg", {"data": str(images), "duplicates": d}) for d in ("group", "keep", "drop")]
    marks = {Pools().load(setup).fingerprint for setup in setups}
    assert len(marks) == 1


def test_a_copy_goes_to_train_where_one_of_them_is() -> None:
    twins = twins_of([b"a", b"b", b"a", b"c", b"a"])
    assert twins is not None and twins.tolist() == [0, 1, 0, 3, 0] and twins_of([b"a", b"b"]) is None
    assert together(np.array([2, 1, 1, 2, 0]), twins).tolist() == [0, 1, 0, 2, 0]
    assert together(np.array([2, 1]), None).tolist() == [2, 1]


def test_few_test_images_are_said(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "fedavg", f"data={images}", "partition=iid", "clients=60", "rounds=1", f"out={tmp_path / 'run'}"]
    assert main(words) == 0
    found = capsys.readouterr()
    assert "of 60 clients have fewer than 10 test images: one image is worth 10 points or more" in found.err
    record = api.Run(tmp_path / "run").record.finished.last
    known = sum(v["personal"]["test"] is not None for v in record["clients"].values())
    assert known < 60 and f"own clients is the mean over {known} of 60 clients, which have test images" in found.out


def test_a_torchvision_that_does_not_fit_is_named_where_the_backbone_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedvlm.backbones.model_folder import loading

    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms is missing')")
    (tmp_path / "torchvision-0.1.dist-info").mkdir()
    about = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n"
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text(about)
    with pytest.raises(FedvlmError, match="is it complete"), loading(tmp_path):
        raise ModuleNotFoundError("Could not import module 'CLIPModel'")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    assert importlib.metadata.version("torchvision") == "0.1"
    with (
        pytest.raises(FedvlmError, match=r"torchvision 0\.1 does not fit torch .*pip uninstall torchvision"),
        loading(tmp_path),
    ):
        raise ModuleNotFoundError("Could not import module 'CLIPModel'")
