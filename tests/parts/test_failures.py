"""Errors in parts of the user's own name the file that is being edited, the line, the part, the step, the client and the
round; only errors that are raised by fedvlm itself are called its defects."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from fedvlm.cli import main
from fedvlm.errors import FedvlmError, Refused
from fedvlm.federation.worker import told
from fedvlm.parts.failures import OwnPartFailed

ADAPTER = '''"""An adapter."""
from dataclasses import dataclass

import torch

from fedvlm.parts import Adapter, initial_classifier


@dataclass(frozen=True)
class Gate(Adapter):
    private: tuple[str, ...] = ("gate",)

    def init(self, task, seed):
        return {"head": initial_classifier(task, "text", seed), "gate": torch.ones(task.dim)}

    def logits(self, task, params, x):
        return task.scale * x * params["gate"][:, None] @ params["head"].mT
'''
FORGOTTEN = ADAPTER.replace('["gate"][:, None]', '["gate"]')  # works for one client
TRANSPOSED = (
    ADAPTER
    + """
    def train_logits(self, task, params, batch):
        return task.scale * batch.x * params["gate"][:, None] @ params["head"]
"""
)
TOO_SHORT = ADAPTER.replace('params["head"].mT', '(params["head"].mT)[..., :1]')  # fails in fedvlm's loss
NO_SEED = ADAPTER.replace('"text", seed', '"random", "seed"')  # fails in fedvlm's function
MERGE = '''"""A merge."""
from dataclasses import dataclass

from fedvlm.parts import Mean


@dataclass(frozen=True)
class Lost(Mean):
    def round(self, model, state, cohort):
        after = super().round(model, state, cohort)
        return after._replace(shared={"head": after.shared["head"] @ state.shared["head"]})
'''
METRIC = '''"""A metric."""
from dataclasses import dataclass

from fedvlm.parts import Additive


@dataclass(frozen=True)
class Brier(Additive):
    def each(self, model, logits, y):
        return logits.sum(-1)

    def result(self, statistic, count):
        return statistic / count["all"]
'''
ENGINE = '''"""An engine."""
from fedvlm.parts import Serial


class Flaky(Serial):
    def run(self, step, ids, message, round, exchange):
        raise ValueError(f"no link in round {round}")
'''
LOCAL = '''"""A local rule."""
from dataclasses import dataclass

from fedvlm.parts import Local


@dataclass(frozen=True)
class Decay(Local):
    decay: float = 0.1

    def __post_init__(self):
        if self.decay < 0:
            raise ValueError("a decay below 0")
'''


@pytest.fixture
def failed(tmp_path, images, monkeypatch, capsys):
    """Runs a part of the given text, and returns what is said."""
    for domain in ("noto", "twemoji", "openmoji"):  # of different sizes
        for folder in sorted((images / domain).iterdir())[: 2 if domain == "noto" else 3]:
            shutil.copytree(folder, tmp_path / "data" / domain / folder.name)
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)

    def call(kind: str, text: str, *words: str) -> str:
        Path(f"mine/{kind}.py").write_text(text, encoding="utf-8")
        key = "metrics" if kind == "metric" else kind
        given = ["data=data", "unseen=openmoji", "rounds=1", "out=run", "partition=domain"]
        assert main(["run", "fedavg", f"{key}=mine/{kind}.py", *given, *words]) == 1
        said = capsys.readouterr().err
        assert "defect" not in said or "defect of fedvlm" in said
        return said[said.index("fedvlm: ") :]

    return call


def line_of(text: str, what: str) -> int:
    return next(k for k, line in enumerate(text.splitlines(), 1) if what in line)


@pytest.mark.parametrize("words", [["engine=serial"], ["engine=stacked"], ["workers=2"], ["engine=loopback"]])
def test_every_engine_says_where_an_adapter_failed(failed, words):
    said = " ".join(failed("adapter", TRANSPOSED, *words).split())
    line = line_of(TRANSPOSED, "* batch.x")
    place = f"{Path('mine/adapter.py')}:{line}: RuntimeError: "
    assert "adapter=mine/adapter.py failed in step train, round 1, client " in said and place in said
    assert 'return task.scale * batch.x * params["gate"][:, None] @ params["head"]' in said
    assert 'params["head"] is (1, ' in said and "batch.x is (1, " in said and 'params["gate"] is (1, ' in said
    assert any(f"client {name}, " in said for name in ("noto", "twemoji")) and "defect" not in said


STEPS = {  # the first in which several clients are side by side
    "engine=stacked": "step score, round 0, clients openmoji, twemoji, noto",
    "--dry": "step train, round 0, clients twemoji, noto",
}


@pytest.mark.parametrize("word", STEPS)
def test_a_forgotten_client_axis_is_told(failed, word):
    """The commonest mistake: each client alone works. --dry tries two clients of different size."""
    said = failed("adapter", FORGOTTEN, word)
    assert f"{STEPS[word]}, {Path('mine/adapter.py')}:{line_of(FORGOTTEN, 'return task')}: RuntimeError: " in said
    clients = STEPS[word].count(", ") - 1
    assert f"x is ({clients}, " in said and f'params["gate"] is ({clients}, ' in said
    assert "works alone" in said and "defect" not in said


def test_dry_trains_with_what_the_merge_sends(failed, capsys):
    """SCAFFOLD's server sends a control variate beside the model."""
    assert main(["run", "scaffold", "data=data", "unseen=openmoji", "partition=domain", "--dry"]) == 0
    down = [re.findall(r"([\d.]+) kB down", capsys.readouterr().out)]
    assert main(["run", "fedavg", "data=data", "unseen=openmoji", "partition=domain", "--dry"]) == 0
    down.append(re.findall(r"([\d.]+) kB down", capsys.readouterr().out))
    assert float(down[0][0]) == pytest.approx(2 * float(down[1][0]), rel=0.1)


