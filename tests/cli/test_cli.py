"""The command line as a user meets it: words, exit codes, files, and errors without a traceback."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedvlm
from fedvlm.cli import main
from fedvlm.data.source import EMOJI


@pytest.fixture(scope="module")
def done(images, tmp_path_factory) -> Path:
    """One finished run."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main(["run", "fedot", f"data={images}", "unseen=noto", "rounds=3", "lr=0.05", f"out={folder}"]) == 0
    return folder


def test_run_leaves_what_scripts_rely_on(done):
    records = [json.loads(line) for line in (done / "rounds.jsonl").read_text().splitlines()]
    assert [r["round"] for r in records] == [0, 1, 2, 3]
    for r in records:
        assert {"round", "bytes_down", "bytes_up", "seconds", "shared", "personal", "newcomer", "G", "P"} <= set(r)
    assert set(records[-1]["weights"]) == {"openmoji", "twemoji"} and sum(
        records[-1]["weights"].values()
    ) == pytest.approx(1)
    assert {p.name for p in done.iterdir()} >= {"run.json", "state.safetensors", "outputs.safetensors", "rows.bin"}
    outputs = load_file(done / "outputs.safetensors")
    wanted = records[-1]["clients"]["twemoji"]["personal"]["test"]
    mine = outputs["client"] == 2
    assert (outputs["personal.logits"][mine].argmax(-1) == outputs["label"][mine]).double().mean() == pytest.approx(
        wanted, abs=1e-5
    )


def test_run_again_is_recognised(images, done, capsys):
    assert main(["run", "fedot", f"data={images}", "unseen=noto", "rounds=3", "lr=0.05", f"out={done}"]) == 0
    assert "already finished and not repeated" in capsys.readouterr().out


def test_dry_shows_and_trains_nothing(images, tmp_path, capsys):
    assert main(["run", "fedot", f"data={images}", "unseen=noto", f"out={tmp_path / 'x'}", "--dry"]) == 0
    text = capsys.readouterr().out
    assert (
        "held out" in text
        and "stays on each client: its images, skew" in text
        and "s in all" in text
        and not (tmp_path / "x").exists()
    )


