"""Results that are used and handed on: which model predicts, exports that work elsewhere, ONNX, new questions to a run."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import open_clip_models
import pytest
import torch
import yaml
from helpers import CLASSES
from papers.measures import seed_values
from PIL import Image
from safetensors.torch import load_file

import fedvlm
from fedvlm import backbones, cli
from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.model import Model
from fedvlm.data.corruptions import corrupt
from fedvlm.data.images import decode
from fedvlm.data.pool import task_of
from fedvlm.data.source import digest, open_source
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.predict import questions
from fedvlm.predict.export.card import plain
from fedvlm.predict.export.onnx import example_images, onnx_difference, pixels_of, preprocessing, to_onnx
from fedvlm.predict.export.peft import to_peft
from fedvlm.predict.export.weights import copy_backbone
from fedvlm.predict.predictor import FAR_BELOW, Predictor, far_below
from fedvlm.system import files

DOCS = Path(__file__).parents[2] / "docs"
MINI_CLIP = Path(backbones.ASSETS) / "mini-clip"


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    """A run whose shared model is far below the personal ones, whatever the recipe's tuned rate is."""
    out = tmp_path_factory.mktemp("handing") / "run"
    return fedvlm.run("fedot", data=images, unseen="noto", rounds=3, lr=0.01, out=out)


@pytest.fixture(scope="module")
def skewed(images, tmp_path_factory):
    """Clients with different classes, whose own models are far better than the shared one."""
    out = tmp_path_factory.mktemp("skewed") / "run"
    keys = {"partition": "disjoint", "clients": 3, "lr": 2.0}
    return fedvlm.run("fedot", data=images, rounds=3, out=out, **keys)


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    run.export(folder, onnx=True)
    return folder


@pytest.fixture(scope="module")
def pictures(images):
    return sorted((images / "noto" / "bird").glob("*.png"))[:3]


def command(*words: object) -> int:
    return cli.main([str(w) for w in words])


# Which model


def test_the_shared_models_score_is_recorded_where_classes_are_partitioned(skewed):
    last = skewed.record.finished.last
    assert {"shared", "personal"} <= last.keys() and last["shared"]["test"] < last["personal"]["test"] - FAR_BELOW


def test_a_shared_model_far_below_the_personal_ones_is_told(skewed, run, pictures, tmp_path, capsys):
    assert command("predict", skewed.folder, pictures[0]) == 0
    said = capsys.readouterr().err
    assert "this is the shared model, which scores" in said and "--client NAME" in said and "client-0" in said
    skewed.predict(pictures[0], client="client-0")
    assert "shared model" not in capsys.readouterr().err
    skewed.export(tmp_path / "out")
    assert "this is the shared model" in capsys.readouterr().err
    assert "This is the shared model, which scores" in (tmp_path / "out" / "README.md").read_text()
    fedvlm.load(tmp_path / "out")
    assert "export the run again with --client NAME" in capsys.readouterr().err


def test_clients_that_never_trained_are_not_proposed(run, pictures, capsys):
    run.predict(pictures[0])
    assert "of openmoji, twemoji\n" in capsys.readouterr().err  # noto is held out


def test_only_a_large_difference_is_told():
    assert far_below({"shared": 0.5, "personal": 0.5 + FAR_BELOW + 1e-6})
    assert not far_below({"shared": 0.5, "personal": 0.5 + FAR_BELOW - 1e-6})
    assert not far_below({"shared": 0.5}) and not far_below({"shared": None, "personal": 1.0})


# Predicting


def test_one_path_and_the_most_probable_classes(run, pictures):
    (one,) = run.predict(str(pictures[0]))
    (best,) = run.predictor().top(pictures[0], 3)
    assert best[0] == one and len(best) == 3 and [p for _, p in best] == sorted((p for _, p in best), reverse=True)
    (everything,) = run.predictor().top(pictures[0], 99)
    assert {name for name, _ in everything} == set(CLASSES)
    assert sum(p for _, p in everything) == pytest.approx(1, abs=1e-5)


