"""run.json and rounds.jsonl: read back as written, read from fedvlm 0.1, refused with a reason where they are damaged."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from helpers import train_small

from fedvlm import api
from fedvlm.cli import main
from fedvlm.core.records import FORMAT, RunRecord
from fedvlm.errors import FedvlmError
from fedvlm.report.tables import summarise
from fedvlm.training.folder import RunFolder

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def run(images, tmp_path_factory) -> RunFolder:
    return train_small(images, tmp_path_factory.mktemp("records") / "run", metrics="ece", rounds=1)


@pytest.fixture
def old(tmp_path) -> RunFolder:
    """A run folder as fedvlm 0.1 wrote it."""
    folder = tmp_path / "old"
    folder.mkdir()
    shutil.copy(DATA / "run_format1.json", folder / "run.json")
    shutil.copy(DATA / "run_format1_rounds.jsonl", folder / "rounds.jsonl")
    return RunFolder(folder)


def test_a_record_is_read_as_it_was_written(run):
    record = run.record
    assert RunRecord.from_json(record.to_json()) == record and record.format == FORMAT and not record.legacy
    assert record.metrics[0].name == "ece" and record.result is not None
    unfinished = dataclasses.replace(record, result=None)
    assert RunRecord.from_json(unfinished.to_json()) == unfinished != record
    with pytest.raises(FedvlmError, match=f"run {record.identity} is not finished"):
        _ = unfinished.finished
    written = json.loads((run.folder / "run.json").read_text(encoding="utf-8"))
    assert written == json.loads(record.to_json())
    assert (run.folder / "run.json").read_bytes().isascii()  # whatever names clients and classes have


def test_rounds_are_read_as_they_were_written(run):
    last = run.record.finished.last
    assert run.rounds()[-1] == last and [r["round"] for r in run.rounds()] == [0, 1]
    assert set(last["metrics"]) == {"ece"}
    assert run.record.finished.at("last") == last and run.record.finished.at("selected")["round"] in (0, 1)


def test_a_last_line_that_was_cut_off_does_not_count(run, tmp_path):
    shutil.copytree(run.folder, tmp_path / "run")
    with (tmp_path / "run" / "rounds.jsonl").open("a", encoding="utf-8") as out:
        out.write('{"round": 2, "byt')
    assert RunFolder(tmp_path / "run").rounds() == run.rounds()


def test_the_first_format_is_read(old):
    """Every entry is where it was; what the first format did not hold is empty."""
    raw, record = json.loads((DATA / "run_format1.json").read_text(encoding="utf-8")), old.record
    assert record.legacy and record.method.name == record.method.label == "fedot" and record.identity == "aeed6e1b"
    for axis, name in (("adapter", "rotation"), ("local", "sgd"), ("merge", "mean")):
        part = getattr(record, axis)
        assert (part.name, part.settings, part.code) == (name, raw["config"][axis][name], "")
    assert record.config == {k: v for k, v in raw["config"].items() if k not in ("method", "adapter", "local", "merge")}
    assert (record.backbone.name, record.backbone.fingerprint) == ("mini-clip", "f5529f9e04cb513b")
    assert record.data.images == 150 and record.clients == ["noto", "openmoji", "twemoji"] and record.unseen == ["noto"]
    assert record.homes == raw["homes"] and record.versions == raw["versions"] and record.given == raw["given"]
    assert record.metrics == [] and record.published == {} and record.seed == 50
    later = {"void": 0, "bounded": 0, "quarantined": [], "privacy": None, "phases": {}}
    assert dataclasses.asdict(record.finished) == raw["result"] | later and old.done
    assert [r["round"] for r in old.rounds()] == [0, 1, 2, 3] and old.rounds()[-1] == record.finished.last
    assert RunRecord.from_json(record.to_json()) == record


def test_tables_and_pages_are_made_of_the_first_format(old, run, tmp_path, capsys):
    table, last = summarise([old]), old.record.finished.last
    assert float(table.rows[0]["G"]) == pytest.approx(100 * last["G"], abs=0.005)
    assert float(table.rows[0]["P"]) == pytest.approx(100 * last["P"], abs=0.005)
    assert main(["compare", str(old.folder), "--csv", str(tmp_path / "t.csv")]) == 0
    assert "fedot" in capsys.readouterr().out and f"{100 * last['P']:.1f}" in (tmp_path / "t.csv").read_text()
    assert main(["compare", str(old.folder), str(run.folder)]) == 0  # old and new side by side
    assert main(["report", str(old.folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "fedot" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "finished" in repr(api.Run(old))


def one_sentence(text: str) -> bool:
    return text.count("\n") == 1 and text.startswith("fedvlm: ") and "Traceback" not in text and "defect" not in text


def test_the_first_format_cannot_go_on(old, images, tmp_path, capsys):
    picture = next((images / "noto" / "bird").iterdir())
    words = [["predict", str(old.folder), str(picture)], ["export", str(old.folder), "--out", str(tmp_path / "out")]]
    raw = json.loads((old.folder / "run.json").read_text(encoding="utf-8")) | {"result": None}
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "run.json").write_text(json.dumps(raw))
    words.append(["resume", str(tmp_path / "unfinished")])
    for call in words:
        assert main(call) == 1
        err = capsys.readouterr().err
        assert one_sentence(err) and "was written by fedvlm 0.1" in err and "use that version" in err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_the_first_format_is_not_overwritten(old, images, capsys):
    before = (old.folder / "run.json").read_bytes()
    words = ["run", "fedot", f"data={images}", "unseen=noto", "rounds=3", f"out={old.folder}"]
    assert main(words) == 1
    assert "holds another run" in capsys.readouterr().err and (old.folder / "run.json").read_bytes() == before


def without(raw: dict, *path: str) -> dict:
    """A copy without one entry."""
    copy = json.loads(json.dumps(raw))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return copy


def refused(folder: Path, text: str, capsys) -> str:
    folder.mkdir()
    (folder / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(FedvlmError) as caught:
        _ = RunFolder(folder).record
    assert str(caught.value).startswith(f"{folder / 'run.json'} is damaged or of another version (")
    for words in (["compare", str(folder)], ["resume", str(folder)], ["export", str(folder)]):
        assert main(words) == 1
        assert one_sentence(err := capsys.readouterr().err), err
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "nothing", "[]", "[1, 2]", "7", "null", '"run"', "{}", '{"format": 2}'])
def test_what_is_no_record_is_refused_in_one_sentence(text, tmp_path, capsys):
    refused(tmp_path / "run", text, capsys)


def test_a_record_that_was_cut_off_is_refused(run, tmp_path, capsys):
    text = run.record.to_json()
    for i, share in enumerate((0.1, 0.5, 0.99)):
        refused(tmp_path / f"run{i}", text[: int(share * len(text))], capsys)


@pytest.mark.parametrize("number", [1, 3, "2", None])
def test_another_format_is_refused_with_its_number(run, number, tmp_path, capsys):
    raw = json.loads(run.record.to_json()) | {"format": number}
    said = refused(tmp_path / "run", json.dumps(raw), capsys)
    assert f"format {number}" in said and f"reads {FORMAT}" in said


@pytest.mark.parametrize(
    "path",
    [
        ("identity",),
        ("method",),
        ("method", "name"),
        ("adapter",),
        ("adapter", "name"),
        ("engine",),
        ("metrics",),
        ("config",),
        ("given",),
        ("data",),
        ("data", "classes"),
        ("backbone", "fingerprint"),
        ("result",),
        ("result", "last"),
    ],
    ids=".".join,
)
def test_an_entry_that_is_missing_is_named(run, path, tmp_path, capsys):
    said = refused(tmp_path / "run", json.dumps(without(json.loads(run.record.to_json()), *path)), capsys)
    assert path[-1] in said


@pytest.mark.parametrize("entry", ["adapter", "method", "data", "backbone", "metrics", "result"])
@pytest.mark.parametrize("value", [7, "x", [1], {"nosuch": 1}], ids=str)
def test_an_entry_of_another_kind_is_refused(run, entry, value, tmp_path, capsys):
    refused(tmp_path / "run", json.dumps(json.loads(run.record.to_json()) | {entry: value}), capsys)


def test_an_entry_that_is_unknown_is_named(run, tmp_path, capsys):
    raw = json.loads(run.record.to_json()) | {"colour": "blue"}
    assert "colour" in refused(tmp_path / "run", json.dumps(raw), capsys)


@pytest.mark.parametrize(
    "path",
    [
        ("method",),
        ("identity",),
        ("data",),
        ("data", "images"),
        ("backbone",),
        ("backbone", "name"),
        ("config", "adapter"),
        ("config", "local", "sgd"),
        ("given",),
        ("result", "last"),
    ],
    ids=".".join,
)
def test_a_damaged_record_of_the_first_format_is_refused(path, tmp_path, capsys):
    raw = json.loads((DATA / "run_format1.json").read_text(encoding="utf-8"))
    refused(tmp_path / "run", json.dumps(without(raw, *path)), capsys)


def test_a_folder_without_a_record_says_so(tmp_path, capsys):
    with pytest.raises(FedvlmError, match=r"is not a run: it holds no run\.json"):
        _ = RunFolder(tmp_path).record
    assert main(["compare", str(tmp_path)]) == 1
    assert "no runs in" in capsys.readouterr().err
