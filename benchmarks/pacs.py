"""G, P, C on PACS for many methods: 4 held-out domains × 3 seeds × 50 rounds.

    python benchmarks/pacs.py --data ../shared/data/pacs
    python benchmarks/pacs.py --data emoji --targets noto,openmoji-black --seeds 50 --rounds 30   # the recipes' `tuned`

The learning rate is chosen for each method and held-out domain from one grid, on the validation split of the domains that
train (mean of the shared and personal models' accuracy, first seed, last round). The held-out domain and the test splits
are not used for it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from study import run_each

from fedvlm.config.config import resolve
from fedvlm.data.pool import Pools
from fedvlm.evaluation.views import selection
from fedvlm.report import tables
from fedvlm.system import console
from fedvlm.training.folder import RunFolder

GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
METHODS = [
    *("zero-shot", "centralised", "fedavg", "fedprox", "ditto", "fedclip", "fedot", "fedot-b", "fedlt", "fedadapter"),
    *("fedot-all-global", "fedot-all-local", "fedot-random-head", "local-only"),
]
MODEL_CARD = {"photo": 72.6, "art_painting": 31.5, "cartoon": 41.5, "sketch": 36.7}  # mini-clip's, zero-shot

Rates = dict[str, float]  # held-out domain → the learning rate chosen for it


class Candidate(NamedTuple):
    score: float  # on validation
    lr: float
    run: RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", default="../shared/data/pacs", help="emoji (embedded), or a folder of domain/class/image"
    )
    parser.add_argument("--out", default="runs/pacs")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", default="50,77,98")
    parser.add_argument("--targets", default="", help="only these held-out domains, comma-separated")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--csv", default="")
    args = parser.parse_args()
    if args.data != "emoji" and not Path(args.data).is_dir():
        sys.exit(f"{args.data}: no such folder; give --data a folder with PACS as domain/class/image")
    seeds = [int(s) for s in args.seeds.split(",")]
    pools = Pools()
    runs: list[RunFolder] = []
    rates: dict[str, Rates] = {}
    for method in args.methods:
        rates[method], finished = study(method, args, seeds, pools)
        runs += finished
        console.show(tables.summarise(finished, apart=False))
    print("\nlast round")
    table = tables.summarise(runs, apart=False)
    console.show(table)
    print("\nround chosen on validation")
    console.show(tables.summarise(runs, "selected", apart=False))
    print("\nlearning rates chosen on validation, by held-out domain")
    targets = sorted({t for r in rates.values() for t in r})
    console.rows(["method", *targets], [[m, *(f"{r[t]:g}" for t in targets)] for m, r in rates.items() if r])
    print_diagnostics(runs)
    if args.data != "emoji":
        print_zero_shot(runs)
    if args.csv:
        tables.write_csv(table, Path(args.csv))


def study(method: str, args: argparse.Namespace, seeds: list[int], pools: Pools) -> tuple[Rates, list[RunFolder]]:
    """Chooses the learning rate for each held-out domain with the first seed, then runs all seeds with it."""
    given: dict[str, object] = {
        "data": args.data,
        "evaluate_every": 5,
        "protocol": "leave-one-domain-out",
        "out": args.out,
    }
    given |= {"unseen": args.targets, "values": "paper"}
    if method == "zero-shot":
        return {}, run_each({method: resolve(method, given | {"seeds": seeds})}, 0, pools)[method]
    given |= {"rounds": args.rounds}
    grid = {lr: resolve(method, given | {"lr": lr, "seed": seeds[0]}) for lr in GRID}
    best: dict[str, Candidate] = {}
    for lr, runs in run_each(grid, 0, pools).items():
        for run in runs:
            record = run.record
            target, score = record.unseen[0], selection(record.finished.last)
            if target not in best or score > best[target].score:
                best[target] = Candidate(score, lr, run)
    rest = {
        (target, seed): resolve(method, given | {"lr": chosen.lr, "seed": seed, "unseen": target})
        for target, chosen in best.items()
        for seed in seeds[1:]
    }
    more = [run for runs in run_each(rest, 0, pools).values() for run in runs]
    return {t: chosen.lr for t, chosen in best.items()}, [chosen.run for chosen in best.values()] + more


def print_diagnostics(runs: list[RunFolder]) -> None:
    """FedOT's Tables 2 and 3: cosine between clients' updates over all rounds, condition number at the end."""
    rows = []
    for name, records in tables.grouped(runs, apart=False).items():
        histories = [r.rounds() for r in runs if r.record.method.label == name]
        cosines = [np.mean(c) for history in histories if (c := [x["cosine"] for x in history if "cosine" in x])]
        condition = [v for r in records for v in r.finished.last.get("condition", {}).values()]
        if cosines or condition:
            cosine = f"{np.mean(cosines):.3f} ± {np.std(cosines, ddof=1):.3f}" if len(cosines) > 1 else tables.DASH
            rows.append([name, cosine, f"{np.mean(condition):.2f}" if condition else tables.DASH])
    print("\ndiagnostics: mean cosine between clients' updates (± std over runs), mean condition number at the end")
    console.rows(["method", "cosine", "condition"], rows)


def print_zero_shot(runs: list[RunFolder]) -> None:
    """By domain, beside the numbers of the model card."""
    found: dict[str, list[float]] = {}
    for record in (r.record for r in runs):
        if record.method.name == "zero-shot":
            for name, views in record.finished.last["clients"].items():
                if (score := views["shared"]["test"]) is not None:
                    found.setdefault(name, []).append(100 * score)
    print("\nzero-shot on the test splits, and in the model card")
    console.rows(
        ["domain", "here", "model card"],
        [[d, f"{np.mean(v):.1f}", f"{MODEL_CARD.get(d, float('nan')):.1f}"] for d, v in found.items()],
    )


if __name__ == "__main__":
    main()
