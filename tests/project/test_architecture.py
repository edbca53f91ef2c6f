"""docs/architecture.md says what the package is: its rooms in their order, each in the words of its docstring."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import house

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fedvlm"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def rooms() -> list[str]:
    """The rooms from the top down, as the import contract has them."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = config["tool"]["importlinter"]["contracts"][0]["layers"]
    return [name for name in layers if not name.startswith("__")]


def first_sentence(name: str) -> str:
    """The first sentence of a room's docstring, on one line."""
    path = PACKAGE / name / "__init__.py" if (PACKAGE / name).is_dir() else PACKAGE / f"{name}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    found = re.match(r".*?[.](?= [A-Z]|$)", " ".join(text.partition("\n\n")[0].split()))
    assert found, path
    return found[0]


def test_the_page_has_every_room_in_its_order_with_the_sentence_of_its_docstring():
    shown = re.findall(r"^\| `(\w+)(?:\.py)?` \| (.+) \|$", PAGE.partition("## A run")[0], re.MULTILINE)
    assert shown == [(name, first_sentence(name)) for name in rooms()]


def test_the_drawing_has_every_room():
    drawn = (ROOT / "docs" / "house.svg").read_text(encoding="utf-8")
    assert sorted(re.findall(r"(\w+)(?:/|\.py)", drawn.partition("</style>")[2])) == sorted(rooms())


def test_every_file_and_function_that_the_page_names_exists():
    """`training/train.py`, and functions such as `play_rounds` somewhere in the package."""
    source = "\n".join(p.read_text(encoding="utf-8") for p in sorted(PACKAGE.rglob("*.py")))
    for path in set(re.findall(r"`(\w+/[\w/]+(?:\.py)?)`", PAGE)):
        assert (PACKAGE / path).exists() or (PACKAGE / f"{path}.py").exists(), path
    for name in set(re.findall(r"`(\w+)` of ", PAGE)):
        assert re.search(rf"^\s*(?:def|class) {name}\b", source, re.MULTILINE), name


def test_a_public_name_stands_for_one_thing():
    """At most 5 % of the functions and classes share their name with another module's, such as `main` of the commands."""
    counts = house.public_names({p: ast.parse(p.read_text(encoding="utf-8")) for p in PACKAGE.rglob("*.py")})
    shared = sorted(name for name, count in counts.items() if count > 1)
    assert len(counts) > 1000 and len(shared) < 0.05 * len(counts), shared
