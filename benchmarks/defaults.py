"""Whether the settings that recipes ship for mini-clip do well untouched: their lr beside a grid, on several data sets.

    python benchmarks/defaults.py --data emoji ../shared/data/pacs ../shared/data/caltech101            # prints
    python benchmarks/defaults.py --data emoji ../shared/data/pacs ../shared/data/caltech101 --write    # docs/results.md

For every recipe with `tuned` that trains on stored embeddings (others: --methods), as a user types it: one seed, its own
rounds, nobody held out, clients by domain, or where data have none, ten by Dirichlet. The grid has the shipped lr and two
steps of 1, 3, 10 to either side. What counts is the accuracy on validation, mean of the shared and the personal models',
last round; test images are not used. Aim: within 2 points of the grid's best on each data set. Where a recipe misses it, the
lr that loses least on the data set where it loses most is printed; `tuned` is edited by hand. Runs are kept in --out and not
repeated.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from results import write_section
from study import finished_each

from fedvlm.config import recipe
from fedvlm.config.config import Setup, resolve
from fedvlm.data.pool import Pools
from fedvlm.evaluation.views import selection
from fedvlm.system import console

BACKBONE = "mini-clip"
EMBEDDED = ("head", "attention", "rotation", "linear", "mlp", "memory")  # adapters that train in seconds
SERIES = (1.0, 3.0)
LIMIT = 2.0  # points
TITLE = "Settings as shipped beside a grid of lr (benchmarks/defaults.py)"


class Found(NamedTuple):
    """Of one recipe: accuracy on validation in %, by data set and lr."""

    method: str
    shipped: float
    scores: dict[str, dict[float, float]]

    def below(self, data: str, lr: float) -> float:
        return max(self.scores[data].values()) - self.scores[data][lr]

    def best(self, data: str) -> float:
        return max(self.scores[data], key=lambda lr: self.scores[data][lr])

    def worst(self, lr: float) -> float:
        return max(self.below(data, lr) for data in self.scores)

    @property
    def advised(self) -> float:
        """The lr that loses least where it loses most; the shipped one where that stays within the limit."""
        if self.worst(self.shipped) <= LIMIT:
            return self.shipped
        return min(set.intersection(*(set(found) for found in self.scores.values())), key=self.worst)


def grid(lr: float) -> tuple[float, ...]:
    """The lr and, of the series 1, 3, 10, 30, …, the two next values on either side."""
    place = math.floor(math.log10(lr) * 2)
    near = [in_series(place + step) for step in range(-3, 5)]
    return (*[v for v in near if v < lr][-2:], lr, *[v for v in near if v > lr][:2])


def in_series(place: int) -> float:
    return float(f"{SERIES[place % 2]:g}e{place // 2}")


def tuned_recipes() -> dict[str, str]:
    """Recipes whose own file has settings for the backbone: name → adapter."""
    found = {}
    for path in sorted(recipe.RECIPES.glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if BACKBONE in content.get("tuned", {}):
            found[path.stem] = resolve(path.stem, {}).parts["adapter"].name
    return found


def study(methods: Sequence[str], data: Mapping[str, str], args: argparse.Namespace) -> Iterator[Found]:
    pools = Pools()
    for method in methods:
        shipped = float(resolve(method, {}).local.lr)
        setups: dict[tuple[str, float], Setup] = {}
        for name, path in data.items():
            given = {"data": path, "seed": args.seed, "out": args.out, "evaluate_every": 1000}
            setups |= {(name, lr): resolve(method, given | {"lr": lr}) for lr in grid(shipped)}
        scores: dict[str, dict[float, float]] = {}
        for (name, lr), (run,) in finished_each(setups, args.jobs, pools).items():
            value = 100 * selection(run.record.finished.last)
            scores.setdefault(name, {})[lr] = -1.0 if math.isnan(value) else value  # a run that fell apart is the worst
        if scores.keys() == data.keys() and all(shipped in found for found in scores.values()):
            yield Found(method, shipped, scores)


def rows(found: Sequence[Found], data: Sequence[str]) -> Iterator[list[str]]:
    for one in found:
        rate = f"{one.shipped:g}" + (f", advised {one.advised:g}" if one.advised != one.shipped else "")
        yield [one.method, rate, *(cell(one, d) for d in data), f"{one.worst(one.shipped):.2f}"]


def cell(one: Found, data: str) -> str:
    """The accuracy with the shipped lr and, where another lr is better, the best one with its lr."""
    shipped, best = f"{one.scores[data][one.shipped]:.2f}", f"{max(one.scores[data].values()):.2f}"
    return shipped if shipped == best else f"{shipped} ({best} at {one.best(data):g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=["emoji"])
    parser.add_argument("--methods", nargs="*", default=[], help="recipes; none: those on stored embeddings")
    parser.add_argument("--seed", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=0, help="runs at once; 0: one per core")
    parser.add_argument("--out", default="runs/defaults")
    parser.add_argument("--write", action="store_true", help="docs/results.md")
    args = parser.parse_args()
    every = tuned_recipes()
    methods = args.methods or [m for m, adapter in every.items() if adapter in EMBEDDED]
    data = {Path(d).name: d for d in args.data}
    head = ["method", "lr", *(f"{d}: as shipped" for d in data), "largest loss"]
    found = []
    for one in study(methods, data, args):
        found.append(one)
        console.rows(head, rows([one], list(data)))
    print()
    console.rows(head, rows(found, list(data)))
    if args.write:
        missed = [one.method for one in found if one.worst(one.shipped) > LIMIT]
        left = sorted(every.keys() - {one.method for one in found})
        notes = [
            "accuracy on validation in %, mean of the shared and the personal models', last round; "
            f"seed {args.seed}, rounds as shipped, nobody held out; clients by domain, of data without domains ten by "
            "Dirichlet(0.5)",
            "in brackets the best of the shipped lr and two steps of 1, 3, 10 to either side, where it is another; largest "
            f"loss: points below the best, on the data set where it is largest; advised: where that is more than {LIMIT:g}, "
            "the lr that loses least where it loses most",
            "schedule=cosine where a recipe ships it; the shipped settings were chosen by this accuracy on these data",
            f"{len(found) - len(missed)} of {len(found)} within {LIMIT:g} points on each data set; not: "
            f"{', '.join(missed) or 'none'}",
            f"recipes with settings for {BACKBONE} that were not run: {', '.join(left) or 'none'}",
        ]
        write_section(TITLE, head, [*rows(found, list(data))], notes)


if __name__ == "__main__":
    main()
