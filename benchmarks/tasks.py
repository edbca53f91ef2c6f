"""FFT-GP beyond classification: masks (retina, a U-Net) and next characters (Shakespeare, an LSTM), with every merge.

    python benchmarks/tasks.py --retina ../shared/data/retina --roles ../shared/data/shakespeare/roles.jsonl.gz

One seed at the paper's width on a GPU, with the time that is left after every round (benchmarks/devices.py retina text
estimates it from a few rounds): `--seeds 50 --width 64 --precision half --methods fedavg`.

Retina: leave one site out, each site split into three clients; Dice of the shared model on the held-out site (G) and of the
clients' own models (P). Shakespeare: 31 roles; accuracy over roles: mean, worst and best tenth, variance, of the shared and
of the clients' own models. Learning rates are the paper's for all methods. Uses a GPU where there is one; the output names
the device. At these sizes it takes hours on 2 cores: --rounds, --hidden, --size and --width shorten it.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from study import last_rounds, mean_std, megabytes_per_round, results, run_each, seed_scores, standard_error

from fedvlm.config.config import resolve
from fedvlm.data.pool import Pools
from fedvlm.report.tables import DASH
from fedvlm.system import console
from fedvlm.training.folder import RunFolder

PAPER = ("fedavg", "fedprox", "afl", "q-ffl", "ditto", "perfedavg", "ga", "grace", "fft-gp")
Settings = dict[str, object]
MORE: dict[str, Settings] = {  # FedAvg with another merge, or with one of FFT-GP's two parts
    "median": {"merge": "median"},
    "trimmed": {"merge": "trimmed"},
    "multi-krum": {"merge": "krum", "best": 2},
    "faa only": {"merge": "faa"},
    "bgp only": {"local": "bgp", "gaps": True},
}

Found = dict[str, list[RunFolder]]  # method → its runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--retina", default="", help="a folder of site/image and site/mask")
    parser.add_argument("--roles", default="", help="a .jsonl or .jsonl.gz file of roles and their text")
    parser.add_argument("--out", default="runs/tasks")
    parser.add_argument("--seeds", default="50,77,98")
    parser.add_argument("--rounds", type=int, default=0, help="0 is the paper's number")
    parser.add_argument("--stride", type=int, default=16, help="text: characters from one example to the next")
    parser.add_argument("--hidden", type=int, default=256, help="units of the LSTM")
    parser.add_argument("--size", type=int, default=384, help="pixels along an image's side")
    parser.add_argument("--width", type=int, default=16, help="channels of the U-Net's first level")
    parser.add_argument("--precision", default="full", help="half: the U-Net in bfloat16, for a GPU")
    parser.add_argument("--methods", default="", help="only these, separated by commas")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time; 0 is one per core")
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    common: Settings = {"seeds": args.seeds, "out": args.out, "jobs": args.jobs, "evaluate_every": 5}
    common |= {"rounds": args.rounds} if args.rounds else {}
    if args.retina:
        sites = {"data": args.retina, "backbone": f"pixels:{args.size}", "protocol": "leave-one-domain-out"}
        network = {"on": "unet", "width": args.width, "precision": args.precision}
        found = run_methods(common | sites | network, args.jobs, args.methods)
        size = f"U-Net of width {args.width}, {args.size} px"
        print(f"\nretina, {size}, {device}: Dice in %, test split, last round, ± std over seeds")
        print("G: shared model on the held-out site; P: clients' own models")
        columns = ["method", "G", "P", "worst client", "gap variance", "MB/round"]
        console.rows(columns, [mask_row(*each) for each in found.items()])
        print_differences(found)
    if args.roles:
        text = {"data": args.roles, "stride": args.stride, "hidden": args.hidden}
        found = run_methods(common | text | {"on": "lstm"}, args.jobs, args.methods)
        size = f"LSTM of {args.hidden}, stride {args.stride}"
        print(f"\nShakespeare, 31 roles, {size}, {device}: accuracy in %, test split, last round")
        columns = [
            f"{view} {what}" for view in ("shared", "own") for what in ("mean", "worst 10 %", "best 10 %", "variance")
        ]
        columns = ["method", *columns, "gap variance", "MB/round"]
        console.rows(columns, [character_row(*each) for each in found.items()])


def run_methods(given: Settings, at_once: int, only: str) -> Found:
    setups = {name: resolve(name, given) for name in PAPER}
    setups |= {name: resolve("fedavg", given | change) for name, change in MORE.items()}
    if only:
        setups = {name: setups[name] for name in only.split(",")}
    began = time.perf_counter()
    found = run_each(setups, at_once, Pools())
    print(f"{sum(map(len, found.values()))} runs in {(time.perf_counter() - began) / 60:.1f} minutes")
    return found


def costs(runs: list[RunFolder]) -> list[str]:
    variances = [r.gap_variance for r in results(runs) if r.gap_variance is not None]
    return [f"{np.mean(variances):.2e}" if variances else DASH, f"{megabytes_per_round(runs):.1f}"]


def mask_row(name: str, runs: list[RunFolder]) -> list[str]:
    scores = [mean_std(list(seed_scores(runs, metric).values()), 100) for metric in ("G", "P")]
    worst = [100 * v for r in last_rounds(runs) if (v := r["personal"]["worst"]) is not None]
    return [name, *scores, f"{np.mean(worst):.2f}", *costs(runs)]


def print_differences(found: Found) -> None:
    """G minus FedAvg's, seed by seed: a seed gives all methods the same splits."""
    by_seed = {name: seed_scores(runs, "G") for name, runs in found.items()}
    base = by_seed.pop("fedavg", {})
    for name, scores in by_seed.items():
        pairs = [(g, base.get(seed)) for seed, g in scores.items()]
        change = np.array([100 * (a - b) for a, b in pairs if a is not None and b is not None])
        if len(change) > 1:
            print(f"{name}: G {change.mean():+.2f} ± {standard_error(change):.2f} (s.e.) against fedavg")


def character_row(name: str, runs: list[RunFolder]) -> list[str]:
    cells = []
    for view in ([r["shared"] for r in last_rounds(runs)], [r["personal"] for r in last_rounds(runs)]):
        for key, factor in (("test", 100), ("worst", 100), ("best", 100), ("variance", 1e4)):
            cells.append(mean_std([scores[key] for scores in view], factor))
    return [name, *cells, *costs(runs)]


if __name__ == "__main__":
    main()
