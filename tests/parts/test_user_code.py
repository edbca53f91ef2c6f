"""Parts of the user's own, each one file outside the package: an adapter, a local rule, a merge, two metrics, an engine.

Each goes through run, bench with two processes and two seeds, resume, predict, export and load from another folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedvlm
from fedvlm.cli import main
from fedvlm.errors import FedvlmError
from fedvlm.parts.metrics.macro_f1 import MacroF1
from fedvlm.training.folder import RunFolder

ADAPTER = '''"""A head with a private shift of the embedding."""
from dataclasses import dataclass

import torch
from helper_of_shift import shifted

from fedvlm.parts import Adapter, Task, initial_classifier


@dataclass(frozen=True)
class Shift(Adapter):
    private: tuple[str, ...] = ("shift",)
    strength: float = 1.0  # of the shift

    def init(self, task: Task, seed: int):
        return {"head": initial_classifier(task, "text", seed), "shift": torch.zeros(task.dim)}

    def logits(self, task: Task, params, x):
        return task.scale * shifted(x, self.strength * params["shift"]) @ params["head"].mT
'''
HELPER = "def shifted(x, shift):\n    return x + shift[:, None]\n"
LOCAL = '''"""Training with label smoothing towards the uniform distribution."""
from dataclasses import dataclass

from fedvlm.parts import Local, by_autograd


@dataclass(frozen=True)
class Smooth(Local):
    smoothing: float = 0.1

    def gradients(self, model, message, own):
        def loss(now, batch):
            logits = model.adapter.train_logits(model.task, now, batch)
            uniform = batch.mean(logits.logsumexp(-1) - logits.mean(-1))
            plain = model.adapter.loss(self.objective, logits, batch)
            return (1 - self.smoothing) * plain + self.smoothing * uniform

        return by_autograd(loss)
'''
MERGE = '''"""The mean, with the server moving only part of the way."""
from dataclasses import dataclass

from fedvlm.parts import Mean


@dataclass(frozen=True)
class Slow(Mean):
    part: float = 0.5  # of the way to the mean

    def round(self, model, state, cohort):
        after = super().round(model, state, cohort)
        shared = {k: v + self.part * (after.shared[k] - v) for k, v in state.shared.items()}
        return after._replace(shared=shared)
'''
CALIBRATION = '''"""Expected calibration error with 10 bins: not a mean over examples."""
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedvlm.parts import Additive


@dataclass(frozen=True)
class Calibration(Additive):
    lower_is_better: ClassVar[bool] = True

    def shape(self, model):
        return (10,)

    def each(self, model, logits, y):
        confidence, predicted = logits.softmax(-1).max(-1)
        bins = torch.nn.functional.one_hot((confidence * 10).long().clamp(max=9), 10)
        return bins * ((predicted == y).to(logits.dtype) - confidence)[..., None]

    def result(self, statistic, count):
        with np.errstate(invalid="ignore"):
            return np.abs(statistic).sum(-1) / count
'''
RANKED = '''"""Mean average precision over classes, which needs all predictions of a client at once."""
from dataclasses import dataclass

import numpy as np
import torch

from fedvlm.parts import PerClient


@dataclass(frozen=True)
class AveragePrecision(PerClient):
    def client(self, view):
        y, scores = view.labels(), view.logits().softmax(-1)
        found = []
        for c in y.unique():
            hits = (y == c)[scores[:, c].argsort(descending=True)].double()
            found.append((hits * hits.cumsum(0) / torch.arange(1, len(y) + 1)).sum() / hits.sum())
        return torch.tensor(float(torch.stack(found).mean()) if found else -1.0, dtype=torch.get_default_dtype())

    def result(self, statistic, count):
        return np.where(statistic < 0, np.nan, statistic)
'''
ENGINE = '''"""Clients one by one, each in a thread of a pool."""
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fedvlm.parts import Stacked


class Threads(Stacked):
    @classmethod
    def open(cls, job):
        return cls(job.method, job.data, 1, job.folder / "rows.bin", job.log, job.device)

    def run(self, step, ids, message, round, exchange):
        def one(i):
            return list(super(Threads, self).run(step, np.array([i]), message, round, exchange))

        with ThreadPoolExecutor(2) as pool:
            for replies in pool.map(one, np.sort(ids)):
                yield from replies
'''
FILES = {
    "shift.py": ADAPTER,
    "helper_of_shift.py": HELPER,
    "smooth.py": LOCAL,
    "slow.py": MERGE,
    "calibration.py": CALIBRATION,
    "average_precision.py": RANKED,
    "threads.py": ENGINE,
}
KINDS = {
    "adapter": "adapter=shift.py",
    "local": "local=smooth.py",
    "merge": "merge=slow.py",
    "metric": "metrics=calibration.py,average_precision.py",
    "engine": "engine=threads.py",
}


@pytest.fixture
def ideas(tmp_path, monkeypatch) -> Path:
    """A folder of the user's own files, and the working directory."""
    folder = tmp_path / "ideas"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_in_one_file_runs_resumes_predicts_and_is_exported(kind, ideas, images, tmp_path, monkeypatch):
    words = ["fedavg", KINDS[kind], f"data={images}", "unseen=noto", "lr=0.05", "schedule=constant", "rounds=3"]
    for name in ("whole", "cut"):
        assert main(["run", *words, f"out={tmp_path / name}"]) == 0
    cut_after(RunFolder(tmp_path / "cut"), 2)
    for name in FILES:  # the run folder alone must do from here on
        (ideas / name).unlink()
    monkeypatch.chdir(tmp_path)
    assert main(["resume", str(tmp_path / "cut")]) == 0
    for name in ("state.safetensors", "rows.bin"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()

    picture = next((images / "noto" / "bird").glob("*.png"))
    assert main(["predict", str(tmp_path / "whole"), str(picture), "--client", "twemoji"]) == 0
    assert main(["export", str(tmp_path / "whole"), "--client", "twemoji", "--out", str(tmp_path / "model")]) == 0
    expected = fedvlm.Run(tmp_path / "whole").predict([picture], client="twemoji")
    shutil.move(tmp_path / "model", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "whole")
    assert fedvlm.load(tmp_path / "elsewhere").predict(picture) == expected


def test_all_of_them_together_in_several_processes_and_elsewhere(ideas, images, tmp_path, monkeypatch):
    """bench with two processes and two seeds, and an export that another process loads after the files are gone."""
    words = ["fedavg", *KINDS.values(), f"data={images}", "unseen=noto", "lr=0.05", "rounds=2"]
    assert main(["bench", *words, "seeds=1,2", "jobs=2", f"out={tmp_path / 'bench'}"]) == 0
    assert len(fedvlm.runs(tmp_path / "bench")) == 4  # with zero-shot
    first = fedvlm.runs(tmp_path / "bench")[0]
    assert first.rounds[-1]["metrics"].keys() == {"calibration", "average_precision"}
    for name in FILES:
        (ideas / name).unlink()
    monkeypatch.chdir(tmp_path)
    picture = next((images / "noto" / "bird").glob("*.png"))
    expected = first.predict([picture], client="twemoji")
    first.export(tmp_path / "elsewhere", client="twemoji")
    shutil.rmtree(tmp_path / "bench")
    code = "import fedvlm, sys; print(fedvlm.load(sys.argv[1]).predict(sys.argv[2]))"
    call = [sys.executable, "-c", code, str(tmp_path / "elsewhere"), str(picture)]
    printed = subprocess.run(call, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert printed.strip() == str(expected)


def cut_after(run: RunFolder, round: int) -> None:
    """The folder as it was when the process died after this round."""
    record = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps(record | {"result": None}))
    again = fedvlm.run(
        "fedavg", **{k: v for k, v in record["given"].items() if k not in ("out", "rounds")}, rounds=round,
        out=str(run.folder.parent / "short"),
    )  # fmt: skip
    state, _ = again.files.load()
    run.save(state, round)


def test_metrics_that_are_no_means_are_right(ideas, images, tmp_path):
    """Against values computed from the run's own logits."""
    run = fedvlm.run(
        "fedavg", data=images, unseen="noto", rounds=1, metrics="calibration.py,average_precision.py,ece,macro_f1",
        out=tmp_path / "run",
    )  # fmt: skip
    from sklearn.metrics import average_precision_score, f1_score

    outputs = load_file(run.folder / "outputs.safetensors")
    found = run.rounds[-1]["metrics"]
    names, values = run.record.clients, {"calibration": [], "ece": [], "average_precision": [], "macro_f1": []}
    for i, name in enumerate(names):
        mine = outputs["client"] == i
        p, y = outputs["shared.logits"][mine].softmax(-1).double().numpy(), outputs["label"][mine].numpy()
        if name == "noto":
            assert found["calibration"]["newcomer"]["test"] == pytest.approx(calibration(p, y, 10), abs=1e-5)
            continue
        values["calibration"].append(calibration(p, y, 10))
        values["ece"].append(calibration(p, y, 15))
        values["average_precision"].append(np.mean([average_precision_score(y == c, p[:, c]) for c in np.unique(y)]))
        values["macro_f1"].append(f1_score(y, p.argmax(1), average="macro", zero_division=0))
    for metric, each in values.items():
        assert found[metric]["personal"]["test"] == pytest.approx(np.mean(each), abs=1e-5), metric
    seen = torch.isin(outputs["client"], torch.tensor([names.index(n) for n in names if n != "noto"]))
    p, y = outputs["shared.logits"][seen].softmax(-1).double().numpy(), outputs["label"][seen].numpy()
    assert found["ece"]["personal"]["test_pooled"] == pytest.approx(calibration(p, y, 15), abs=1e-5)
    assert "calibration" in str(run.table())


def test_macro_f1_leaves_out_classes_that_are_neither_there_nor_predicted():
    """By hand and by scikit-learn, of a client that has three of five classes and is told a fourth."""
    from sklearn.metrics import f1_score

    y, predicted = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([0, 0, 1, 1, 3, 2])
    model = SimpleNamespace(task=SimpleNamespace(classes=tuple("abcde")))
    counts = MacroF1().each(model, torch.nn.functional.one_hot(predicted, 5).double(), y).sum(0, keepdim=True)
    (found,) = MacroF1().result(counts.numpy(), np.array([6]))
    assert found == pytest.approx((4 / 5 + 2 / 4 + 1 + 0) / 4)
    assert found == pytest.approx(f1_score(y, predicted, labels=[0, 1, 2, 3], average="macro"))


def calibration(p: np.ndarray, y: np.ndarray, bins: int) -> float:
    confidence = p.max(1)
    which = np.minimum((confidence * bins).astype(int), bins - 1)
    error = (p.argmax(1) == y) - confidence
    return float(sum(abs(error[which == b].sum()) for b in range(bins)) / len(y))


def test_a_run_does_not_follow_later_edits(ideas, images, tmp_path):
    """Before, `predict` resolved today's recipe and today's code again, without a word."""
    (ideas / "mine.yaml").write_text("like: fedavg\nadapter: shift.py\nsettings: {lr: 0.2, rounds: 2}\n")
    run = fedvlm.run("mine.yaml", data=images, unseen="noto", out=tmp_path / "run")
    picture = next((images / "noto" / "bird").glob("*.png"))
    before = run.predict([picture], client="twemoji")
    (ideas / "mine.yaml").write_text("like: fedclip\nsettings: {lr: 9.0}\n")
    (ideas / "helper_of_shift.py").write_text(HELPER.replace("x + shift", "x - 100 * shift"))
    assert fedvlm.Run(tmp_path / "run").predict([picture], client="twemoji") == before
    with pytest.raises(FedvlmError, match="holds another run"):
        fedvlm.run("mine.yaml", data=images, unseen="noto", out=tmp_path / "run")


def test_a_part_in_a_package_and_by_entry_point(images, tmp_path, monkeypatch):
    """`package.module` with relative imports, and a name that an installed package declares."""
    site = tmp_path / "site"
    (site / "lab" / "heads").mkdir(parents=True)
    (site / "lab" / "__init__.py").write_text("")
    (site / "lab" / "heads" / "__init__.py").write_text("")
    (site / "lab" / "heads" / "shift.py").write_text(ADAPTER.replace("from helper_of_shift", "from ..maths"))
    (site / "lab" / "maths.py").write_text(HELPER)
    info = site / "lab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedvlm.adapters]\nlab-shift = lab.heads.shift\n")
    monkeypatch.syspath_prepend(str(site))
    keys = {"data": images, "unseen": "noto", "rounds": 1}
    one = fedvlm.run("fedavg", adapter="lab.heads.shift", out=tmp_path / "module", **keys)
    two = fedvlm.run("fedavg", adapter="lab-shift", out=tmp_path / "named", **keys)
    assert one.rounds[-1]["P"] == two.rounds[-1]["P"]
    assert (tmp_path / "module" / "code" / "adapter" / "lab" / "maths.py").is_file()
    monkeypatch.undo()
    code = "import fedvlm, sys; print(fedvlm.Run(sys.argv[1]).predict(sys.argv[2], client='twemoji'))"
    picture = next((images / "noto" / "bird").glob("*.png"))
    call = [sys.executable, "-c", code, str(tmp_path / "module"), str(picture)]
    assert subprocess.run(call, capture_output=True, check=True, cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = 1\n", "exactly one adapter"),
        ("import nothing_of_this_name\n", "does not import: ModuleNotFoundError"),
        ("def broken(:\n", "does not import: SyntaxError: invalid syntax ("),
        (ADAPTER.replace("from helper_of_shift import shifted", "") + "\n" + ADAPTER.split("@dataclass")[1].join(
            ["@dataclass", ""]).replace("Shift", "Other"), "exactly one adapter"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_part_is_answered(code, says, images, tmp_path, capsys):
    (tmp_path / "odd.py").write_text(code)
    assert main(["run", "fedavg", f"adapter={tmp_path / 'odd.py'}", f"data={images}", f"out={tmp_path / 'r'}"]) == 1
    assert says in capsys.readouterr().err


def test_a_recipe_finds_the_parts_beside_it(ideas, images, tmp_path, monkeypatch):
    (ideas / "mine.yaml").write_text(
        "like: fedavg\nadapter: shift.py\nsettings: {rounds: 1, metrics: [calibration.py, ece]}\n"
    )
    monkeypatch.chdir(tmp_path)
    run = fedvlm.run(str(ideas / "mine.yaml"), data=images, unseen="noto", out=tmp_path / "run")
    assert run.done and [m.name for m in run.record.metrics] == ["calibration", "ece"]


def test_metrics_have_keys_and_names_of_their_own(ideas, images, tmp_path):
    run = fedvlm.run("zero-shot", data=images, metrics="ece", **{"ece.bins": 5}, out=tmp_path / "run")
    assert run.record.metrics[0].settings == {"bins": 5}
    for wrong, says in (("auroc", "recorded in any case"), ("calibration.py,../ideas/calibration.py", "two metrics")):
        with pytest.raises(FedvlmError, match=says):
            fedvlm.run("zero-shot", data=images, metrics=wrong)
    from fedvlm.config.config import RECORDED
    from fedvlm.rounds.method import METRICS

    assert set(RECORDED) == set(METRICS)


def test_a_script_needs_no_main_guard(images, tmp_path):
    (tmp_path / "script.py").write_text(
        "import sys, fedvlm\nprint('begins')\n"
        f"fedvlm.bench(['zero-shot'], data={str(images)!r}, seeds=[1, 2], jobs=2, unseen='noto', out={str(tmp_path)!r})\n"
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("begins") == 1, done.stderr
