"""benchmarks/mutants.py: its entries follow the code, and it tells a mistake that is noticed from one that is not."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = "def double(x):\n    return 2 * x\n"
TEST = """from tiny import double


def test_one():
    assert double(1) == 2


def test_none():
    assert double(0) == 0


def test_wrong():
    assert double(1) == 5
"""
ONE, NONE, WRONG = (f"tests/test_tiny.py::test_{name}" for name in ("one", "none", "wrong"))


@pytest.fixture
def mutants(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import mutants  # benchmarks/mutants.py

    return mutants


@pytest.fixture
def found_by(mutants, tmp_path, capsys) -> Callable[[str], tuple[int, str]]:
    """The exit code and what is printed, of a project of one function with one mutant: a factor of 3 in place of 2."""
    root = tmp_path / "project"
    for name, text in {"tiny/__init__.py": CODE, "tests/test_tiny.py": TEST}.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)

    def call(tests: str, old: str = "return 2", new: str = "return 3", more: str = "") -> tuple[int, str]:
        entry = f"[[mutant]]\nname = 'factor'\nfile = 'tiny/__init__.py'\nold = '{old}'\nnew = '{new}'\n"
        data = tmp_path / "data.toml"
        data.write_text(entry + f"tests = {tests.split()}\nwhat = 'twice is three times'\n" + more)
        code = mutants.main(["--root", str(root), "--data", str(data), "-j", "1", "--limit", "60"])
        assert (root / "tiny" / "__init__.py").read_text() == CODE
        return code, capsys.readouterr().out

    return call


def test_every_entry_follows_the_code(mutants):
    for mutant in mutants.read(ROOT / "benchmarks" / "mutants.toml"):
        plain = (ROOT / mutant.file).read_text("utf-8")
        changed = mutant.applied(plain)  # ValueError where `old` is not there exactly once
        assert changed != plain, mutant.name
        assert mutant.what.strip(), mutant.name
        if mutant.file.endswith(".py"):
            compile(changed, mutant.file, "exec")


def test_every_test_of_an_entry_exists(mutants):
    defined: dict[str, set[str]] = {}
    for mutant in mutants.read(ROOT / "benchmarks" / "mutants.toml"):
        assert mutant.tests, mutant.name
        named = [t for before, t in zip(("", *mutant.tests), mutant.tests, strict=False) if "-k" not in (before, t)]
        for test in named:
            file, _, function = test.partition("::")
            if file not in defined:
                tree = ast.parse((ROOT / file).read_text("utf-8"))
                defined[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert not function or function.partition("[")[0] in defined[file], f"{mutant.name}: {test}"


@pytest.mark.parametrize("tests", [ONE, "tests/test_tiny.py -k one"])
def test_a_mistake_that_a_test_notices(found_by, tests):
    code, said = found_by(tests)
    assert code == 0
    assert "noticed" in said and "tests/test_tiny.py::test_one" in said and "1 noticed;" in said


def test_a_mistake_that_no_test_notices(found_by):
    code, said = found_by(NONE)
    assert code == 1
    assert "SURVIVED" in said and "twice is three times" in said


def test_a_mistake_that_no_test_can_notice(found_by):
    code, said = found_by(NONE, more="reason = 'of zero it is the same'\n")
    assert code == 0
    assert "1 survived, as its reason says;" in said and "of zero it is the same" in said


@pytest.mark.parametrize("old", ["return 4", "x"])
def test_code_that_is_not_there_once(found_by, old):
    code, said = found_by(ONE, old)
    assert code == 1
    assert f"found {CODE.count(old)} times in tiny/__init__.py" in said


def test_a_test_that_fails_anyway(found_by):
    code, said = found_by(WRONG)
    assert code == 1
    assert "without it" in said and "noticed" not in said


def test_code_that_cannot_be_imported_shows_nothing(found_by):
    code, said = found_by(ONE, new="return (")
    assert code == 1
    assert "ERROR" in said and "noticed" not in said


def test_names_files_and_samples_choose(mutants):
    every = [mutants.Mutant(f"m{k}", f"a/{k % 2}.py", "", "", (), "") for k in range(6)]
    assert [m.name for m in mutants.chosen(every, ["m2", "a/1.py"], 0, 0)] == ["m1", "m2", "m3", "m5"]
    drawn = [mutants.chosen(every, [], 3, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 3
    with pytest.raises(SystemExit, match="no mutant fits m9"):
        mutants.chosen(every, ["m9"], 0, 0)
