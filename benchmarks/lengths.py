"""How much longer than the median an honest client's update gets, which says whom `bound=` shortens:
`python benchmarks/lengths.py [--methods fedavg fedot …] [--write docs/robustness.md]`.

The emoji on mini-clip, the recipes' own settings, one seed; nothing is shortened. In brackets: SCAFFOLD's control variates.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fedvlm.config.config import Config, resolve
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data
from fedvlm.core.schema import Schema
from fedvlm.core.state import Params, Reply
from fedvlm.data.pool import Pools
from fedvlm.engines.stacked import Stacked
from fedvlm.rounds.guard import Guard, Measured
from fedvlm.training.planned_run import PlannedRun

BEGIN, END = "<!-- lengths -->", "<!-- /lengths -->"
ROUNDS = {"fedavg": 30, "fedclip": 30, "fft-gp": 30, "fedot": 30, "scaffold": 30, "promptfl": 4}
SEED = 50
GEOMETRIC, ONE_LARGE = np.geomspace(1, 100, 10), np.array([1.0] * 9 + [100])
ROWS: dict[str, tuple[dict[str, object], np.ndarray | None]] = {
    "10, iid": ({"partition": "iid", "clients": 10}, None),
    "7, by style": ({"partition": "domain"}, None),
    "10, Dirichlet 0.5": ({"partition": "dirichlet", "alpha": 0.5, "clients": 10}, None),
    "10, Dirichlet 0.1": ({"partition": "dirichlet", "alpha": 0.1, "clients": 10}, None),
    "30, Dirichlet 0.1": ({"partition": "dirichlet", "alpha": 0.1, "clients": 30}, None),
    "10, sizes from 1 to 100, geometric": ({"partition": "iid", "clients": 10}, GEOMETRIC),
    "10, nine of size 1 and one of 100": ({"partition": "iid", "clients": 10}, ONE_LARGE),
}


class Watching(Guard):
    """Notes how long updates are, and lets them pass."""

    most = torch.zeros(2, dtype=torch.float64)

    def _bounded(self, one: Measured, median: Tensor, schema: Schema, sent: Params, round: int) -> Iterator[Reply]:
        self.most = torch.maximum(self.most, (one.lengths / median).nan_to_num(0.0).amax(0))
        yield one.reply


def resized(data: Data, sizes: np.ndarray) -> Data:
    """With training sets in these proportions; the largest keeps as many as the smallest client had."""
    counts = data.counts("train")
    kept = np.maximum(1, np.round(counts.min() * sizes / sizes.max())).astype(int)
    order = np.argsort(-kept, kind="stable")  # clients are ordered largest first
    bounds = data.bounds.copy()
    bounds[:, 0] = bounds[:, 1] - kept[order]
    return replace(data, bounds=bounds)


def longest(method_name: str, layout: dict[str, object], sizes: np.ndarray | None, pools: Pools) -> str:
    setup = resolve(method_name, {"seed": SEED, "rounds": ROUNDS[method_name], **layout})
    planned = PlannedRun(setup, pools.load(setup))
    method, federation = planned.method, planned.federation
    data = replace(federation.data, rounds=setup.config.rounds)
    data = data if sizes is None else resized(data, sizes)
    guard = Watching(method, federation.names, np.diff(data.bounds, axis=1), data.extras, 1.0, lambda text: None)
    engine, state = Stacked(method, data, warn=lambda text: None), method.init(len(data))
    for round in range(1, setup.config.rounds + 1):
        cohort = Cohort(engine, federation.seen, round, 0.5, setup.config.rounds, len(data), guard=guard)
        state = method.round(state, cohort)
    shared, control = ("**" * (x > Config.bound) + f"{x:.2g}" + "**" * (x > Config.bound) for x in guard.most.tolist())
    return f"{shared} ({control})" if guard.most[1] else shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=list(ROUNDS), choices=list(ROUNDS))
    parser.add_argument("--write", type=Path, help=f"a Markdown file; the table goes between {BEGIN} and {END}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pools, began = Pools(), time.monotonic()
    lines = [f"| clients | {' | '.join(args.methods)} |", "|---" * (1 + len(args.methods)) + "|"]
    for row, (layout, sizes) in ROWS.items():
        lines.append(f"| {row} | " + " | ".join(longest(m, layout, sizes, pools) for m in args.methods) + " |")
        print(f"{lines[-1]} {time.monotonic() - began:.0f} s", flush=True)
    rounds = ", ".join(f"{m} {ROUNDS[m]}" for m in args.methods)
    chosen = "" if args.methods == list(ROUNDS) else f" --methods {' '.join(args.methods)}"
    head = f"`python benchmarks/lengths.py{chosen}` ({time.strftime('%Y-%m-%d')}; the emoji on mini-clip, the recipes' own "
    head += f"settings, seed {SEED}; rounds: {rounds}). In brackets: control variates. Bold: beyond the default."
    text = "\n".join([head, "", *lines])
    if args.write:
        before, _, rest = args.write.read_text(encoding="utf-8").partition(BEGIN)
        args.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