def test_a_folder_becomes_a_table_and_a_file(run, pictures, tmp_path, capsys):
    out = tmp_path / "table.csv"
    assert command("predict", run.folder, pictures[0].parent, "--top", 2, "--out", out) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20 and rows[0].keys() == {"image", "class", "probability", "model"}
    said = capsys.readouterr().out
    assert f"10 images: written to {out}" in said and str(pictures[0]) not in said
    assert command("predict", run.folder, pictures[0]) == 0 and str(pictures[0]) in capsys.readouterr().out
    assert command("predict", run.folder, pictures[0], "--top", 0) == 1


# Exports


def test_a_card_that_the_hub_can_read(run, exported):
    text = (exported / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["library_name"] == "fedvlm" and about["pipeline_tag"] == "image-classification"
    ((result,),) = [index["results"] for index in about["model-index"]]
    last = run.record.finished.last
    assert {m["name"]: m["value"] for m in result["metrics"]}["newcomer, test"] == last["newcomer"]["test"]
    for part in (
        "## Data",
        "## Method",
        "## Scores",
        "## What is private",
        "## Limitations",
        "seed 50",
        "held out: noto",
    ):
        assert part in body
    assert "fedvlm run fedot" in body and str(run.folder.parent) not in text
    assert str(Path(str(run.record.config["data"])).parent) not in text  # where the data lay is nobody's business


def test_names_in_a_card_are_only_text():
    assert plain("<b>[x](y)|`z`\n# no") == r"\<b\>\[x\](y)\|\`z\` \# no"


def test_an_export_works_without_run_data_and_network(exported, run, pictures, tmp_path, monkeypatch):
    """In another folder, with an empty cache, where nothing can be reached."""

    def refuse(*args: object, **keys: object) -> None:
        raise OSError("no network")

    ((name, probability),) = run.predict(pictures[0])
    shutil.copytree(exported, tmp_path / "model")
    shutil.copy(pictures[0], tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    assert fedvlm.load("model").predict("a.png") == [(name, pytest.approx(probability, abs=1e-6))]


def test_a_backbone_from_another_place(images, pictures, tmp_path):
    first, second, other = (tmp_path / n / "mini-clip" for n in ("first", "second", "other"))
    for place in (first, other):
        shutil.copytree(MINI_CLIP, place)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.5, 0.5, 0.5]}))
    done = fedvlm.run("fedavg", data=images, unseen="noto", rounds=1, backbone=str(first), out=tmp_path / "run")
    done.export(tmp_path / "model")
    files = done.export(tmp_path / "whole", with_backbone=True)
    before = done.predict(pictures)
    assert {"backbone/model.safetensors", "backbone/config.json"} <= set(files)
    assert not {Path(f).suffix for f in files if f.startswith("backbone/")} - {".safetensors", ".json", ".txt"}
    first.parent.rename(second.parent)
    with pytest.raises(FedvlmError, match=r"no such folder.*give the same weights \(fingerprint .*backbone=PLACE"):
        fedvlm.load(tmp_path / "model")
    assert fedvlm.load(tmp_path / "model", backbone=str(second)).predict(pictures) == before
    assert fedvlm.load(tmp_path / "whole").predict(pictures) == before
    with pytest.raises(FedvlmError, match="fingerprint differs"):
        fedvlm.load(tmp_path / "model", backbone=str(other))
    assert command("predict", tmp_path / "model", pictures[0], "--backbone", second) == 0
    assert fedvlm.Run(done.folder).predictor(backbone=str(second)).predict(pictures) == before


def test_a_backbone_without_files_cannot_be_copied(tmp_path):
    with pytest.raises(FedvlmError, match="--with-backbone: backbone=pixels:16 is no folder of weights"):
        copy_backbone(backbones.load("pixels:16"), tmp_path / "backbone")


# ONNX


