"""How strong FOCoOp's BOS should be: τ₁ and τ₂ (penalty=, outsider_penalty=) on validation, over several data sets.

    python benchmarks/strengths.py --data ../shared/data/textures ../shared/data/caltech101 CIFAR10     # tools/cifar10.py

Classes are dealt to five clients, 8 shots, 25 rounds of 2 epochs, lr as shipped; Caltech101 with the 20 classes of
outsiders.py --small. What counts is the accuracy of the clients' own models on their validation images; test images and
outsiders are not used. The best mean over data sets and seeds is chosen, as every other setting is; differences to it are
printed with their standard errors, paired by data set and seed. Small penalties allow large perturbations: the last columns
say what BOS did in the last round. Runs are kept in --out and not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from outsiders import SMALL_CLASSES
from study import last_rounds, run_each, standard_error

from fedvlm.config.config import Setup, resolve
from fedvlm.data.pool import Pools
from fedvlm.report.tables import DASH
from fedvlm.system import console
from fedvlm.training.folder import RunFolder

STRENGTHS = ((100.0, 20.0), (20.0, 4.0), (5.0, 1.0))  # τ₁ and τ₂, weakest first
SEEDS = (50, 77, 98)
LAYOUT = {"partition": "pathological", "clients": 5, "shots": 8, "rounds": 25, "epochs": 2, "evaluate_every": 25}
SHOWN = ("loss_gained", "class_perturbation", "outsider_perturbation")  # effects of parts/local/bdro.py

Strength = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="folders of class/image")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time; 0 is one per core")
    parser.add_argument("--out", default="runs/strengths")
    args = parser.parse_args()
    setups = {(data, s): setup(data, s, args) for s in STRENGTHS for data in args.data}
    runs = run_each(setups, args.jobs, Pools())
    accuracy = {s: np.concatenate([validation(runs[data, s]) for data in args.data]) for s in STRENGTHS}
    best = max(STRENGTHS, key=lambda s: float(accuracy[s].mean()))
    rows = []
    for strength in STRENGTHS:
        each = [f"{validation(runs[data, strength]).mean():.1f}" for data in args.data]
        lost = accuracy[best] - accuracy[strength]
        below = DASH if strength == best else f"{lost.mean():.2f} ± {standard_error(lost):.2f}"
        effects = [f"{effect([r for d in args.data for r in runs[d, strength]], name):.2g}" for name in SHOWN]
        rows.append([f"{strength[0]:g}, {strength[1]:g}", *each, f"{accuracy[strength].mean():.2f}", below, *effects])
    console.rows(["τ₁, τ₂", *(Path(d).name for d in args.data), "mean", "below the best", *SHOWN], rows)
    console.note(f"validation, %, mini-clip, seeds {', '.join(map(str, args.seeds))}")
    console.note("chosen: penalty={:g} outsider_penalty={:g}".format(*best))


def setup(data: str, strength: Strength, args: argparse.Namespace) -> Setup:
    keys = {**LAYOUT, "data": data, "seeds": tuple(args.seeds), "out": args.out}
    keys |= {"classes": SMALL_CLASSES} if Path(data).name == "caltech101" else {}
    return resolve("focoop", keys | {"penalty": strength[0], "outsider_penalty": strength[1]})


def validation(runs: Sequence[RunFolder]) -> np.ndarray:
    """Of the clients' own models, in %, by seed."""
    return np.array([100 * float(last["personal"]["val"]) for last in last_rounds(runs)])  # type: ignore[arg-type]


def effect(runs: Sequence[RunFolder], name: str) -> float:
    """Median over runs, last round."""
    return float(np.median([last["effects"][name] for last in last_rounds(runs)]))


if __name__ == "__main__":
    main()
