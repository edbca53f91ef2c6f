"""The size and shape of the package: `python benchmarks/house.py [--base REV]`, a Markdown table of REV and of this tree.

Static figures are read from the sources. The way of a run is traced: `fedvlm run fedot rounds=1` with an empty feature
store. Its hops are the distinct pairs of a function of one file that calls a function of another, calls at import time left
out; its frames are those of fedvlm on the stack at the first call of `optimise`, from the command line's `main` on, both
counted.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
FRAGMENTS = (
    *("After", "As", "At", "Before", "By", "For", "From", "In", "Of", "On", "Over"),
    *("So", "To", "Under", "Until", "Where", "With", "Within", "Without"),
)
ONCE = {  # what prepares a run: functions whose calls are counted
    ("config/config.py", "resolve"): "calls of resolve",
    ("backbones/__init__.py", "load"): "loads of the backbone",
    ("data/clients.py", "federate"): "calls of federate",
    ("data/clients.py", "shared_out"): "calls of federate",
    ("rounds/method.py", "Method.build"): "calls of Method.build",
    ("core/records.py", "RunRecord.from_json"): "parses of run.json",
}
HANDED_ON = ("setup", "pools", "trusted")  # parameters that say that a function hands something on
LIST_OF_KEYS = 3  # names of keys from which on a tuple, list or set of them counts as a list kept by hand


def figures(tree: Path) -> dict[str, str]:
    """What can be read from the sources of a tree."""
    sources = {p: p.read_text(encoding="utf-8") for p in sorted((tree / "fedvlm").rglob("*.py"))}
    parsed = {path: ast.parse(text) for path, text in sources.items()}
    kinds = sum((kinds_of_lines(p, sources[p], parsed[p]) for p in sources), Counter())
    lengths = [text.count("\n") for text in sources.values()]
    pages = sorted((tree / "docs").glob("*.md"))
    return {
        "lines of the package": f"{sum(lengths):,}",
        **{f"– {kind}": f"{kinds[kind]:,}" for kind in ("code", "docstrings", "comments", "blank")},
        **{f"– in {room}/": f"{count:,}" for room, count in sorted(lines_by_room(tree, sources).items())},
        "lines of tests": f"{sum(p.read_text('utf-8').count(chr(10)) for p in (tree / 'tests').rglob('*.py')):,}",
        "modules beside the rooms": str(sum(not p.name.startswith("__") for p in (tree / "fedvlm").glob("*.py"))),
        "rooms in import cycles": str(len(in_cycles(imports(tree, parsed)))),
        "pairs of rooms that import upwards": str(upward(tree, imports(tree, parsed))),
        "lists of keys kept by hand": str(sum(lists_of_keys(parsed))),
        "public names defined in several modules": shared_names(parsed),
        f"functions with a parameter {', '.join(HANDED_ON)}": ", ".join(
            str(takers(parsed, name)) for name in HANDED_ON
        ),
        "lines of a file: median, 95th percentile": f"{median(lengths):.0f}, {quantiles(lengths, n=20)[-1]:.0f}",
        "docstrings that continue their name": str(sum(fragments(t) for t in parsed.values())),
        "words of docs/": f"{sum(len(p.read_text('utf-8').split()) for p in pages):,}",
    }


def kinds_of_lines(path: Path, text: str, tree: ast.Module) -> Counter[str]:
    found: Counter[str] = Counter(blank=sum(not line.strip() for line in text.splitlines()))
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            inside |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = text.splitlines()
    found["docstrings"] = sum(bool(lines[n - 1].strip()) for n in inside)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found["comments"] = sum(t.type == tokenize.COMMENT and t.line.lstrip().startswith("#") for t in tokens)
    found["code"] = len(lines) - found["blank"] - found["docstrings"] - found["comments"]
    return found


def room_of(tree: Path, path: Path) -> str:
    """The folder or module directly in fedvlm."""
    return path.relative_to(tree / "fedvlm").parts[0].removesuffix(".py")


def lines_by_room(tree: Path, sources: dict[Path, str]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for path, text in sources.items():
        if path.parent != tree / "fedvlm":
            found[room_of(tree, path)] += text.count("\n")
    return found


def imports(tree: Path, parsed: dict[Path, ast.Module]) -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second, types for annotations alone left out."""
    rooms, found = {room_of(tree, p) for p in parsed}, set()
    for path, module in parsed.items():
        typing_only = [n for n in ast.walk(module) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
        skipped = {id(n) for block in typing_only for part in block.body for n in ast.walk(part)}
        for node in ast.walk(module):
            if not isinstance(node, ast.ImportFrom) or id(node) in skipped or not node.module:
                continue
            if node.module == "fedvlm":
                found |= {(room_of(tree, path), a.name) for a in node.names if a.name in rooms}
            elif node.module.startswith("fedvlm."):
                found.add((room_of(tree, path), node.module.split(".")[1]))
    return {(a, b) for a, b in found if a != b and "__init__" not in (a, b)}


def in_cycles(edges: set[tuple[str, str]]) -> set[str]:
    """The rooms that can reach themselves."""
    reached = {a: {b for x, b in edges if x == a} for a, _ in edges}
    while True:
        more = {a: to.union(*(reached.get(b, set()) for b in to)) for a, to in reached.items()}
        if more == reached:
            return {a for a, to in reached.items() if a in to}
        reached = more


def upward(tree: Path, edges: set[tuple[str, str]]) -> int | str:
    """How many imports are against the contract in pyproject.toml; "–" where there is none."""
    config = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["tool"]
    if "importlinter" not in config:
        return "–"
    order = config["importlinter"]["contracts"][0]["layers"]
    return sum(order.index(a) > order.index(b) for a, b in edges if a in order and b in order)


def lists_of_keys(parsed: dict[Path, ast.Module]) -> Iterator[bool]:
    """True for each tuple, list or set of names of keys of a run."""
    classes = {n.name: n for t in parsed.values() for n in t.body if isinstance(n, ast.ClassDef)}
    holders = [classes["Config"], *(classes[b.id] for b in classes["Config"].bases if isinstance(b, ast.Name))]
    fields = [n for c in holders for n in c.body if isinstance(n, ast.AnnAssign)]
    keys = {n.target.id for n in fields if isinstance(n.target, ast.Name)}
    for module in parsed.values():
        for node in ast.walk(module):
            if isinstance(node, ast.Tuple | ast.List | ast.Set) and len(node.elts) >= LIST_OF_KEYS:
                names = [e.value for e in node.elts if isinstance(e, ast.Constant)]
                yield len(names) == len(node.elts) and set(names) <= keys


def shared_names(parsed: dict[Path, ast.Module]) -> str:
    counts = public_names(parsed)
    twice = sum(count > 1 for count in counts.values())
    return f"{twice} of {len(counts):,} ({twice / len(counts):.1%})"


def public_names(parsed: dict[Path, ast.Module]) -> Counter[str]:
    """The names of functions and classes, each with the number of modules that define it."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    named = [n.name for t in parsed.values() for n in t.body if isinstance(n, kinds) and not n.name.startswith("_")]
    return Counter(named)


def takers(parsed: dict[Path, ast.Module], name: str) -> int:
    """How many functions have a parameter of this name."""
    every = (n for t in parsed.values() for n in ast.walk(t) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return sum(name in {a.arg for a in (*n.args.args, *n.args.kwonlyargs)} for n in every)


def fragments(tree: ast.Module) -> int:
    """Docstrings that go on from the name (tests/project/test_docstrings.py has the rule)."""
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
    return sum((ast.get_docstring(n) or "").partition(" ")[0].rstrip(",:") in FRAGMENTS for n in nodes)


def traced(words: list[str]) -> dict[str, str]:
    """The way of a command through the package."""
    import fedvlm
    from fedvlm.cli import main

    home = str(Path(fedvlm.__file__).parent)
    edges: set[tuple[tuple[str, str], tuple[str, str]]] = set()
    way: list[tuple[str, str]] = []
    calls = dict.fromkeys(ONCE.values(), 0)

    def record(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not is_function(frame, home):
            return
        if (name := ONCE.get((place(frame)[0], frame.f_code.co_qualname))) is not None:
            calls[name] += 1
        callers = list(callers_of(frame, home))
        if callers:
            edges.add((place(callers[0]), place(frame)))
        if not way and place(frame)[1] == "optimise":
            way.extend(place(f) for f in (frame, *all_callers(frame, home)))

    sys.setprofile(record)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(words) == 0
    finally:
        sys.setprofile(None)
    files = {file for edge in edges for file, _ in edge}
    hops = sum(a[0] != b[0] for a, b in edges)
    print("\n".join(f"{file}: {name}" for file, name in reversed(way)), file=sys.stderr)
    return {
        "run fedot: files, hops": f"{len(files)}, {hops}",
        "frames to the first step": str(1 + way.index(("cli/__init__.py", "main"))),
        **{name: str(n) for name, n in calls.items()},
    }


def all_callers(frame: FrameType, home: str) -> Iterator[FrameType]:
    """Every frame of the package below this one, those of generators and comprehensions counted."""
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_filename.startswith(home):
            yield caller
        caller = caller.f_back


def callers_of(frame: FrameType, home: str) -> Iterator[FrameType]:
    caller = frame.f_back
    while caller is not None:
        if is_function(caller, home):
            yield caller
        caller = caller.f_back


def is_function(frame: FrameType, home: str) -> bool:
    """Whether it is a function of the package, not the body of a module, a class or a comprehension."""
    return frame.f_code.co_filename.startswith(home) and not frame.f_code.co_name.startswith("<")


def place(frame: FrameType) -> tuple[str, str]:
    return re.sub(r".*/fedvlm/", "", frame.f_code.co_filename), frame.f_code.co_name


def measured(tree: Path) -> dict[str, str]:
    """All figures of a tree; the command runs in a process of its own, which imports that tree."""
    with tempfile.TemporaryDirectory() as work:
        words = ["run", "fedot", "data=emoji", "unseen=noto", "rounds=1", f"out={work}/run"]
        env = os.environ | {"PYTHONPATH": str(tree), "FEDVLM_CACHE": f"{work}/cache"}
        call = [sys.executable, __file__, "--trace", *words]
        done = subprocess.run(call, env=env, cwd=tree, check=True, capture_output=True, text=True)
    return figures(tree) | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="", help="a revision to compare with")
    parser.add_argument("--trace", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trace:
        print(json.dumps(traced(args.trace)))
        return
    now = measured(ROOT)
    before: dict[str, str] = {}
    if args.base:
        with tempfile.TemporaryDirectory() as work:
            tree = Path(work) / "before"
            subprocess.run(["git", "worktree", "add", "--detach", "-q", str(tree), args.base], cwd=ROOT, check=True)
            try:
                before = measured(tree)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    print("| | before | now |\n|---|---|---|" if before else "| | |\n|---|---|")
    for name in dict.fromkeys([*now, *before]):
        cells = [before.get(name, "–"), now.get(name, "–")] if before else [now[name]]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
