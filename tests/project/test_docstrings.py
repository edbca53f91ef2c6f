"""Docstrings of the package are sentences or phrases of their own: none goes on from the name above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fedvlm

ROOT = Path(fedvlm.__file__).parent
FRAGMENTS = (
    *(
        "After",
        "Around",
        "As",
        "At",
        "Before",
        "Behind",
        "Beside",
        "Between",
        "By",
        "For",
        "From",
        "In",
        "Inside",
        "Of",
    ),
    *("On", "Over", "So", "To", "Under", "Until", "Where", "With", "Within", "Without"),
    *("Called", "Goes", "Has", "Its", "Those"),
)  # first words of a docstring that needs the name before it to be understood


def fragments(source: str) -> Iterator[str]:
    """The docstrings that begin with one of FRAGMENTS."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if text.partition(" ")[0].rstrip(",:") in FRAGMENTS:
                yield text.partition("\n")[0]


def test_no_docstring_continues_its_name():
    found = {p.relative_to(ROOT).as_posix(): list(fragments(p.read_text("utf-8"))) for p in ROOT.rglob("*.py")}
    assert {path: texts for path, texts in found.items() if texts} == {}


def test_the_check_finds_fragments():
    wrong = '"""Of a module."""\nclass A:\n    """As given."""\n    def f(self):\n        """Within, it waits."""'
    assert list(fragments(wrong)) == ["Of a module.", "As given.", "Within, it waits."]
    assert list(fragments('"""Offers."""\ndef f():\n    """The mean of x."""\ndef g(): ...')) == []
