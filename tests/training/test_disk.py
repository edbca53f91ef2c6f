"""Disks that fill, fail or cannot be written, and damaged files of a run: it goes on to the same bits, or one sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fullness import Disk, Killed, Trials, enlarge, read_only, small_file_system
from helpers import train_small

from fedvlm.cli import main
from fedvlm.config import catalogue
from fedvlm.config.config import resolve
from fedvlm.errors import FedvlmError
from fedvlm.system import files, machine
from fedvlm.training import train
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun

MODES = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")


@pytest.fixture(scope="module")
def trials(tmp_path_factory) -> Trials:
    return Trials(tmp_path_factory.mktemp("trials"))


def cut(trials: Trials, to: Path, rounds: int = 3) -> RunFolder:
    """A run that stopped because its disk was full, after so many rounds."""
    for room in range(trials.bytes // 2, trials.bytes, 700):
        with pytest.raises(FedvlmError), Disk(to, room):
            trials.run(to)
        if (saved := RunFolder(to).load()) and saved[1] >= rounds - 1:
            break
    return RunFolder(to)


# Full disks and kills


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.8, 0.9, 0.99])
def test_a_run_on_a_full_disk_goes_on_to_the_same_bits(share, trials, tmp_path):
    assert trials.resumed(tmp_path / "run", int(share * trials.bytes)) == []


@pytest.mark.parametrize("share", [0.4, 0.75, 0.95])
def test_a_killed_run_goes_on_to_the_same_bits(share, trials, tmp_path):
    assert trials.resumed(tmp_path / "run", int(share * trials.bytes), dies=True) == []


def test_stopped_in_the_first_write_the_same_command_starts_again(trials, tmp_path):
    """At each sector of run.json, and just before and behind it; one after the other in the same folder."""
    size = len(replace(trials.whole.record, result=None).to_json().encode())
    run = tmp_path / "run"
    for room in (0, 1, *range(512, size, 512), size - 1):
        for dies in (False, True):
            with pytest.raises(Killed if dies else FedvlmError), Disk(run, room, dies):
                trials.run(run)
            assert not (run / "run.json").exists()
    assert any(run.glob("*.part"))  # what the kills left
    assert trials.resumed(run) == []


def test_the_code_of_ones_own_parts_is_written_again_as_a_whole(trials, tmp_path):
    idea, run = tmp_path / "idea.py", tmp_path / "run"
    idea.write_text(
        '"""An adapter."""\nfrom dataclasses import dataclass\nfrom fedvlm.parts import Head\n\n\n'
        "@dataclass(frozen=True)\nclass Idea(Head):\n    pass\n" + "# a longer file\n" * 100
    )
    setup = resolve("fedavg", {"data": trials.setup.config.data, "adapter": str(idea), "rounds": 1})
    for room in (0, 700, 1700):
        with pytest.raises(FedvlmError, match="No space left"), Disk(run, room):
            train.train(PlannedRun(setup, trials.pool, run))
    assert train.train(PlannedRun(setup, trials.pool, run)).done
    assert (run / "code" / "adapter" / "idea.py").read_text() == idea.read_text()


def test_the_command_says_it_in_one_sentence(trials, tmp_path, capsys):
    with Disk(tmp_path / "run", int(0.6 * trials.bytes)):
        assert main([*trials.words, f"out={tmp_path / 'run'}"]) == 1
    told = capsys.readouterr().err
    assert "No space left" in told and "fedvlm resume" in told and "defect" not in told
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert trials.differences(tmp_path / "run") == []


def test_on_a_real_file_system_that_is_full(trials, tmp_path):
    """Where reading what was never written, through a memory map, would end the process."""
    place = tmp_path / "small"
    try:
        with small_file_system(place, 20 << 10):
            with pytest.raises(FedvlmError, match="No space left"):
                trials.run(place / "run")
            enlarge(place, 8 << 20)
            assert trials.resumed(place / "run") == []
    except OSError as error:
        pytest.skip(str(error))


# Damaged files


def test_a_changed_byte_of_the_state_is_refused(trials, tmp_path):
    run = cut(trials, tmp_path / "run")
    path = run.folder / "state.safetensors"
    whole, (state, round) = path.read_bytes(), run.load()
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            found, its_round = run.load()
        except FedvlmError as told:
            assert "damaged" in str(told)
        else:  # a space between two words of its header
            assert its_round == round and all(
                torch.equal(a[k], b[k]) for a, b in zip(found, state, strict=True) for k in b
            )
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
    with pytest.raises(FedvlmError, match=r"state.safetensors is damaged \(checksum\), or of another run; restore it"):
        trials.run(run.folder)


def test_another_round_in_the_state_is_refused(trials, tmp_path):
    run = cut(trials, tmp_path / "run")
    path = run.folder / "state.safetensors"
    whole, (_, round) = path.read_bytes(), run.load()
    path.write_bytes(whole.replace(f'"saved":"{round} '.encode(), f'"saved":"{9 - round} '.encode()))
    assert path.read_bytes() != whole
    with pytest.raises(FedvlmError, match="checksum"):
        run.load()


@pytest.mark.parametrize("metadata", [None, {"round": "99"}, {"saved": ""}, {"saved": "x y"}, {"saved": "99"}])
def test_a_state_without_a_checksum_is_refused(metadata, trials, tmp_path):
    """As fedvlm 0.2 wrote it, among others."""
    from safetensors.torch import load_file, save_file

    run = cut(trials, tmp_path / "run")
    path = run.folder / "state.safetensors"
    save_file(load_file(path), path, metadata)
    with pytest.raises(FedvlmError, match="damaged"):
        run.load()


def test_a_state_of_another_run_is_refused(trials, tmp_path):
    run, other = cut(trials, tmp_path / "run"), tmp_path / "other"
    train.train(PlannedRun(trials.setup.with_(seed=7), trials.pool, other))
    (run.folder / "state.safetensors").write_bytes((other / "state.safetensors").read_bytes())
    with pytest.raises(FedvlmError, match="of another run"):
        trials.run(run.folder)


@pytest.mark.parametrize("left", [None, b""])
def test_missing_rows_are_an_error_and_no_reset(left, trials, tmp_path):
    """Both with the same command and with `resume` or `predict`, which load the state first."""
    run = cut(trials, tmp_path / "run")
    (run.folder / "rows.bin").unlink()
    if left is not None:
        (run.folder / "rows.bin").write_bytes(left)
    with pytest.raises(FedvlmError, match=r"rows.bin is missing or empty"):
        run.load()
    with pytest.raises(FedvlmError, match=r"rows.bin is missing or empty"):
        trials.run(run.folder)
    assert left is not None or not (run.folder / "rows.bin").exists()


def test_damaged_rows_are_an_error_and_no_reset(trials, tmp_path):
    run = cut(trials, tmp_path / "run")
    path = run.folder / "rows.bin"
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    with pytest.raises(FedvlmError, match=r"rows.bin is damaged"):
        trials.run(run.folder)
    path.write_bytes(whole[:300] + bytes(len(whole) - 300))  # the rows, and not the table before them
    with pytest.raises(FedvlmError, match=r"rows.bin is damaged for client \d"):
        trials.run(run.folder)


def test_a_missing_state_is_an_error_once_rounds_were_played(trials, tmp_path):
    run = cut(trials, tmp_path / "run")
    (run.folder / "state.safetensors").unlink()
    with pytest.raises(FedvlmError, match=r"state.safetensors is missing"):
        trials.run(run.folder)


@pytest.mark.parametrize(
    "torn", [b'{"round": 2, "by', b"\xff\xfe\x00\n", b"[1, 2]\n", b"7\n", b'{"bytes_up": 3}\n', b'{"round": "x"}\n']
)
def test_torn_lines_of_rounds_are_dropped(torn, trials, tmp_path):
    """At the end, and in the middle where the round was recorded again."""
    run = cut(trials, tmp_path / "run")
    path = run.folder / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], torn.rstrip(b"\n") + b"\n", *lines[2:], torn]))
    assert run.rounds() == [json.loads(line) for line in lines]
    assert trials.resumed(run.folder) == []


def test_a_round_that_is_not_recorded_is_an_error(trials, tmp_path):
    run = cut(trials, tmp_path / "run")
    path = run.folder / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1] + lines[2:]))
    with pytest.raises(FedvlmError, match=r"no record of round 1, and state.safetensors is of round"):
        trials.run(run.folder)


# Places that cannot be written


@pytest.fixture(scope="module")
def done(images, tmp_path_factory) -> RunFolder:
    """On a few images, which have to be encoded."""
    place = tmp_path_factory.mktemp("done")
    for path in sorted(images.glob("*/[bc]*/*"))[::4]:
        (place / "few" / path.relative_to(images)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place / "few" / path.relative_to(images))
    return train_small(place / "few", place / "run", rounds=1)


def test_outputs_to_a_read_only_place_are_one_sentence(done, trials, images, tmp_path, capsys):
    place, picture = tmp_path / "fixed", next((images / "noto" / "bird").glob("*.png"))
    place.mkdir()
    unfinished = cut(trials, place / "run").folder
    capsys.readouterr()
    with read_only(place):
        for words in (
            ["resume", str(unfinished)],
            ["compare", str(done.folder), "--csv", str(place / "table.csv")],
            ["compare", str(done.folder), "--latex", str(place / "table.tex")],
            ["report", str(done.folder), "--out", str(place / "report.html")],
            ["export", str(done.folder), "--out", str(place / "model")],
            ["predict", str(done.folder), str(picture), "--csv", str(place / "predicted.csv")],
        ):
            assert main(words) == 1, words
            told = capsys.readouterr().err
            assert "Read-only file system" in told and "defect" not in told, told


def test_predicting_needs_no_right_to_write(done, images, capsys):
    picture = next((images / "noto" / "bird").glob("*.png"))
    with read_only(done.folder):
        assert main(["predict", str(done.folder), str(picture), "--client", "noto"]) == 0
        assert main(["compare", str(done.folder)]) == 0


def test_without_a_home_folder_the_cache_has_to_be_named(monkeypatch):
    monkeypatch.delenv("FEDVLM_CACHE")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(FedvlmError, match="FEDVLM_CACHE"):
        machine.cache_home()
    catalogue.load.cache_clear()
    assert catalogue.load().methods


def test_a_folder_in_the_place_of_a_file_is_one_sentence(tmp_path):
    with pytest.raises(FedvlmError, match=r"cannot be written \(Is a directory\)"):
        files.write(tmp_path, "x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FedvlmError, match="cannot be written"):
        files.write(tmp_path / "file" / "x.csv", "x")


# How files are written


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "table.csv"
    files.write(path, "before")
    for room in (0, 3, 700):
        with pytest.raises(FedvlmError, match="No space left"), Disk(tmp_path, room):
            files.write(path, "after" * 1000)
        assert path.read_text() == "before" and [p.name for p in path.parent.iterdir()] == ["table.csv"]
    files.write(path, "äfter")
    assert path.read_text(encoding="utf-8") == "äfter"


@MODES
def test_a_link_stays_and_devices_can_be_written(tmp_path):
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    files.write(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "after"
    files.write(Path(os.devnull), "x")
    assert not Path(os.devnull).is_file()
    words = [
        sys.executable,
        "-c",
        "import pathlib, fedvlm.system.files as f; f.write(pathlib.Path('/dev/stdout'), 'seen')",
    ]
    with (tmp_path / "out").open("wb") as out:  # of which nobody may take the place
        subprocess.run(words, stdout=out, check=True)
        assert os.fstat(out.fileno()).st_nlink == 1 and (tmp_path / "out").read_text() == "seen"
    assert subprocess.run(words, capture_output=True, check=True).stdout == b"seen"
    shared = Path("/dev/shm")
    if os.access(shared, os.W_OK):  # a place for files like any other
        with tempfile.TemporaryDirectory(dir=shared) as folder:
            for text in ("before", "after"):
                files.write(Path(folder, "x"), text)
            assert Path(folder, "x").read_text() == "after"


@MODES
def test_what_tells_of_examples_is_for_the_user_alone(trials, tmp_path):
    run = trials.whole.folder
    modes = {p.name: p.stat().st_mode & 0o777 for p in run.iterdir()}
    for name in ("rows.bin", "outputs.safetensors", "state.safetensors"):
        assert modes[name] == 0o600
    assert modes["run.json"] == modes["rounds.jsonl"]
    files.private_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The names of files that are synced and renamed, in order."""
    found: list[str] = []
    inner = os.fsync, os.replace

    def fsync(handle):
        found.append("sync " + Path(f"/proc/self/fd/{handle}").readlink().name)
        inner[0](handle)

    def replace(source, target):
        found.append("rename " + Path(target).name)
        inner[1](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are known on Linux")
def test_what_a_power_cut_must_not_cost_is_on_the_disk_in_time(calls, trials, tmp_path):
    files.write(tmp_path / "table.csv", "x")
    assert calls == ["rename table.csv"]
    run = cut(trials, tmp_path / "run")
    state, _ = run.load()
    calls.clear()
    run.save(state, 1)
    assert calls.pop(2).endswith(".part")  # the new state, under a name of its own
    assert calls == ["sync rounds.jsonl", "sync rows.bin", "rename state.safetensors", "sync run"]
    calls.clear()
    run.save(state, 2)  # within a short time: the disk is not waited for again
    assert calls == ["rename state.safetensors"]
    run.next_sync = 0.0
    run.save(state, 3)
    assert len(calls) == 1 + 5


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are known on Linux")
def test_a_finished_run_is_on_the_disk(calls, trials, tmp_path):
    trials.run(tmp_path / "run")
    first = next(k for k, call in enumerate(calls) if call == "rename run.json")
    last = len(calls) - 1 - calls[::-1].index("rename run.json")
    assert calls[first - 1].startswith("sync ") and calls[first + 1] == "sync run"
    before = calls[:last][-6:]
    for name in ("rounds.jsonl", "rows.bin", "state.safetensors", "outputs.safetensors"):
        assert f"sync {name}" in before
