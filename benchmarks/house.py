"""The size of the architecture, before and after: `python benchmarks/house.py --base REV`.

For REV and for this tree: in one round of fedot and of feddtl (serial, with its evaluation) the files of the package that
run, and the distinct calls from a function of one file to a function of another; members of the adapter base class; methods
of Method; the longest file; uses of dict[str, Any]; recipes. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

COMMON = ["data={images}", "unseen=noto", "rounds=1", "engine=serial"]


def traced(words: list[str]) -> tuple[int, int]:
    """Files of the package that a round runs through, and distinct calls from a function of one to one of another."""
    import fedvlm
    from fedvlm.cli import main
    from fedvlm.rounds.method import Method
    from fedvlm.training import train

    home = str(Path(fedvlm.__file__).parent)
    edges: set[tuple[str, str, str, str]] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not is_function(frame, home):
            return
        caller = frame.f_back
        while caller is not None and not is_function(caller, home):
            caller = caller.f_back
        if caller is not None:
            edges.add((*place(caller), *place(frame)))

    def recorded(inner: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **keys: object) -> object:
            sys.setprofile(record)
            try:
                return inner(*args, **keys)
            finally:
                sys.setprofile(None)

        return call

    plain = Method.round, train.evaluate
    Method.round, train.evaluate = (recorded(f) for f in plain)  # type: ignore
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(words) == 0
    finally:
        Method.round, train.evaluate = plain  # type: ignore
    files = {f for edge in edges for f in (edge[0], edge[2])}
    return len(files), len({e for e in edges if e[0] != e[2]})


def is_function(frame: FrameType, home: str) -> bool:
    """A function of the package, not the body of a module, a class or a comprehension."""
    return frame.f_code.co_filename.startswith(home) and not frame.f_code.co_name.startswith("<")


def place(frame: FrameType) -> tuple[str, str]:
    return frame.f_code.co_filename, frame.f_code.co_name


def lists_of_keys(sources: dict[Path, str], base: Path) -> int:
    """Literal collections with three or more names of a run's keys in other modules than the one that declares them."""
    classes = [n for n in ast.parse(base.read_text()).body if isinstance(n, ast.ClassDef) and n.name != "Setup"]
    fields = [n.target for c in classes for n in c.body if isinstance(n, ast.AnnAssign)]
    names = {f.id for f in fields if isinstance(f, ast.Name)}
    nodes = [node for text in sources.values() for node in ast.walk(ast.parse(text))]
    entries = [n.elts for n in nodes if isinstance(n, ast.Tuple | ast.List | ast.Set)]
    entries += [n.keys for n in nodes if isinstance(n, ast.Dict)]
    return sum(len({e.value for e in each if isinstance(e, ast.Constant)} & names) >= 3 for each in entries)


def members(path: Path, name: str, functions_only: bool = False) -> int:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            kinds = ast.FunctionDef if functions_only else (ast.FunctionDef, ast.AnnAssign)
            return sum(isinstance(n, kinds) for n in node.body)
    raise ValueError(f"{path} has no class {name}")


def measure(tree: Path, images: str) -> dict[str, str]:
    package = tree / "fedvlm"
    sources = {p: p.read_text() for p in sorted(package.rglob("*.py"))}
    longest = max(sources, key=lambda p: sources[p].count("\n"))
    found = {}
    for name in ("fedot", "feddtl"):
        with tempfile.TemporaryDirectory() as out:
            words = ["run", name, *(w.format(images=images) for w in COMMON), f"out={out}/run"]
            files, edges = traced(words)
            found[f"one round of {name}: files, calls between files"] = f"{files}, {edges}"
    return found | {
        "members of the adapter base class": str(members(package / "core" / "adapter.py", "Adapter")),
        "methods of Method": str(members(package / "rounds" / "method.py", "Method", functions_only=True)),
        "longest file, lines": f"{sources[longest].count(chr(10))} ({longest.relative_to(package)})",
        "uses of dict[str, Any]": str(sum(s.count("dict[str, Any]") for s in sources.values())),
        "collections with three or more names of keys": str(lists_of_keys(sources, package / "config" / "config.py")),
        "recipes": str(len(list((package / "parts" / "recipes").glob("*.yaml")))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", default="HEAD", help="the revision to compare with")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(Path(args.measure[0]), args.measure[1])))
        return
    root = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root / "benchmarks"))
    from same import make

    with tempfile.TemporaryDirectory() as work:
        images = make(Path(work) / "data", root / "fedvlm")["images"]
        before = Path(work) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", str(before), args.base], cwd=root, check=True)
        found = []
        try:
            for tree in (before, root):
                env = os.environ | {"PYTHONPATH": str(tree), "FEDVLM_CACHE": f"{work}/cache"}
                call = [sys.executable, __file__, "--measure", str(tree), str(images)]
                done = subprocess.run(call, env=env, cwd=tree, check=True, capture_output=True, text=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=root, check=True)
    print("| | before | after |\n|---|---|---|")
    for name in found[0]:
        print(f"| {name} | {found[0][name]} | {found[1][name]} |")


if __name__ == "__main__":
    main()
