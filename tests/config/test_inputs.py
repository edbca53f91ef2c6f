"""Recipes made to exhaust the reader, and wrong inputs of the commands that only look: one sentence each, at once."""

from __future__ import annotations

import time

import pytest

from fedvlm.cli import doctor, main
from fedvlm.cli.commands.completion import complete
from fedvlm.config import recipe
from fedvlm.errors import FedvlmError


def laughs(line: str) -> str:
    """Each of nine lines stands for the one before ten times: 10⁹ in all."""
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{i}: &a{i} " + line.replace("ITEMS", ", ".join([f"*a{i - 1}"] * 10)) for i in range(1, 10)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (laughs("[ITEMS]"), "line 3: too many aliases"),
        (laughs("{<<: [ITEMS]}"), "line 3: too many aliases"),  # merged, a mapping is copied
        ("[" * 50_000, "line 1: too many brackets or indents inside each other"),  # the loader in C would crash
        ("like: fedavg\nsettings: " + "{a: " * 20_000, "line 2: too many brackets or indents"),
        ("like: fedavg\nidea: " + "so on " * 50_000, "larger than 256 kB"),
    ],
)
def test_a_recipe_that_would_exhaust_the_reader_is_refused_at_once(text, says, tmp_path):
    (tmp_path / "my.yaml").write_text(text)
    began = time.monotonic()
    with pytest.raises(FedvlmError, match=says):
        recipe.load(str(tmp_path / "my.yaml"))
    assert time.monotonic() - began < 2


def test_a_few_aliases_are_fine(tmp_path):
    (tmp_path / "my.yaml").write_text("like: fedavg\ntuned: {one: &a {lr: 0.1}, two: *a, three: {<<: *a, batch: 4}}\n")
    found = recipe.load(str(tmp_path / "my.yaml")).blocks[-1].tuned
    assert found == {"one": {"lr": 0.1}, "two": {"lr": 0.1}, "three": {"lr": 0.1, "batch": 4}}


def test_a_long_chain_of_recipes(tmp_path):
    for i in range(25):
        (tmp_path / f"{i}.yaml").write_text(f"like: {i + 1}.yaml\n")
    with pytest.raises(FedvlmError, match=r"19\.yaml: like: 20\.yaml: more than 20 recipes, each like the next"):
        recipe.load(str(tmp_path / "0.yaml"))
    (tmp_path / "18.yaml").write_text("like: fedavg\n")
    assert recipe.load(str(tmp_path / "0.yaml")).adapter == "head"


def test_names_that_no_system_takes(tmp_path, monkeypatch, capsys):
    for name in ("x" * 5000 + ".yaml", "a\0b.yaml"):
        with pytest.raises(FedvlmError, match="no such file"):
            recipe.load(name)
    monkeypatch.setenv("FEDVLM_CACHE", "x" * 5000)
    monkeypatch.setenv("FEDVLM_RUNS", "x" * 5000)
    assert main(["cache"]) == main(["cache", "--prune"]) == 1
    assert capsys.readouterr().err.count("set FEDVLM_CACHE") == 2
    assert complete("fedvlm report ") == []
    assert len([f for f in doctor._folders() if "cannot be written" in f.what]) == 2


def test_a_file_where_a_folder_should_be_is_found_by_the_doctor(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDVLM_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("FEDVLM_RUNS", str(tmp_path / "file" / "below"))
    assert len([f for f in doctor._folders() if "cannot be written" in f.what]) == 2


@pytest.mark.parametrize("days", ["-1", "nan"])
def test_pruning_asks_for_a_number_of_days(days, capsys):
    assert main(["cache", "--prune", "--older", days]) == 1
    assert f"--older {days}: expected a number of days of at least 0" in capsys.readouterr().err


def test_completion_does_not_run_the_code_of_a_recipe(tmp_path):
    (tmp_path / "part.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "my.yaml").write_text("like: fedavg\nadapter: part.py\n")
    assert "rounds=" in complete(f"fedvlm run {tmp_path / 'my.yaml'} r")
    assert not (tmp_path / "ran").exists()
