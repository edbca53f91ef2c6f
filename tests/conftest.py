"""Small real data, a feature store of the tests' own, and a random federation in float64 for the contract tests."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedvlm.adapters.base import Task
from fedvlm.core import Data
from fedvlm.data.source import EMOJI

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for test_kernels.py; Triton asks once, when it is first imported
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


RAGGED = ((30, 6, 7), (8, 0, 3), (20, 5, 4), (1, 1, 1), (13, 2, 0), (0, 4, 4))
# networks as small as they come: a contract is not about size
TINY = {"resnet": {"depth": 10, "width": 2}, "unet": {"width": 2, "levels": 1}, "lstm": {"hidden": 3, "embed": 2}}
TINY |= {name: {"context": 2} for name in ("prompt", "portfolio", "lowrank", "outsiders")}
TINY["outsiders"] |= {"count": 3}
NOUNS = ("cloud", "anvil", "treaty", "moss")
PATCHED = ("transported", "background", "gallop")  # they read patches
TINY |= {name: {"context": 2} for name in (*PATCHED, "conditional", "lapt")}
TINY["gallop"] |= {"wholes": 2, "details": 2, "nearest": 2}
TINY["lapt"] |= {"count": 3}
LAYERED = ("lora", "visual", "maple", "mma", "crossed")  # they change layers of both towers
TINY |= {"lora": {"rank": 2, "projections": ("q", "k", "v", "out")}, "visual": {"tokens": 2, "deep": True}}
TINY |= {"maple": {"depth": 2}, "mma": {"size": 3}, "crossed": {"context": 2, "tokens": 2, "size": 3}}


@lru_cache
def tiny_tower():
    """A CLIP image tower with random weights, 8 pixels wide."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    from fedvlm.backbones.hf import ImageTower

    config = CLIPVisionConfig(
        hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
        projection_dim=16,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = CLIPVisionModelWithProjection(config).eval().requires_grad_(False)
    look = SimpleNamespace(image_mean=(0.5, 0.4, 0.3), image_std=(0.2, 0.3, 0.2))
    return ImageTower(model.vision_model, model.visual_projection, look)


@lru_cache
def tiny_reader():
    """A CLIP text tower with random weights, in float64."""
    from transformers import CLIPConfig, CLIPModel

    from fedvlm.backbones import load
    from fedvlm.backbones.text import TextTower

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model = CLIPModel(
            CLIPConfig(
                text_config=size | {"max_position_embeddings": 12, "vocab_size": 49408},
                vision_config=size,
                projection_dim=16,
            )
        )
    return TextTower.of(model.eval(), load("mini-clip").tokenizer).to(dtype=torch.float64)


@lru_cache
def tiny_clip(layers: int = 2):
    """A whole CLIP with random weights, two layers a tower and four patches, in float64."""
    from transformers import CLIPConfig, CLIPModel

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": layers, "num_attention_heads": 2}
    text = size | {"max_position_embeddings": 16, "vocab_size": 49408, "bos_token_id": 49406, "eos_token_id": 49407}
    draw = torch.Generator().manual_seed(9)
    with torch.random.fork_rng():
        torch.manual_seed(9)
        vision = size | {"hidden_size": 12, "image_size": 8, "patch_size": 4}
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).double()
    for weight in model.parameters():  # new norms are ones and zeros, which hide mistakes
        weight.data.add_(torch.randn(weight.shape, generator=draw, dtype=torch.float64) * 0.2)
    return model.eval().requires_grad_(False)


@lru_cache
def tiny_pair():
    from fedvlm.backbones import load
    from fedvlm.backbones.text import TextTower
    from fedvlm.backbones.vision import Both, VisionTop

    return Both(VisionTop.of(tiny_clip()), TextTower.of(tiny_clip(), load("mini-clip").tokenizer))


def layered(task: Task) -> tuple[Task, Data]:
    """Activations of four patches and a class token, and the class names as the tiny towers read them."""
    data, reader = random_data(task), tiny_pair().text
    lift = torch.randn(5 * 12, task.dim, generator=torch.Generator().manual_seed(4))
    phrases = tuple(f"a photo of a {name}" for name in task.classes)
    text = reader.features(reader.phrases(phrases))[0]
    task = task._replace(tower=tiny_pair(), text=text, phrases=phrases)
    return task, replace(data, x=(data.x.to(lift) @ lift.T).view(-1, 5, 12))


def example(adapter: str) -> tuple[Task, Data]:
    """A task and ragged data of the kind this adapter learns from."""
    task = random_task()
    if adapter in ("prompt", "portfolio", "lowrank", "outsiders"):
        return task._replace(tower=tiny_reader(), nouns=NOUNS), random_data(task)
    if adapter in LAYERED:
        return layered(task)
    if adapter in ("conditional", "lapt"):
        return task._replace(tower=tiny_reader(), nouns=NOUNS), random_data(task)
    if adapter in PATCHED:
        return task._replace(tower=tiny_reader()), patched(random_data(task))
    if adapter in ("resnet", "tower", "unet"):
        data = random_data(task, tuple(tuple(-(-n // 5) for n in cell) for cell in RAGGED))
        size = 16 if adapter == "resnet" else 8
        lift = torch.randn(3 * size**2, task.dim, generator=torch.Generator().manual_seed(4))
        shown = (128 + 40 * data.x.to(lift.dtype) @ lift.T).clamp(0, 255).to(torch.uint8).view(-1, 3, size, size)
        data = replace(data, x=shown, y=(shown[:, 0] > 128).to(torch.uint8) if adapter == "unet" else data.y)
        return (task._replace(tower=tiny_tower()) if adapter == "tower" else task), data
    if adapter == "lstm":
        data = random_data(task)
        before = torch.stack([(data.y + k) % len(task.classes) for k in range(6)], dim=1)
        return task, replace(data, x=before.to(torch.uint8))
    return task, random_data(task)


def patched(data: Data) -> Data:
    """Each embedding, and six patches around it, in halves as they are stored."""
    noise = torch.randn(len(data.y), 7, data.x.shape[1], generator=torch.Generator().manual_seed(6))
    noise[:, 0] = 0
    return replace(data, x=F.normalize(data.x[:, None].to(noise) + 0.3 * noise, dim=-1).half())


def random_data(task: Task, sizes=RAGGED) -> Data:
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