def test_bench_writes_the_table(images, tmp_path, capsys):
    out = tmp_path / "bench.csv"
    words = ["bench", "zero-shot", "fedavg", "fedot-all-local", f"data={images}", "rounds=2", "seeds=1,2", "jobs=2"]
    assert main([*words, f"out={tmp_path / 'runs'}", "--csv", str(out), "--latex", str(tmp_path / "t.tex")]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [r["method"] for r in rows] == ["zero-shot", "fedavg", "fedot-all-local"]
    assert list(rows[0])[:5] == ["method", "G", "S", "P", "C"] and rows[2]["G"] == "" and float(rows[1]["P"]) > 0
    assert rows[0]["runs"] == "6" and "–" in capsys.readouterr().out and r"\toprule" in (tmp_path / "t.tex").read_text()
    assert main(["compare", str(tmp_path / "runs"), "--select", "selected"]) == 0


def test_protocol_in_run_makes_the_matrix(images, tmp_path, capsys):
    words = ["run", "fedavg", f"data={images}", "protocol=leave-one-domain-out", "rounds=1", "seed=1", "jobs=1"]
    assert main([*words, f"out={tmp_path}"]) == 0
    assert len(list(tmp_path.glob("*/run.json"))) == 3 and "fedavg" in capsys.readouterr().out


def test_predict_and_export_agree(done, images, tmp_path, capsys):
    picture = sorted((images / "twemoji" / "clock").iterdir())[0]
    assert main(["predict", str(done), str(picture), "--client", "twemoji", "--csv", str(tmp_path / "p.csv")]) == 0
    (row,) = csv.DictReader((tmp_path / "p.csv").open())
    assert row["model"] == "twemoji" and 0 <= float(row["probability"]) <= 1
    for client in ("twemoji", ""):
        folder = tmp_path / f"export-{client or 'shared'}"
        assert main(["export", str(done), "--out", str(folder), *(["--client", client] if client else [])]) == 0
        model = fedvlm.load(folder)
        name, probability = model.predict([picture])[0]
        if client:
            assert name == row["class"] and f"{probability:.3f}" == row["probability"]
        x = model.backbone.images([__import__("PIL.Image").Image.open(picture).convert("RGB")])
        plain = load_file(folder / "classifier.safetensors")["weight"]
        assert torch.allclose((x @ plain.T).softmax(-1).max(), torch.tensor(probability), atol=1e-5)
    out = subprocess.run(
        [sys.executable, "example.py", str(picture)], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    assert name in out
    assert main(["predict", str(folder), str(images / "noto" / "bird")]) == 0
    assert capsys.readouterr().out.count("noto/bird") == 10


def test_resume_says_when_there_is_nothing_to_do(done, capsys):
    assert main(["resume", str(done)]) == 0
    assert "nothing to resume" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "methods"],
        ["ls", "adapters"],
        ["ls", "local"],
        ["ls", "merges"],
        ["ls", "metrics"],
        ["ls", "engines"],
        ["ls", "presets"],
        ["ls", "data"],
        ["show", "fedot"],
        ["show", "ga", "on=unet"],
        ["show", "fedot", "--yaml"],
        ["cache"],
    ],
)
def test_looking_around(words, capsys):
    assert main(words) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_report_is_one_file(done, tmp_path):
    assert main(["report", str(done), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_partitions_of_a_folder_without_domains(images, tmp_path):
    for kind in ("iid", "dirichlet", "pathological"):
        words = ["run", "fedavg", f"data={images / 'noto'}", f"partition={kind}", "clients=4", "rounds=1", "shots=3"]
        assert main([*words, f"out={tmp_path / kind}"]) == 0
    assert (
        main(
            [
                "run",
                "fedavg",
                f"data={images}",
                "partition=domain-dirichlet",
                "clients=2",
                "unseen=noto",
                "rounds=1",
                f"out={tmp_path / 'dd'}",
            ]
        )
        == 0
    )
    assert len(json.loads((tmp_path / "dd" / "run.json").read_text())["clients"]) == 6
    assert main(["run", "centralised", f"data={images}", "unseen=noto", "rounds=1", f"out={tmp_path / 'c'}"]) == 0


def test_patients_stand_on_one_side(images, tmp_path):
    """group= keeps files that share a part of their name together: here by the first letter of the code."""
    words = ["run", "fedavg", f"data={images}", r"group=^(.{5})", "unseen=noto", "rounds=1", f"out={tmp_path / 'run'}"]
    assert main(words) == 0
    assert main([*words[:3], "group=(", *words[4:]]) == 1


def test_a_black_box_backbone_runs(images, tmp_path, capsys):
    code = """
import torch


def encode(images):
    small = [torch.tensor(i.resize((4, 4)).getdata()).float().flatten() for i in images]
    return torch.stack(small) + 1
"""
    (tmp_path / "box.py").write_text(code)
    words = [f"data={images}", f"backbone=python:{tmp_path}/box.py:encode", "unseen=noto", "rounds=1"]
    assert main(["run", "fedot-random-head", *words, f"out={tmp_path / 'run'}"]) == 0
    assert main(["run", "fedclip", *words, f"out={tmp_path / 'no'}"]) == 1  # it has no text tower
    (tmp_path / "deep.py").write_text(
        "from dataclasses import dataclass\nfrom typing import ClassVar\n"
        "from fedvlm.parts import Head as Base\n"
        "@dataclass(frozen=True)\nclass Deep(Base):\n    view: ClassVar[str] = 'hidden@6'\n"
    )
    assert main(["run", "fedavg", f"adapter={tmp_path / 'deep.py'}", *words, f"out={tmp_path / 'no'}"]) == 1
    assert "activations inside the image tower" in (err := capsys.readouterr().err) and "rotation" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "fedoot"], "did you mean fedot"),
        (["run", "fedot", "data=/not/there"], "no such folder"),
        (["run", "fedot", "lr"], "key=value"),
        (["run", "fedot", "data={images}", "unseen=moto"], "did you mean noto"),
        (["run", "fedot", "data={images}", "blocks=7"], "does not divide"),
        (["run", "fedot", "data={images}", "private=nothing"], "has no such parameter"),
        (["run", "fedot", "data={images}", "backbone=nowhere"], "no such folder"),
        (["run", "centralised", "data={images}", "adapter=rotation"], "nothing can be private"),
        (["run", "fedavg", "data={images}", "unseen=noto,twemoji,openmoji"], "nobody is left"),
        (["run", "fedavg", "data={images}", "clients=0", "partition=iid"], "between 1 and"),
        (["run", "fedavg", "data={images}/noto", "protocol=leave-one-domain-out"], "three domains"),
        (["bench", "rounds=1"], "at least one method"),
        (["compare", "/not/there"], "no such run"),
        (["resume", "{images}"], "no runs in"),
        (["predict", "{done}", "/not/there.png"], "no such image"),
        (["predict", "{done}", "{done}/run.json"], "not a readable image"),
        (["predict", "{done}", "{images}/noto/bird", "--client", "nobody"], "no such client"),
        (["export", "{done}", "--out", "{done}"], "not empty"),
        (["cache", "--prune", "nonesuch"], "no view"),
        (["encode-server", "prot=1"], "did you mean port"),
    ],
)
def test_errors_say_what_to_do_without_a_traceback(words, says, images, done, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([w.format(images=images, done=done) for w in words]) == 1
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


def test_debug_shows_the_traceback():
    with pytest.raises(fedvlm.FedvlmError):
        main(["run", "fedoot", "--debug"])


def test_broken_images_are_named(images, tmp_path, capsys):
    box = tmp_path / "data.zip"
    with zipfile.ZipFile(EMOJI) as old, zipfile.ZipFile(box, "w") as new:
        for name in old.namelist():
            if name.startswith(("noto/bird/", "noto/clock/")):
                new.writestr(name, old.read(name))
        new.writestr("noto/bird/torn.png", b"\x89PNG\r\n\x1a\nbroken")
    assert (
        main(["run", "fedavg", f"data={box}", "partition=iid", "clients=2", "rounds=1", f"out={tmp_path / 'r'}"]) == 0
    )
    assert "torn.png" in capsys.readouterr().err
    assert "noto/bird/torn.png" in json.loads((tmp_path / "r" / "run.json").read_text())["data"]["skipped"]
    assert (
        main(["run", "fedavg", f"data={box}", "partition=iid", "broken=refuse", "rounds=1", f"out={tmp_path / 'q'}"])
        == 1
    )


def test_doctor_examines_and_names_a_torchvision_that_does_not_fit(capsys, monkeypatch, tmp_path):
    assert main(["doctor"]) == 0
    assert "mini-clip loads" in capsys.readouterr().out
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    (tmp_path / "torchvision-0.1.dist-info").mkdir()
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["doctor"]) == 1
    text = capsys.readouterr()
    assert "torchvision 0.1 does not fit" in text.out and "pip uninstall torchvision" in text.out


def test_words_may_stand_behind_options(images, done, tmp_path, capsys):
    assert main(["run", "fedot", "--dry", f"data={images}", "unseen=noto"]) == 0
    assert "stays on each client: its images, skew" in capsys.readouterr().out
    words = [
        "bench",
        "zero-shot",
        "--csv",
        str(tmp_path / "t.csv"),
        "fedavg",
        f"data={images}",
        "unseen=noto",
        "rounds=1",
    ]
    assert main([*words, "seeds=1", f"out={tmp_path / 'runs'}"]) == 0
    assert [r["method"] for r in csv.DictReader((tmp_path / "t.csv").open())] == ["zero-shot", "fedavg"]
    assert main(["predict", str(done), "--client", "twemoji", str(images / "noto" / "bird")]) == 0
    with pytest.raises(SystemExit):
        main(["run", "fedot", "--nonsense"])


def test_export_has_a_place_of_its_own(done):
    assert main(["export", str(done)]) == 0
    assert (done / "export" / "adapter.safetensors").is_file()


def test_only_what_is_needed_is_called_required(capsys):
    with pytest.raises(SystemExit):
        main(["run"])
    assert "required: METHOD\n" in capsys.readouterr().err
