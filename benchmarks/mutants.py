"""Whether the tests notice a mistake: `python benchmarks/mutants.py [NAME…] [--sample N --seed S] [--list]`.

mutants.toml has one entry for each plausible mistake (a mutant): the file, the text that is there (`old`, exactly once), the
text with the mistake (`new`), the tests that must fail, and what a user would be told wrongly. In a copy of the checkout
(what git lists, with changes that are not committed) the named tests run without any mutant, when they must pass, and then
with one mutant at a time, when one of them must fail. Each line says what was found and in how many seconds.

Exit code 1: a mutant survives and its entry gives no `reason` why that is right; `old` is not found exactly once; tests
fail without a mutant; or a run ends in another way than by a failed test (time limit, a mutant that cannot be imported).
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.util
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PYTEST = ("-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=no", "--no-header")
# what is found, in the order of the closing line; the first two are as they should be
OUTCOMES = ("noticed", "survived, as its reason says", "SURVIVED", "TIMEOUT", "ERROR")


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # from the root of the repository
    old: str  # the text that is replaced; it is there exactly once
    new: str
    tests: tuple[str, ...]  # arguments of pytest: files and ids and, with "-k" before it, an expression
    what: str  # what a user would be told wrongly, in one sentence
    reason: str = ""  # why no test can notice it; "": one must

    def applied(self, text: str) -> str:
        """The text with the mistake; ValueError where `old` is not there exactly once."""
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"`old` is found {found} times in {self.file}; make it follow the code")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Found:
    outcome: str  # one of OUTCOMES
    detail: str = ""


def read(path: Path) -> list[Mutant]:
    entries = tomllib.loads(path.read_text("utf-8"))["mutant"]
    mutants = [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]
    if twice := [name for name, times in Counter(m.name for m in mutants).items() if times > 1]:
        raise SystemExit(f"{path}: more than one entry is named {', '.join(twice)}")
    return mutants


def chosen(mutants: list[Mutant], names: Sequence[str], sample: int, seed: int) -> list[Mutant]:
    """Those whose name or file fits one of `names` (all without names), and of these a random sample (0: all)."""
    unknown = [n for n in names if not any(fits(m, n) for m in mutants)]
    if unknown:
        raise SystemExit(f"no mutant fits {', '.join(unknown)}; --list shows them")
    found = [m for m in mutants if not names or any(fits(m, n) for n in names)]
    return random.Random(seed).sample(found, min(sample, len(found))) if sample else found


def fits(mutant: Mutant, name: str) -> bool:
    return fnmatch.fnmatch(mutant.name, name) or fnmatch.fnmatch(mutant.file, name)


class Checkout:
    """A copy of the repository in which files may be changed and tests run."""

    def __init__(self, root: Path, copy: Path, limit: float):
        self.path, self.limit = copy / "checkout", limit
        self.temporary = copy / "temporary"
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():  # deleted files are listed until that is committed
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.path / name)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.path), "TMPDIR": str(self.temporary)}

    def check_imported(self, package: str) -> None:
        """An installed package, or the checkout that this is a copy of, would notice no mutant."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        call = [sys.executable, "-c", f"import {package}; print({package}.__file__)"]
        done = subprocess.run(call, cwd=self.path, env=self.environment, capture_output=True, text=True)
        if done.returncode or not Path(done.stdout.strip()).resolve().is_relative_to(self.path.resolve()):
            raise SystemExit(
                f"`import {package}` in the copy at {self.path} does not import the copy, so no mutant would be seen: "
                f"{done.stdout.strip() or done.stderr.strip()[-500:]}"
            )

    def test(self, arguments: Sequence[str], *more: str) -> tuple[int | None, str]:
        """The exit code of pytest, None at the time limit, and its output."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        call = [sys.executable, *PYTEST, *more, "--rootdir", str(self.path), *arguments]
        with subprocess.Popen(
            call,
            cwd=self.path,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=self.limit)
                code: int | None = process.returncode
            except subprocess.TimeoutExpired:
                output, code = "", None
            finally:
                with contextlib.suppress(ProcessLookupError):  # workers that its tests left
                    os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(self.temporary, ignore_errors=True)
        return code, output

    @contextlib.contextmanager
    def with_mistake(self, mutant: Mutant) -> Iterator[None]:
        path = self.path / mutant.file
        plain = path.read_bytes()
        path.write_bytes(mutant.applied(plain.decode()).encode())
        forget_compiled(path)
        try:
            yield
        finally:
            path.write_bytes(plain)
            forget_compiled(path)


def forget_compiled(path: Path) -> None:
    """Python takes a compiled file for fresh where size and second of the change agree, as those of two mutants may."""
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def failing(checkout: Checkout, sets: list[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """The sets of tests that do not pass as things are, with pytest's last lines: all in one process and, where that does
    not pass, in halves."""
    if not sets:
        return {}
    code, output = together(checkout, sets)
    if code == 0:
        return {}
    if len(sets) == 1:
        return {sets[0]: "time limit" if code is None else "\n".join(output.strip().splitlines()[-5:])}
    half = len(sets) // 2
    return failing(checkout, sets[:half]) | failing(checkout, sets[half:])


def together(checkout: Checkout, sets: list[tuple[str, ...]]) -> tuple[int | None, str]:
    """One run of all tests of these sets; an expression after -k holds for one set only."""
    plain = list(dict.fromkeys(test for one in sets if "-k" not in one for test in one))
    for arguments in [plain, *(list(one) for one in sets if "-k" in one)]:
        if arguments:
            code, output = checkout.test(arguments, "-x")
            if code != 0:
                return code, output
    return 0, ""


def tried(checkout: Checkout, mutant: Mutant) -> Found:
    with checkout.with_mistake(mutant):
        code, output = checkout.test(mutant.tests, "-x")
    last = output.strip().splitlines()[-5:]
    if code == 0:
        return Found("survived, as its reason says" if mutant.reason else "SURVIVED", mutant.reason or mutant.what)
    if code is None:
        return Found("TIMEOUT", f"{checkout.limit:g} s")
    if code != 1:  # tests that were not found, or that cannot be imported, say nothing about the mistake
        return Found("ERROR", f"pytest ended with {code}: " + " / ".join(last))
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return Found("noticed", failed[0].split(" - ")[0].removeprefix("FAILED ") if failed else last[-1])


def run(mutants: list[Mutant], root: Path, processes: int, limit: float) -> int:
    began = time.monotonic()
    counts: Counter[str] = Counter()
    stale = []
    for mutant in mutants:
        try:
            mutant.applied((root / mutant.file).read_text("utf-8"))
        except (OSError, ValueError) as error:
            stale.append(mutant)
            say("ERROR", 0, mutant, str(error))
    counts["ERROR"] += len(stale)
    mutants = [m for m in mutants if m not in stale]
    with contextlib.ExitStack() as stack:
        free: queue.SimpleQueue[Checkout] = queue.SimpleQueue()
        for _ in range(processes):
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants", ignore_cleanup_errors=True)))
            free.put(checkout := Checkout(root, place, limit))
            for package in sorted({m.file.split("/")[0] for m in mutants if m.file.endswith(".py")}):
                checkout.check_imported(package)

        def failing_of(sets: list[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
            checkout = free.get()
            try:
                return failing(checkout, sets)
            finally:
                free.put(checkout)

        def one(mutant: Mutant) -> str:
            checkout, start = free.get(), time.monotonic()
            try:
                found = Found("ERROR", f"without it: {broken[mutant.tests]}") if mutant.tests in broken else None
                found = found or tried(checkout, mutant)
            finally:
                free.put(checkout)
            say(found.outcome, time.monotonic() - start, mutant, found.detail)
            return found.outcome

        pool = stack.enter_context(ThreadPoolExecutor(processes))
        stack.callback(pool.shutdown, cancel_futures=True)
        sets = list(dict.fromkeys(m.tests for m in mutants))
        broken: dict[tuple[str, ...], str] = {}
        for found in pool.map(failing_of, [sets[k::processes] for k in range(processes)]):
            broken |= found
        print(f"{len(sets) - len(broken)} of {len(sets)} sets of tests pass without a mutant, ", end="")
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        counts.update(pool.map(one, mutants))
    minutes = (time.monotonic() - began) / 60
    print(", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o]) + f"; {minutes:.1f} min, {processes} processes")
    return int(any(counts[o] for o in OUTCOMES[2:]))


def say(outcome: str, seconds: float, mutant: Mutant, detail: str) -> None:
    print(f"{outcome:9} {seconds:6.1f} s  {mutant.name} ({mutant.file}): {detail}", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names or files, with * and ?; all by default")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="so many of them, at random")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the sample")
    parser.add_argument("--list", action="store_true", help="show them and run nothing")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, metavar="N", help="processes; the number of cores")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="of one run of tests")
    parser.add_argument("--data", type=Path, default=HERE / "mutants.toml", help="the entries")
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the checkout")
    given = parser.parse_args(words)
    mutants = chosen(read(given.data), given.names, given.sample, given.seed)
    if given.list:
        for mutant in mutants:
            print(f"{mutant.name} ({mutant.file}): {mutant.what}" + f" [{mutant.reason}]" * bool(mutant.reason))
        return 0
    return run(mutants, given.root, max(1, min(given.j, len(mutants))), given.limit)


if __name__ == "__main__":
    sys.exit(main())
