"""run.json and rounds.jsonl: read back as written, refused with a reason where they are damaged."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from helpers import train_small

from fedvlm.cli import main
from fedvlm.core.records import FORMAT, RunRecord
from fedvlm.errors import FedvlmError
from fedvlm.training.folder import RunFolder


@pytest.fixture(scope="module")
def run(images, tmp_path_factory) -> RunFolder:
    return train_small(images, tmp_path_factory.mktemp("records") / "run", metrics="ece", rounds=1)


def test_a_record_is_read_as_it_was_written(run):
    record = run.record
    assert RunRecord.from_json(record.to_json()) == record and record.format == FORMAT
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


def one_sentence(text: str) -> bool:
    return text.count("\n") == 1 and text.startswith("fedvlm: ") and "Traceback" not in text and "defect" not in text


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


def test_a_folder_without_a_record_says_so(tmp_path, capsys):
    with pytest.raises(FedvlmError, match=r"is not a run: it holds no run\.json"):
        _ = RunFolder(tmp_path).record
    assert main(["compare", str(tmp_path)]) == 1
    assert "no runs in" in capsys.readouterr().err
