"""Time and memory of this tree over those of another commit, alternately in one run:

    git worktree add ../before COMMIT && python benchmarks/against.py ../before

Encoding 512 emoji into an empty store, a round of fedot, and `fedvlm demo`, each three times (`--repeats`), native and held
to AVX2; the ratio of the smallest times, wall clock and CPU, and of the largest memory. `--bar 1.03` sets the exit code.
Commits whose modules lie elsewhere can be compared as long as `fedvlm.run`, `fedvlm.backbones.load` and `fedvlm.data.store`
are there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from processors import SETTINGS  # beside this file

ROOT = Path(__file__).resolve().parent.parent
WHAT = ("encoding", "a round of fedot", "demo")

ENCODING = """
import json, resource, time
from fedvlm import backbones
from fedvlm.data import store
from fedvlm.data.source import open_source
source, model = open_source("emoji"), backbones.load("mini-clip")
source = type(source)(**{**source.__dict__, "items": tuple(source.items)[:512]})
began, used = time.perf_counter(), time.process_time()
store.features(source, model, view="raw")
print(json.dumps([time.perf_counter() - began, time.process_time() - used]))
"""
ROUND = """
import json, statistics, sys
import fedvlm
run = fedvlm.run("fedot", data="emoji", unseen="noto", rounds=40, out=sys.argv[1], threads=1)
rounds = [json.loads(line)["seconds"] for line in (run.folder / "rounds.jsonl").read_text().splitlines()][1:-1]
print(json.dumps([statistics.median(rounds), sum(rounds) / len(rounds)]))
"""


def measured(tree: Path, what: str, setting: dict[str, str], cache: Path) -> tuple[float, float, int]:
    """Wall clock and CPU seconds, and bytes at most."""
    with tempfile.TemporaryDirectory() as place:
        fresh = what != "a round of fedot"
        env = os.environ | setting | {"PYTHONPATH": str(tree), "FEDVLM_CACHE": str(place if fresh else cache)}
        env |= {"FEDVLM_RUNS": f"{place}/runs"}
        code = ENCODING if what == "encoding" else ROUND
        call = [sys.executable, "-c", code, f"{place}/run"]
        if what == "demo":
            call = [sys.executable, "-m", "fedvlm", "demo"]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        process = subprocess.Popen(call, env=env, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, errors = process.communicate()
        if process.returncode:
            raise SystemExit(f"{tree}, {what}: {errors[-2000:]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall, used = time.perf_counter() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if what != "demo":
        wall, used = json.loads(out.strip().splitlines()[-1])
    return wall, used, after.ru_maxrss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the other commit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bar", type=float, default=0.0)
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT)
    asked = parser.parse_args()
    worst = 0.0
    print("| | wall clock: before, after, ratio | CPU: before, after, ratio |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as caches:
        for name in ("native", "AVX2"):
            for what in asked.only:
                found: dict[Path, list[tuple[float, float, int]]] = {asked.before.resolve(): [], ROOT: []}
                for _ in range(asked.repeats + (what == "a round of fedot")):
                    for k, tree in enumerate(found):
                        found[tree].append(measured(tree, what, SETTINGS[name], Path(caches) / f"{name}{k}"))
                cells = []
                for at in (0, 1):
                    one, other = (min(times[at] for times in runs) for runs in found.values())
                    worst = max(worst, other / one)
                    cells.append(f"{one:.3g} s, {other:.3g} s, {other / one:.3f}")
                print(f"| {what}, {name} | " + " | ".join(cells) + " |", flush=True)
    return int(bool(asked.bar) and worst > asked.bar)


if __name__ == "__main__":
    sys.exit(main())
