"""Fixtures: small real images, a feature store of the tests' own, and float64."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for test_kernels.py; Triton reads it when it is first imported

from helpers import CLASSES, STYLES, InProcess  # after the variables above: it imports all of fedvlm

from fedvlm.data.source import EMOJI
from fedvlm.towers import products


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "also put a part of your own through the contract: --part adapter=path/to/idea.py (again for more)"
    parser.addoption("--all", action="store_true", help="the contract of every combination, also the similar ones")
    parser.addoption("--part", action="append", default=[], metavar="KIND=FILE", help=text)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test first (mypy, a minute): at the end it would keep one core waiting for the other."""
    items.sort(key=lambda item: item.path.name != "test_style.py")


@pytest.fixture(scope="session", autouse=True)
def own_store(tmp_path_factory):
    """Keeps the user's feature store and runs untouched; the processes of pytest-xdist share one store."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["FEDVLM_CACHE"] = str(shared / "cache")
    os.environ["FEDVLM_RUNS"] = str(tmp_path_factory.mktemp("runs"))
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """A folder of domain/class/image: some of the embedded emoji, ten of each class."""
    root = tmp_path_factory.mktemp("emoji")
    with zipfile.ZipFile(EMOJI) as box:
        for style in STYLES:
            for label in CLASSES:
                for name in sorted(n for n in box.namelist() if n.startswith(f"{style}/{label}/"))[:10]:
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    (root / name).write_bytes(box.read(name))
    return root


@pytest.fixture
def bytes_only(monkeypatch) -> None:
    """engine=loopback with its clients in this process: all goes through folders and bytes, without starting Python for
    each client (test_engines.py does that)."""
    monkeypatch.setattr("fedvlm.federation.engines.loopback.Worker", InProcess)


@pytest.fixture
def double():
    """Engines are compared in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=["oneDNN", "MKL"])
def library(request, monkeypatch) -> str:
    """The products by either library. A model that was loaded has laid out its weights for one of them already."""
    if request.param == "MKL":
        monkeypatch.setattr(products, "onednn", lambda: None)
    elif products.onednn() is None:
        pytest.skip("a torch without oneDNN's operator")
    return request.param