@pytest.mark.parametrize("name", ["visual", "tower"])
def test_onnx_gives_the_same_probabilities(name):
    """Adapters inside the image tower, and of a whole tower; the export of the fixture is one on embeddings."""
    model = example(name)
    data, about = to_onnx(model)
    draw = np.random.default_rng(7)
    shown = [Image.fromarray(draw.integers(0, 256, (h, w, 3), np.uint8)) for w, h in ((50, 80), (97, 96))]
    session = onnxruntime.InferenceSession(data)
    inputs = pixels_of(model.backbone, shown).split(json.loads(about)["images_at_a_time"] or 2)
    found = np.concatenate([session.run(["probabilities"], {"pixels": x.numpy()})[0] for x in inputs])
    assert np.abs(found - model.probabilities(shown).numpy()).max() < 1e-4
    assert np.ptp(found) > 0.01  # not all the same by accident


def example(name: str) -> Predictor:
    adapter, clip = registry.find("adapter", name)(), backbones.load("mini-clip")
    task = task_of(clip, CLASSES, "a photo of a {}", adapter.requires)
    draw = torch.Generator().manual_seed(0)
    params = {k: v + 0.02 * torch.randn(v.shape, generator=draw) for k, v in adapter.init(task, 0).items()}
    return Predictor(clip, Model(adapter, task), params, "shared")


def test_a_wrong_onnx_file_is_noticed(run, exported):
    data, images = (exported / "model.onnx").read_bytes(), example_images()
    pixels = pixels_of(backbones.load("mini-clip"), images)
    assert onnx_difference(data, run.predictor(), images, pixels, 0) == ""
    assert "probabilities differ from fedvlm's by 0." in onnx_difference(
        data, run.predictor("twemoji"), images, pixels, 0
    )


class Solves(Adapter):
    """An operation that ONNX does not have."""

    view = "pixels"

    def logits(self, task, params, x):
        return torch.linalg.solve(torch.eye(2), x.float().flatten(2)[..., :2].mT).mT


def test_what_cannot_be_onnx_is_said_in_words(capfd):
    small = backbones.load("pixels:4")
    model = Predictor(small, Model(Solves(), Task(("a", "b"), None, 0, 1.0)), {}, "shared")
    with pytest.raises(FedvlmError, match=r"on backbone=pixels:4 cannot be written as ONNX \(.*linalg_solve"):
        to_onnx(model)
    assert capfd.readouterr() == ("", "")  # torch would print the whole graph

    class BlackBox:
        name, black_box = "python:mine:encode", True

    with pytest.raises(FedvlmError, match="returns embeddings only"):
        preprocessing(BlackBox())


def test_a_missing_package_is_named_before_anything_is_traced(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnx" else object())
    with pytest.raises(FedvlmError, match=r"--onnx needs .*pip install 'fedvlm\[onnx\]'"):
        to_onnx(Predictor(backbones.load("pixels:4"), Model(Solves(), Task(("a", "b"), None, 0, 1.0)), {}, "shared"))


def by_the_example(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, float]:
    """What the example of the documentation says of image.jpg by model/, both in this folder."""
    (code,) = re.findall(r"```python\n(import json.*?)```", (DOCS / "export.md").read_text(), re.DOTALL)
    with contextlib.chdir(folder):
        exec(compile(code, "docs/export.md", "exec"), {})
    name, probability = capsys.readouterr().out.split()
    return name, float(probability)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(3).integers(0, 256, (height, width, 3), np.uint8))


def test_the_onnxruntime_example_of_the_documentation(exported, run, tmp_path, capsys):
    shutil.copytree(exported, tmp_path / "model")
    noise(131, 77).save(tmp_path / "image.jpg")
    ((name, probability),) = run.predict(tmp_path / "image.jpg")
    assert by_the_example(tmp_path, capsys) == (name, pytest.approx(probability, abs=1e-4))


@pytest.mark.parametrize("layout", ["vit", "siglip"])
def test_onnx_of_open_clip_models(layout, tmp_path, capsys):
    """Cropped at an offset of 1.5 pixels, which is rounded here and cut off elsewhere; and squashed."""
    shapes = json.loads(open_clip_models.REFERENCE.read_text())[layout]["shapes"]
    (tmp_path / "model").mkdir()
    (tmp_path / layout).mkdir()
    open_clip_models.write_model(layout, tmp_path / layout, shapes)
    clip, adapter = backbones.load(str(tmp_path / layout)), registry.find("adapter", "head")(init_from="random")
    task = Task(CLASSES, None, clip.dim, 20.0)
    model = Predictor(clip, Model(adapter, task), adapter.init(task, 0), "shared")
    data, about = to_onnx(model)
    (tmp_path / "model" / "model.onnx").write_bytes(data)
    (tmp_path / "model" / "model.json").write_text(about)
    noise(85, 77).save(tmp_path / "image.jpg")
    ((name, probability),) = model.predict(tmp_path / "image.jpg")
    capsys.readouterr()
    assert by_the_example(tmp_path, capsys) == (name, pytest.approx(probability, abs=1e-4))


