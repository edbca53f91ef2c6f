"""The Python API: runs and tables as objects, data and backbones as objects."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import CLASSES, STYLES
from PIL import Image

import fedvlm
from fedvlm.errors import FedvlmError
from fedvlm.training.planned_run import PlannedRun


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    return fedvlm.run("fedot", data=images, unseen="noto", rounds=2, out=tmp_path_factory.mktemp("api") / "run")


def test_importing_fedvlm_is_cheap_and_its_names_are_there():
    code = "import sys, fedvlm; assert 'torch' not in sys.modules; [getattr(fedvlm, n) for n in fedvlm.__all__]"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert callable(fedvlm.run) and callable(fedvlm.runs) and callable(fedvlm.bench)  # not modules of the same name


def test_a_run_is_an_object(run, images):
    assert run.done and [r["round"] for r in run.rounds] == [0, 1, 2]
    assert "fedot" in str(run.table()) and "fedot" in repr(run) and "<table" in run._repr_html_()
    assert run.figure().get_axes()
    picture = next((images / "noto" / "bird").glob("*.png"))
    (shared,), (own,) = run.predict(picture), run.predict([Image.open(picture)], client="twemoji")
    assert shared[0] in CLASSES and own[0] in CLASSES
    assert set(run.parameters()) == {"head"} and set(run.parameters("twemoji")) == {"head", "skew"}
    assert run.parameters("twemoji")["skew"].abs().max() > 0
    with pytest.raises(FedvlmError, match="no such client"):
        run.parameters("nobody")


def test_the_same_run_is_recognised(run, images, capsys):
    again = fedvlm.run("fedot", data=images, unseen="noto", rounds=2, out=run.folder)
    assert again.folder == run.folder and "not repeated" in capsys.readouterr().out


def test_bench_gives_one_table(images, tmp_path):
    found = fedvlm.bench(
        ["zero-shot", "fedavg"], data=images, unseen="noto", rounds=1, seeds=[1, 2], out=tmp_path, jobs=1
    )
    assert len(found) == 4 and len(found[:2]) == 2
    table = found.table()
    assert [r["method"] for r in table.rows] == ["zero-shot", "fedavg"] and "± " in str(table)
    assert len(fedvlm.runs(tmp_path)) == 4
    assert found.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_several_runs_are_refused_by_run(images):
    with pytest.raises(FedvlmError, match=r"2 runs; use fedvlm.bench"):
        fedvlm.run("fedavg", data=images, seeds=[1, 2])


def test_methods_and_describe():
    assert "fedot" in fedvlm.methods("fed*") and "ditto" not in fedvlm.methods("fed*")
    about = fedvlm.describe("fedot", lr=0.5)
    origins = {f"{r.home}.{r.key.name}": r.origin for r in about.keys}
    assert origins["local.lr"] == "command line" and origins["run.rounds"] == "tuned for mini-clip"
    assert "FedOT" in str(about) and "<table" in about._repr_html_()


def pictures(images):
    """Arrays as a user would have them: every image 32 pixels wide."""
    files = [
        (style, label, f) for style in STYLES for label in CLASSES for f in sorted((images / style / label).iterdir())
    ]
    x = np.stack([np.asarray(Image.open(f).convert("RGB").resize((32, 32))) for _, _, f in files])
    return x, [label for _, label, _ in files], [style for style, _, _ in files]


def test_images_as_arrays(images, tmp_path):
    x, labels, clients = pictures(images)
    data = fedvlm.dataset(x, labels, clients=clients)
    one = fedvlm.run("fedavg", data=data, unseen="noto", rounds=1, out=tmp_path / "a")
    assert sorted(one.record.clients) == sorted(STYLES) and one.record.data.classes == sorted(CLASSES)
    channels_first = torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255
    two = fedvlm.run("fedavg", data=(channels_first, labels, clients), unseen="noto", rounds=1, out=tmp_path / "b")
    assert one.rounds[-1]["P"] == two.rounds[-1]["P"]  # PNG is lossless, and floats are the same pixels


def test_a_torch_and_a_hugging_face_dataset(images, tmp_path):
    x, labels, _ = pictures(images)
    numbers = torch.tensor([sorted(CLASSES).index(c) for c in labels])

    class Pairs(torch.utils.data.Dataset):
        classes = sorted(CLASSES)

        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            return Image.fromarray(x[i]), int(numbers[i])

    class Label:
        names = sorted(CLASSES)

    class Columns:
        features = {"image": object(), "label": Label()}

        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            return {"image": Image.fromarray(x[i]), "label": int(numbers[i])}

    keys = {"rounds": 1, "partition": "iid", "clients": 3}
    one = fedvlm.run("fedavg", data=Pairs(), out=tmp_path / "a", **keys)
    two = fedvlm.run("fedavg", data=Columns(), out=tmp_path / "b", **keys)
    assert one.rounds[-1]["P"] == two.rounds[-1]["P"] and one.record.data.classes == sorted(CLASSES)


def test_embeddings_as_arrays(tmp_path):
    draw = np.random.default_rng(0)
    text = draw.normal(size=(3, 16))
    y = draw.integers(0, 3, 120)
    x = text[y] + 0.8 * draw.normal(size=(120, 16))
    data = fedvlm.dataset(x, y, classes=["a", "b", "c"], clients=[f"site-{i % 4}" for i in range(120)], text=text)
    run = fedvlm.run("fedot", data=data, unseen="site-3", rounds=3, out=tmp_path / "run")
    assert run.record.backbone.name == "embeddings" and run.rounds[-1]["P"] > 0.5
    found = fedvlm.bench(["fedavg", "fedclip"], data=data, seeds=[1], rounds=1, jobs=2, out=tmp_path / "bench")
    assert len(found) == 12  # leave-one-domain-out over four sites, with zero-shot
    with pytest.raises(FedvlmError, match="holds embeddings"):
        fedvlm.run("promptfl", data=data, out=tmp_path / "no")
    with pytest.raises(FedvlmError, match="given embeddings"):
        run.predict(Image.new("RGB", (8, 8)))


def encode(pictures):
    small = [np.asarray(p.convert("RGB").resize((4, 4)), np.float32).ravel() for p in pictures]
    return np.stack(small) + 1


def test_a_function_and_a_module_as_backbones(images, tmp_path):
    keys = {"data": images, "unseen": "noto", "rounds": 1}
    run = fedvlm.run("fedot-random-head", backbone=encode, out=tmp_path / "a", **keys)
    picture = next((images / "noto" / "bird").glob("*.png"))
    assert run.predictor(backbone=encode).predict(picture)
    run.export(tmp_path / "model", backbone=encode)
    loaded = fedvlm.load(tmp_path / "model", backbone=encode)
    assert loaded.predict(picture) == run.predictor(backbone=encode).predict(picture)
    found = fedvlm.bench(["fedot-random-head"], backbone=encode, seeds=[1, 2], jobs=2, out=tmp_path / "two", **keys)
    assert len(found) == 2  # other processes read what this one encoded

    module = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten())
    run = fedvlm.run("fedot-random-head", backbone=module, out=tmp_path / "b", **keys)
    assert run.record.backbone.dim == 48 and run.predictor(backbone=module).predict(picture)

    def other(pictures):
        return encode(pictures) * np.arange(1, 49)

    with pytest.raises(FedvlmError, match="not the one this was trained on"):
        run.predictor(backbone=other)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fedvlm.dataset(np.zeros((4, 8)), [0, 1]), "4 examples, and 2 labels"),
        (lambda: fedvlm.dataset(np.zeros((4, 8)), [0, 0, 0, 0]), "at least two classes"),
        (lambda: fedvlm.dataset(np.zeros((4, 8, 8)), [0, 1, 0, 1]), "expected images"),
        (lambda: fedvlm.dataset(np.full((2, 8, 8, 3), 7.0), [0, 1]), "floats from 0 to 1"),
        (lambda: fedvlm.dataset(np.zeros((4, 8))), "without labels"),
        (lambda: fedvlm.dataset(np.zeros((2, 8)), [0, 5], classes=["a", "b"]), "labels are 0 to 5"),
        (lambda: fedvlm.dataset(np.zeros((2, 8)), ["a", "z"], classes=["a", "b"]), "'z' is not among"),
        (lambda: fedvlm.run("fedavg", backbone=7), "neither a name"),
        (lambda: fedvlm.run("fedavg", data=fedvlm.dataset(np.zeros((4, 8)), [0, 1, 0, 1])), "zero or not finite"),
    ],
)
def test_wrong_objects_are_answered(make, says):
    with pytest.raises(FedvlmError, match=says):
        make()


def test_groups_stay_in_one_split(images, tmp_path):
    x, labels, clients = pictures(images)
    groups = [f"patient-{i // 5}" for i in range(len(x))]  # five neighbours each, of one class and style
    run = fedvlm.run("zero-shot", data=fedvlm.dataset(x, labels, clients=clients, groups=groups), out=tmp_path / "run")
    from fedvlm.data.pool import Pools

    setup = run.files.setup()
    pool = Pools().load(setup)
    federation = PlannedRun(setup, pool).federation
    where: dict[str, set[int]] = {}
    for bounds in federation.data.bounds:
        for split in range(3):
            for row in range(bounds[split], bounds[split + 1]):
                where.setdefault(pool.source.items[federation.items[row]].group, set()).add(split)
    assert len(where) == len(x) // 5 and all(len(splits) == 1 for splits in where.values())
