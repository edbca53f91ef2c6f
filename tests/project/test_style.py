"""The house style that tools can check: lint, format, strict types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("words", ["ruff check .", "ruff format --check .", "mypy --cache-dir={tmp}"])
def test_tools_find_nothing(words, tmp_path):
    pytest.importorskip(words.split()[0])
    call = [sys.executable, "-m", *words.format(tmp=tmp_path).split()]
    found = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_folders_import_only_from_those_below():
    """The contract is in pyproject.toml. In a process of its own: import-linter switches off all loggers that it finds."""
    pytest.importorskip("importlinter.cli")
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True, no_logo=True))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