# New questions to a finished run


@pytest.fixture(scope="module")
def others(images, tmp_path_factory):
    """Two sets of outsiders, and data of a known client and a new one with two of the classes."""
    root = tmp_path_factory.mktemp("others")
    for name, label in (("hands", "hand"), ("trains", "train")):
        (root / name).mkdir()
        for path in sorted((images / "noto" / label).glob("*.png"))[
            :5
        ]:  # upside down: no image of the run has the same score
            Image.open(path).convert("RGB").rotate(180).save(root / name / path.name)
    shutil.copytree(root / "hands", root / "wrong" / "banana")
    shutil.copytree(root / "hands", root / "wrong" / "hand")
    for domain, label in (("twemoji", "bird"), ("twemoji", "clock"), ("new", "bird")):
        shutil.copytree(images / ("openmoji" if domain == "new" else domain) / label, root / "later" / domain / label)
    return root


@pytest.fixture(scope="module")
def answers(run, others):
    sets = [str(others / "hands"), str(others / "trains")]
    return run.evaluate(outsiders=sets, corrupt=["brightness"], data=str(others / "later"))


def test_outsiders_are_detected_as_in_a_run_that_was_asked_at_once(answers, images, others, tmp_path):
    keys = {"outsiders": str(others / "trains"), "out": tmp_path / "run"}
    last = fedvlm.run("fedot", data=images, unseen="noto", rounds=3, lr=0.01, **keys).record.finished.last
    found = {m: by_view for a in answers for m, by_view in a.scores.items()}
    for measure in ("auroc", "fpr95"):
        assert found[f"{measure}@trains"] == {view: s[measure] for view, s in last["detection"].items()}
    assert found["auroc@trains"] != found["auroc@hands"]


def test_rows_of_separate_processes_are_found(bytes_only, answers, images, others, tmp_path):
    keys = {"engine": "loopback", "out": tmp_path / "run"}
    done = fedvlm.run("fedot", data=images, unseen="noto", rounds=3, lr=0.01, **keys)
    (found,) = done.evaluate(outsiders=str(others / "hands"))
    for measure, by_view in answers[0].scores.items():
        assert found.scores[measure] == pytest.approx(by_view, abs=1e-6)


def test_a_corruption_is_the_mean_over_its_severities(run, answers, images):
    """Against single predictions on the newcomer's test images, which are corrupted here."""
    outputs, source = load_file(run.folder / "outputs.safetensors"), open_source(str(images))
    model, right = run.predictor(), list[bool]()
    for item in outputs["item"][outputs["client"] == run.record.clients.index("noto")].tolist():
        data = (images / source.items[item].path).read_bytes()
        versions = []
        for severity in range(1, 6):
            seed = int.from_bytes(digest(digest(data) + f"brightness-{severity}".encode())[:7], "little")
            versions.append(corrupt(decode(data), "brightness", severity, seed))
        right += [name == source.items[item].label for name, _ in model.predict(versions)]
    found = next(a.scores["cacc@brightness"] for a in answers if a.kind == "corrupt")
    assert len(right) == 50 and found["newcomer"] == pytest.approx(np.mean(right), abs=1e-6)
    assert {"shared", "personal"} <= found.keys()


def test_other_data_are_scored_by_whose_they_are(run, answers, others):
    answer = answers[-1]

    def accuracy(domain: str, client: str = "") -> float:
        paths = sorted((others / "later" / domain).rglob("*.png"))
        found = run.predict(paths, client)
        return float(np.mean([name == p.parent.name for p, (name, _) in zip(paths, found, strict=True)]))

    expected = {"shared": accuracy("twemoji"), "personal": accuracy("twemoji", "twemoji"), "newcomer": accuracy("new")}
    assert answer.scores["acc@later"] == pytest.approx(expected)
    assert "2 of the run's 5 classes (fruit, hand, train are missing)" in answer.notes[0]


