"""FFT-GP beyond classification: masks (retina, a U-Net) and next characters (Shakespeare, an LSTM), every merge.

    python benchmarks/tasks.py --retina ../shared/data/retina --roles ../shared/data/shakespeare/roles.jsonl.gz

Retina: leave one site out, each site cut into three clients; Dice of the shared model on the site nobody trained on (G)
and of the clients' own models (P). Shakespeare: 31 roles; accuracy over roles: mean, worst and best tenth, variance, of
the shared and of the clients' own models. Learning rates are the paper's for all methods. Runs unchanged on a GPU or not
(hours on 2 cores at these sizes: --rounds, --hidden, --size and --width shorten it), and says on which.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from fedvlm import console
from fedvlm.commands import jobs_of, run_all
from fedvlm.config import resolve
from fedvlm.evaluate.protocols import by_seed
from fedvlm.report.tables import plus_minus
from fedvlm.folder import Run

PAPER = ("fedavg", "fedprox", "afl", "q-ffl", "ditto", "perfedavg", "ga", "grace", "fft-gp")
MORE = {  # the other merges, and FFT-GP's halves
    "median": {"merge": "median"},
    "trimmed": {"merge": "trimmed"},
    "multi-krum": {"merge": "krum", "best": 2},
    "faa only": {"merge": "faa"},
    "bgp only": {"local": "bgp", "gaps": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--retina", default="")
    parser.add_argument("--roles", default="")
    parser.add_argument("--out", default="runs/tasks")
    parser.add_argument("--seeds", default="50,77,98")
    parser.add_argument("--rounds", type=int, default=0, help="fewer than the paper's")
    parser.add_argument("--stride", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=0)
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    common = {"seeds": args.seeds, "out": args.out, "jobs": args.jobs, "evaluate": 5}
    common |= {"rounds": args.rounds} if args.rounds else {}
    if args.retina:
        sites = {"data": args.retina, "backbone": f"pixels:{args.size}", "protocol": "leave-one-domain-out"}
        found = runs(common | sites | {"width": args.width}, "unet")
        size = f"U-Net of width {args.width}, {args.size} px"
        print(f"\nretina, {size}, {where}: Dice in %, test split, last round, ± std over seeds")
        print("G: shared model on the site nobody trained on; P: the clients' own models")
        console.rows(
            ["method", "G", "P", "worst client", "gap variance", "MB/round"], [masks(*f) for f in found.items()]
        )
        paired(found)
    if args.roles:
        text = {"data": args.roles, "stride": args.stride, "hidden": args.hidden}
        found = runs(common | text, "lstm")
        size = f"LSTM of {args.hidden}, stride {args.stride}"
        print(f"\nShakespeare, 31 roles, {size}, {where}: accuracy in %, test split, last round")
        views = [
            f"{view} {what}" for view in ("shared", "own") for what in ("mean", "worst 10 %", "best 10 %", "variance")
        ]
        console.rows(["method", *views, "gap variance", "MB/round"], [letters(*f) for f in found.items()])


def runs(common: dict, family: str) -> dict[str, list[Run]]:
    """Method → its runs."""
    setups = {name: resolve(f"{name}-{family}", common) for name in PAPER}
    for name, change in MORE.items():
        setups[name] = resolve(f"fedavg-{family}", common | change)
    began = time.perf_counter()
    jobs = [jobs_of([s]) for s in setups.values()]
    done = iter(run_all([j for part in jobs for j in part], int(common["jobs"])))
    print(f"{sum(map(len, jobs))} runs in {(time.perf_counter() - began) / 60:.1f} minutes")
    return {name: [next(done) for _ in part] for name, part in zip(setups, jobs, strict=True)}


def spread(values: list[float]) -> str:
    return plus_minus(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def costs(found: list[Run]) -> list[str]:
    results = [r.info["result"] for r in found]
    gaps = [r["gap_variance"] for r in results if r["gap_variance"] is not None]
    wire = np.mean([(r["bytes_up"] + r["bytes_down"]) / max(1, r["last"]["round"]) for r in results]) / 1e6
    return [f"{np.mean(gaps):.2e}" if gaps else "–", f"{wire:.1f}"]


def masks(name: str, found: list[Run]) -> list[str]:
    seeds = by_seed([r.info for r in found]).values()
    scores = [spread([100 * s[m] for s in seeds]) for m in ("G", "P")]  # type: ignore[operator]
    worst = np.mean([100 * r.info["result"]["last"]["personal"]["worst"] for r in found])
    return [name, *scores, f"{worst:.2f}", *costs(found)]


def paired(found: dict[str, list[Run]]) -> None:
    """G against FedAvg's, seed by seed: the splits differ by seed, and so do all methods with them."""
    g = {name: {s: v["G"] for s, v in by_seed([r.info for r in part]).items()} for name, part in found.items()}
    for name, mine in g.items():
        change = np.array([100 * (mine[s] - g["fedavg"][s]) for s in mine])  # type: ignore[operator]
        if name != "fedavg" and len(change) > 1:
            print(
                f"{name}: G {change.mean():+.2f} ± {change.std(ddof=1) / len(change) ** 0.5:.2f} (s.e.) against fedavg"
            )


def letters(name: str, found: list[Run]) -> list[str]:
    cells = []
    for view in ("shared", "personal"):
        last = [r.info["result"]["last"][view] for r in found]
        for key, unit in (("test", 100), ("worst", 100), ("best", 100), ("variance", 1e4)):
            cells.append(spread([unit * x[key] for x in last]))
    return [name, *cells, *costs(found)]


if __name__ == "__main__":
    main()
