"""The rule by which a method is called best (fedvlm/report/gains.py), by simulation.

    python benchmarks/best.py

Two methods are drawn for 2, 3, 5 and 10 seeds: a normal value of each seed that both share, and one of each method. First
they are equal: how often the rule names one of them the best, beside the rule before it (more than two standard errors).
Then one is 2 points better, and its differences spread over seeds as those of claims/measured.json on PACS and Caltech101
do (half an interval · √n / t): how often the rule names the better one, and how often the other.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import yaml

from fedvlm.report.gains import gain, quantile, verdict

HERE = Path(__file__).parent / "claims"
SEEDS = (2, 3, 5, 10)
DRAWS = 10_000
ACCURACIES = ("G", "S", "P", "C", "local", "base", "novel", "hm")


def drawn(seeds: int, draws: int, better: float, spread: float, start: int = 0) -> dict[str, int]:
    """How often each of two methods is named the best, and how often a difference exceeds two standard errors; the
    differences have this standard deviation over seeds, and `a` is so many points better."""
    rng = np.random.default_rng(start)
    count = {"a": 0, "b": 0, "two errors": 0}
    for _ in range(draws):
        shared, own = rng.normal(60, 3, seeds), rng.normal(0, spread / 2**0.5, (2, seeds))
        a, b = (dict(enumerate(shared + part + plus)) for part, plus in zip(own, (better, 0.0), strict=True))
        found, difference = verdict({"a": {"G": a}, "b": {"G": b}}, "G"), gain(a, b)
        assert found and difference
        if found.best:
            count[found.highest] += 1
        count["two errors"] += abs(difference.mean) > 2 * difference.error
    return count


def spreads() -> dict[str, list[float]]:
    """The standard deviations over seeds of the differences of accuracies that were measured, by data set."""
    measured = json.loads((HERE / "measured.json").read_text("utf-8"))
    out: dict[str, list[float]] = {"pacs": [], "caltech101": []}
    for path in sorted(HERE.glob("*.yaml")):
        for claim in yaml.safe_load(path.read_text("utf-8")):
            compared = claim["compare"] if isinstance(claim["compare"], list) else [claim["compare"]]
            known = measured.get(f"{path.stem}/{claim['id']}", {})
            n = len(known.get("seeds", []))
            for one, outcome in zip(compared, known.get("outcomes", []), strict=False):
                if claim.get("data") in out and one.get("measure") in ACCURACIES and n > 1:
                    out[claim["data"]].append(outcome["half"] * n**0.5 / quantile(n - 1))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=DRAWS)
    draws = parser.parse_args().draws

    def share(count: int) -> str:
        return f"{100 * count / draws:.1f} %"

    print("| two equal methods: seeds | named best | by two standard errors |\n| --- | --- | --- |")
    for seeds in SEEDS:
        found = drawn(seeds, draws, 0.0, 1.0)
        print(f"| {seeds} | {share(found['a'] + found['b'])} | {share(found['two errors'])} |", flush=True)
    print("\n| 2 points better: spread of differences | " + " | ".join(f"{s} seeds" for s in SEEDS) + " |")
    print("| --- " * (1 + len(SEEDS)) + "|")
    for data, known in spreads().items():
        for name, spread in (("median", float(np.median(known))), ("largest", max(known))):
            found_by_seeds = [drawn(seeds, draws, 2.0, spread) for seeds in SEEDS]
            cells = [f"{share(f['a'])} (the other: {share(f['b'])})" for f in found_by_seeds]
            print(f"| {data}, {name} of {len(known)}: {spread:.2f} points | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