CASES = {
    "a merge": ("merge", MERGE, [], "in round 1", 'after.shared["head"] @', 'after.shared["head"] is ('),
    "a metric": ("metric", METRIC, [], "in the evaluation of round 0", 'count["all"]', "statistic is ("),
    "an engine": ("engine", ENGINE, [], "in the evaluation of round 0", "no link in", "no link in round 0"),
    "a setting": ("local", LOCAL, ["decay=-1"], "making the local from its settings", "a decay below 0", "ValueError"),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_on_the_server_are_named_too(failed, name):
    kind, text, words, doing, source, more = CASES[name]
    said = failed(kind, text, *words)
    assert doing in said and f"{Path('mine') / kind}.py:{line_of(text, source)}: " in said
    assert source in said and more in said and "defect" not in said


def test_what_fails_in_our_code_may_be_our_defect(failed):
    """A result that does not fit, and a function that was called with what it does not take: both sides are named."""
    said = failed("adapter", TOO_SHORT)
    assert "step train, round 1, client" in said or "step score, round 0, client" in said
    assert "failed in fedvlm/" in said and "what adapter=mine/adapter.py returned may not fit" in said
    said = failed("adapter", NO_SEED)
    assert f"{Path('mine/adapter.py')}:{line_of(NO_SEED, 'initial_classifier(')}: " in said
    assert "raised in fedvlm/core/" in said and "defect of fedvlm, unless" in said


def test_an_error_without_parts_of_the_users_own_is_our_defect(failed, monkeypatch, capsys):
    """The last frame decides, also under a library's."""
    monkeypatch.setattr("fedvlm.parts.user_code.homes", {})
    words = ["run", "fedavg", "data=data", "unseen=openmoji", "rounds=1"]
    monkeypatch.setattr("fedvlm.training.train.count_of", lambda _: torch.zeros(2) @ torch.zeros(3))
    assert main([*words, "out=a"]) == 1
    said = capsys.readouterr().err
    assert f"({__file__}:" in said and "defect" not in said
    monkeypatch.setattr("fedvlm.training.train.count_of", None)
    assert main([*words, "out=b"]) == 1
    said = capsys.readouterr().err
    assert re.search(r"TypeError: .* \(fedvlm/training/train\.py:\d+; this is a defect of fedvlm\)", said)


@pytest.mark.parametrize(
    ("text", "line"), [("import torch\n\nimport nothing_of_this_name\n", 3), ("x = 1\nx = (\n", 2)]
)
def test_an_import_names_the_file_that_is_edited(failed, text, line):
    assert f"({Path('mine/adapter.py')}:{line})" in failed("adapter", text)


def test_a_site_tells_of_an_error_only_what_does_not_depend_on_its_data(capsys):
    for error in (OwnPartFailed("x is (1, 32, 8)"), ValueError("32 rows"), FedvlmError("32 rows"), Refused("/32")):
        assert told(error, "train") == "failed (the site's log says more)" and "32" in capsys.readouterr().err
    assert told(Refused("no secure sum"), "train") == "no secure sum"
    assert told(ValueError("32 rows"), "train", rehearsal=True) == "ValueError: 32 rows"
