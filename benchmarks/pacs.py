"""G, P, C on PACS for every recipe: 4 held-out domains × 3 seeds × 50 rounds.

    python benchmarks/pacs.py --data ../shared/data/pacs
    python benchmarks/pacs.py --data emoji --targets noto,openmoji-black --seeds 50 --rounds 30   # the recipes' `tuned`

The learning rate is chosen for each method and target from one grid, on the validation split of the domains that train
(shared and personal view alike, seed 50, last round); the held-out domain and every test split stay out of it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from fedvlm import console, train
from fedvlm.commands import encoded, run_all
from fedvlm.config import resolve
from fedvlm.evaluate.views import selection
from fedvlm.report import tables
from fedvlm.folder import Run

GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
METHODS = [
    *("zero-shot", "centralised", "fedavg", "fedprox", "ditto", "fedclip", "fedot", "fedot-b", "fedlt", "fedadapter"),
    *("fedot-all-global", "fedot-all-local", "fedot-random-head", "local-only"),
]
CARD = {"photo": 72.6, "art_painting": 31.5, "cartoon": 41.5, "sketch": 36.7}  # mini-clip's model card, zero-shot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data/pacs")
    parser.add_argument("--out", default="runs/pacs")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", default="50,77,98")
    parser.add_argument("--targets", default="", help="only these held-out domains, comma-separated")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--csv", default="")
    args = parser.parse_args()
    if args.data != "emoji" and not Path(args.data).is_dir():
        sys.exit(f"{args.data} is not there: give --data a folder with PACS as domain/class/image")
    seeds = [int(s) for s in args.seeds.split(",")]
    pool = encoded(resolve("zero-shot", {"data": args.data}))
    runs: list[Run] = []
    rates: dict[str, dict[str, float]] = {}
    for method in args.methods:
        rates[method], finished = study(method, args, seeds, pool)
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
    diagnostics(runs)
    if args.data != "emoji":
        zero_shot(runs)
    if args.csv:
        tables.write_csv(table, Path(args.csv))


def study(method: str, args: argparse.Namespace, seeds: list[int], pool) -> tuple[dict[str, float], list[Run]]:
    """Chooses the learning rate for each target on the first seed, then runs all seeds with it."""
    given = {"data": args.data, "evaluate": 5, "protocol": "leave-one-domain-out", "out": args.out}
    given |= {"unseen": args.targets, "settings": "paper"}
    if method == "zero-shot":
        setup = resolve(method, given | {"seeds": seeds})
        return {}, run_all([(s, train.place(s, pool)) for s in train.runs_of(setup, pool)], 0)
    given |= {"rounds": args.rounds}
    tried = [s for lr in GRID for s in train.runs_of(resolve(method, given | {"lr": lr, "seed": seeds[0]}), pool)]
    found = run_all([(s, train.place(s, pool)) for s in tried], 0)
    best: dict[str, tuple[float, float, Run]] = {}
    for setup, run in zip(tried, found, strict=True):
        score = selection(run.info["result"]["last"])
        target = setup.config.unseen[0]
        if target not in best or score > best[target][0]:
            best[target] = (score, setup.local.lr, run)
    rates = {t: lr for t, (_, lr, _) in best.items()}
    rest = []
    for target, lr in rates.items():
        for seed in seeds[1:]:
            alone = given | {"lr": lr, "seed": seed, "unseen": target}
            rest += train.runs_of(resolve(method, alone), pool)
    more = run_all([(s, train.place(s, pool)) for s in rest], 0) if rest else []
    return rates, [run for _, _, run in best.values()] + more


def diagnostics(runs: list[Run]) -> None:
    """FedOT's Tables 2 and 3: cosine between clients' updates over all rounds, condition number at the end."""
    rows = []
    for name, infos in tables.grouped(runs, apart=False).items():
        mine = [r for r in runs if r.info["method"] == name]
        cosines = [np.mean(c) for r in mine if (c := [x["cosine"] for x in r.rounds() if "cosine" in x])]
        condition = [v for i in infos for v in i["result"]["last"].get("condition", {}).values()]
        if cosines or condition:
            rows.append(
                [
                    name,
                    f"{np.mean(cosines):.3f} ± {np.std(cosines, ddof=1):.3f}" if len(cosines) > 1 else "–",
                    f"{np.mean(condition):.2f}" if condition else "–",
                ]
            )
    print("\ndiagnostics: mean cosine between clients' updates (± std over runs), mean condition number at the end")
    console.rows(["method", "cosine", "condition"], rows)


def zero_shot(runs: list[Run]) -> None:
    found: dict[str, list[float]] = {}
    for info in (r.info for r in runs if r.info["method"] == "zero-shot"):
        for name, views in info["result"]["last"]["clients"].items():
            found.setdefault(name, []).append(100 * views["shared"]["test"])
    print("\nzero-shot on the test splits against the model card")
    console.rows(
        ["domain", "here", "card"],
        [[d, f"{np.mean(v):.1f}", f"{CARD.get(d, float('nan')):.1f}"] for d, v in found.items()],
    )


if __name__ == "__main__":
    main()
