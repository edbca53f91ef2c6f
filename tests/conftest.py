"""Small real data, a feature store of the tests' own, and a random federation in float64 for the contract tests."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedvlm.adapters.base import Task
from fedvlm.core import Data
from fedvlm.data.source import EMOJI

os.environ.setdefault("OMP_NUM_THREADS", "1")
STYLES = ("noto", "twemoji", "openmoji")
CLASSES = ("bird", "clock", "fruit", "hand", "train")


@pytest.fixture(scope="session", autouse=True)
def own_store(tmp_path_factory):
    """The user's feature store and runs stay as they are."""
    os.environ["FEDVLM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["FEDVLM_RUNS"] = str(tmp_path_factory.mktemp("runs"))
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """A folder of domain/class/image: some of the embedded emoji, ten a class."""
    root = tmp_path_factory.mktemp("emoji")
    with zipfile.ZipFile(EMOJI) as box:
        for style in STYLES:
            for label in CLASSES:
                for name in sorted(n for n in box.namelist() if n.startswith(f"{style}/{label}/"))[:10]:
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    (root / name).write_bytes(box.read(name))
    return root


@pytest.fixture
def double():
    """Engines are compared in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def random_task(classes: int = 5, dim: int = 16) -> Task:
    text = torch.randn(classes, dim, generator=torch.Generator().manual_seed(1))
    return Task(tuple(f"class {c}" for c in range(classes)), F.normalize(text, dim=-1), dim, 8.0)


def random_data(task: Task, sizes=((30, 6, 7), (8, 0, 3), (20, 5, 4), (1, 1, 1), (13, 2, 0), (0, 4, 4))) -> Data:
    """Ragged clients: one example, no validation, no test, no training rows at all."""
    draw = torch.Generator().manual_seed(2)
    cells = np.array(sizes)
    ends = cells.sum(1).cumsum()
    starts = ends - cells.sum(1)
    bounds = np.concatenate([starts[:, None], starts[:, None] + cells.cumsum(1)], axis=1)
    y = torch.randint(len(task.classes), (int(ends[-1]),), generator=draw)
    noise = torch.randn(int(ends[-1]), task.dim, generator=draw)
    x = F.normalize(task.names()[y].to(noise.dtype) + 0.7 * noise, dim=-1)
    return Data(x, y, bounds, np.arange(len(sizes)), seed=3, rounds=4)
