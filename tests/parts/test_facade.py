"""`fedvlm.parts` is all that an author of a part imports: light, typed, described, and enough for every part there is a
page or an example of."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedvlm
from fedvlm import parts

ROOT = Path(__file__).parents[2]
ALLOWED = {"fedvlm", "fedvlm.parts"}
IMPORT = re.compile(r"^\s*(?:from|import) (fedvlm[\w.]*)", re.MULTILINE)
FILES = {  # a private bias of the gate, a clipped mean, a calibrated score, weight decay, clients that fail
    "gate.py": '''"""A gate on the embedding, with a private bias."""
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.parts import Adapter, Params, Positive, Task, initial_classifier


@dataclass(frozen=True)
class Gate(Adapter):
    private: tuple[str, ...] = ("bias",)
    sharpness: Positive = 1.0  # of the gate

    def init(self, task: Task, seed: int) -> Params:
        zero = torch.zeros(task.dim)
        return {"head": initial_classifier(task, "text", seed), "gate": zero, "bias": zero.clone()}

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return 2 * x * (self.sharpness * (params["gate"] + params["bias"]))[:, None].sigmoid()

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * self.features(task, params, x) @ params["head"].mT
''',
    "clipped.py": '''"""The mean of updates of a bounded length."""
from dataclasses import dataclass

from fedvlm.parts import Cohort, Mean, Model, Positive, State


@dataclass(frozen=True)
class Clipped(Mean):
    most: Positive = 0.5  # length of the server's step in each parameter

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        after = super().round(model, state, cohort)
        steps = {k: after.shared[k] - v for k, v in state.shared.items()}
        short = {k: v * min(1.0, self.most / max(float(v.norm()), 1e-12)) for k, v in steps.items()}
        return after._replace(shared={k: v + short[k] for k, v in state.shared.items()})
''',
    "brier.py": '''"""The Brier score."""
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import one_hot

from fedvlm.parts import Additive, Model


@dataclass(frozen=True)
class Brier(Additive):
    lower_is_better: ClassVar[bool] = True
    percent: ClassVar[bool] = False

    def each(self, model: Model, logits: Tensor, y: Tensor) -> Tensor:
        return (logits.softmax(-1) - one_hot(y, logits.shape[-1])).square().sum(-1)
''',
    "decay.py": '''"""Weight decay towards the model that was sent."""
from dataclasses import dataclass

from fedvlm.parts import Gradients, Local, Message, Model, NotNegative, Params, anchor_of, with_proximal_term


@dataclass(frozen=True)
class Decay(Local):
    strength: NotNegative = 0.1  # 0 is plain training

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        return with_proximal_term(super().gradients(model, message, own), anchor_of(message), self.strength)
''',
    "flaky.py": '''"""Clients of which the first never trains."""
from collections.abc import Iterator

import numpy as np

from fedvlm.parts import Message, Reply, Serial


class Flaky(Serial):
    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
        yield from super().run(step, ids[1:] if step == "train" else ids, message, round, exchange)
''',
}


def test_it_is_imported_without_torch_and_has_every_name():
    code = "import sys, fedvlm.parts as p; print('torch' in sys.modules, 'numpy' in sys.modules); from fedvlm.parts import *"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        parts.nothing  # noqa: B018


def test_types_and_modules_are_those_of_the_names():
    """What a type checker sees is what is imported, and each class and function says what it is."""
    tree = ast.parse(inspect.getsource(parts))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = [(i.module, a.name, a.asname) for i in block.body if isinstance(i, ast.ImportFrom) for a in i.names]
    assert sorted(typed) == sorted((home, name, name) for home, names in parts._HOMES.items() for name in names)
    for name in parts.__all__:
        one = getattr(parts, name)
        if inspect.isclass(one) or inspect.isfunction(one):
            assert one.__doc__ and not one.__doc__.startswith(f"{name}("), name
    asked = (
        "Adapter Local Merge Metric Engine Backbone Source Format Params Batch Task Range Whole Count Positive Share"
    )
    assert set(asked.split()) <= set(parts.__all__)


def code() -> Iterator[tuple[str, str]]:
    """Code on pages, in examples and in texts of tests, with where it is."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        for text in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            yield page.name, text
    for file in sorted((ROOT / "examples").glob("*.py")):
        yield file.name, file.read_text(encoding="utf-8")
    for book in sorted((ROOT / "examples").glob("*.ipynb")):
        for cell in json.loads(book.read_text(encoding="utf-8"))["cells"]:
            yield book.name, "".join(cell["source"])
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{file.name}:{node.lineno}", node.value


def test_nothing_else_is_imported_by_parts_of_ones_own():
    found = [(where, text) for where, text in code() if re.search(r"^class \w+\(", text, re.MULTILINE)]
    assert len([where for where, text in found if "fedvlm.parts" in text]) > 30
    assert {
        f"{where}: {name}" for where, text in found for name in IMPORT.findall(text) if name not in ALLOWED
    } == set()


def test_five_parts_run_together(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    keys = {
        "adapter": "gate.py",
        "merge": "clipped.py",
        "metrics": "brier.py",
        "local": "decay.py",
        "engine": "flaky.py",
    }
    run = fedvlm.run("fedavg", data=images, unseen="noto", rounds=2, out="run", lr=0.01, most=0.01, **keys)
    first, last = run.rounds[1:]
    assert first["answered"] == first["asked"] - 1 and 0 < last["metrics"]["brier"]["shared"]["test"] < 2
    assert 0 < last["effects"]["update"] < 0.02 and set(run.parameters("twemoji")) == {"head", "gate", "bias"}