def test_models_that_adapt_when_they_are_scored_have_nothing_to_adapt_on(images, others, tmp_path):
    done = fedvlm.run("perfedavg", data=images, unseen="noto", rounds=1, out=tmp_path / "run")
    (found,) = done.evaluate(data=str(others / "later"))
    assert found.scores["acc@later"].keys() == {"shared", "newcomer"}
    assert not any("personal" in views for views in found.clients.values())


def test_answers_are_recorded_shown_and_read_by_reproduce(run, answers, capsys):
    assert {e.name: e.scores for e in run.evaluations} == {e.name: e.scores for e in answers}
    assert command("show", run.folder) == 0
    said = capsys.readouterr().out
    assert "cacc@brightness" in said and "auroc@hands" in said and "acc@later" in said
    (value,) = seed_values("cacc@brightness", [run.files], {}, "last")
    assert value == pytest.approx(100 * questions.answer(run.folder, "cacc@brightness"))
    assert seed_values("cacc@fog", [run.files], {}, "last") == []
    code = "import sys, fedvlm.predict.questions; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_evaluate_on_the_command_line(run, others, tmp_path, capsys):
    out = tmp_path / "table.csv"
    assert command("evaluate", run.folder, f"outsiders={others / 'hands'},{others / 'trains'}", "--csv", out) == 0
    rows = list(csv.DictReader(out.open(newline="")))
    assert [r["question"] for r in rows] == ["auroc@hands", "fpr95@hands", "auroc@trains", "fpr95@trains"]
    for words, reason in (
        (["corrupt=mist"], "corrupt=mist: no such corruption"),
        (["outsider=x"], "outsider=: evaluate takes outsiders="),
        ([], "ask something"),
        ([f"data={others / 'wrong'}"], "the run knows no class 'banana'"),
        ([f"outsiders={others / 'hands'},{others / 'later' / '..' / 'hands'}"], "both are called hands"),
    ):
        assert command("evaluate", run.folder, *words) == 1
        assert reason in capsys.readouterr().err


def test_damaged_answers_are_named(run, answers, tmp_path):
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "x.json").write_text('{"format": 7}')
    with pytest.raises(FedvlmError, match=r"x.json is damaged or of another version \(format 7"):
        questions.read_answers(tmp_path)


# A run's folder


def test_the_log_is_there_only_where_a_client_failed(run):
    assert not (run.folder / "log.txt").exists()
    assert re.search(r"`log.txt` \|.*only if there were any", (DOCS / "start.md").read_text())


@pytest.mark.parametrize("name", ["lora", "ffa", "small", "residual"])
def test_peft_loads_low_rank_changes(name, tmp_path):
    """Embeddings of images and of texts through PEFT and transformers are those of our predictor."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = example(name)
    for path, data in to_peft(model).items():
        files.write(tmp_path / path, data)
    clip = transformers.CLIPModel.from_pretrained(MINI_CLIP, dtype=torch.float32)
    changed = peft.PeftModel.from_pretrained(clip, tmp_path / "peft").eval()
    shown = [Image.fromarray(np.random.default_rng(k).integers(0, 256, (80, 90, 3), np.uint8)) for k in range(3)]
    words = transformers.AutoTokenizer.from_pretrained(MINI_CLIP)(list(model.model.task.phrases), padding=True)
    given = {"input_ids": torch.tensor(words["input_ids"]), "pixel_values": model.backbone.pixels(shown)}
    expected = model.probabilities(shown)
    with torch.no_grad():
        found = changed(**given).logits_per_image.softmax(1)
        with changed.disable_adapter():
            frozen = changed(**given).logits_per_image.softmax(1)
    assert (found - expected).abs().max() < 1e-5 < 1e-4 < (frozen - expected).abs().max()


def test_other_adapters_have_no_layout_of_peft():
    assert to_peft(example("visual")) == {}
