"""FFT-GP on PACS: {mean, GA, FAA} × {sgd, prox, ditto, perfedavg, bgp} on FedCLIP's adapter, 4 held-out domains × 3 seeds.

    python benchmarks/fairness.py --data ../shared/data/pacs

Prints G, P, C and the variance of the gaps (what averaging costs each client, on validation); the paper's Fig. 6 claim
(variance FAA < GA < mean) tested run by run; its Fig. 2 claim (the gap is linear in the weight) as Pearson's ρ; the bytes.
One learning rate for all, the one that `benchmarks/pacs.py` chose for FedCLIP on validation.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch

from fedvlm import console, train
from fedvlm.commands import encoded, run_all
from fedvlm.config import resolve
from fedvlm.core import Cohort
from fedvlm.engines.stacked import Stacked
from fedvlm.evaluate.protocols import by_seed
from fedvlm.merge.mean import combine
from fedvlm.report.tables import plus_minus
from fedvlm.folder import Run

MERGES, LOCALS = ("mean", "ga", "faa"), ("sgd", "prox", "ditto", "perfedavg", "bgp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data/pacs")
    parser.add_argument("--out", default="runs/fairness")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", default="50,77,98")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    if not Path(args.data).is_dir():
        sys.exit(f"{args.data} is not there: give --data a folder with PACS as domain/class/image")
    pool = encoded(resolve("fedclip", {"data": args.data}))
    began = time.perf_counter()
    kinds = {}
    jobs = []
    for merge, local in product(MERGES, LOCALS):
        for setup in train.runs_of(setup_for(args, merge, local), pool):
            jobs.append((setup, train.place(setup, pool)))
            kinds[jobs[-1][1]] = (merge, local)
    runs = run_all(jobs, 0)
    used = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"{len(runs)} runs in {(time.perf_counter() - began) / 60:.1f} minutes, {used / 60:.1f} CPU-minutes (bar 45)")
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        found.setdefault(kinds[run.folder], []).append(run)
    table(found)
    claim(found)
    linearity(args, pool)


def setup_for(args: argparse.Namespace, merge: str, local: str):
    given = {"data": args.data, "merge": merge, "local": local, "lr": args.lr, "rounds": args.rounds, "evaluate": 5}
    given |= {"protocol": "leave-one-domain-out", "seeds": args.seeds, "out": args.out}
    given |= {"gaps": True} if merge == "mean" else {}
    given |= {"keep": True} if local in ("sgd", "prox") else {}  # the paper's personal models are the local ones
    return resolve("fedclip", given)


def variance(run: Run) -> float:
    """Mean over the second half of the rounds."""
    values = [r["gap_variance"] for r in run.rounds() if "gap_variance" in r]
    return float(np.mean(values[len(values) // 2 :]))


def table(found: dict[tuple[str, str], list[Run]]) -> None:
    rows = []
    for (merge, local), runs in found.items():
        seeds = by_seed([r.info for r in runs]).values()
        scores = {m: [100 * s[m] for s in seeds] for m in ("G", "P", "C")}  # type: ignore[operator]
        cells = [
            plus_minus(float(np.mean(v)), float(np.std(v, ddof=1)) if len(v) > 1 else None) for v in scores.values()
        ]
        spread = [variance(r) for r in runs]
        wire = runs[0].info["result"]
        rounds = runs[0].info["config"]["rounds"]
        traffic = (wire["bytes_up"] + wire["bytes_down"]) / rounds / 1e6
        seconds = np.mean([r.info["result"]["seconds"] for r in runs]) / rounds
        rows.append([local, merge, *cells, f"{np.mean(spread):.4f}", f"{traffic:.2f}", f"{seconds:.3f}"])
    print("\nFedCLIP's adapter; last round, test split; ± std over seeds; variance over the second half of the rounds")
    console.rows(["local", "merge", "G", "P", "C", "gap variance", "MB/round", "s/round"], rows)


def claim(found: dict[tuple[str, str], list[Run]]) -> None:
    """Fig. 6: run by run, same target and seed."""
    print("\nis the variance of gaps smaller? differences run by run, mean ± 2 standard errors")
    rows = []
    for local, (a, b) in product(LOCALS, (("ga", "mean"), ("faa", "ga"), ("faa", "mean"))):
        x, y = ([variance(r) for r in found[m, local]] for m in (a, b))
        change = np.array(x) - np.array(y)
        error = 2 * change.std(ddof=1) / len(change) ** 0.5
        verdict = "yes" if change.mean() < -error else "no: larger" if change.mean() > error else "not shown"
        rows.append([local, f"{a} < {b}", f"{change.mean():+.4f} ± {error:.4f}", verdict])
    console.rows(["local", "claim", "difference", "holds here"], rows)


@torch.no_grad()
def linearity(args: argparse.Namespace, pool, warm: int = 5) -> None:
    """Fig. 2: move one client's weight from 0 to 1, the others in proportion, and gauge its gap."""
    rows = []
    for setup in train.runs_of(setup_for(args, "ga", "sgd").with_(seeds=(), seed=50), pool):
        method, federation = train.prepare(setup, pool)
        engine, state = Stacked(method, federation.data, 0), method.init(len(federation.names))
        with torch.enable_grad():
            for round in range(1, warm + 1):
                state = method.round(state, Cohort(engine, federation.seen, round, rounds=args.rounds))
            ids, up = Cohort(engine, federation.seen, warm + 1).ask("train", state.shared)
        for k, i in enumerate(ids):
            shares, gaps = np.linspace(0, 1, 11), []
            for share in shares:
                weight = torch.full((len(ids),), (1 - share) / (len(ids) - 1), dtype=torch.float64)
                weight[k] = share
                told = Cohort(engine, np.array([i]), warm + 1).ask("gauge", combine(up, state.shared, weight))[1]
                gaps.append(float(told["val"] - up["after"][k]))
            rho = np.corrcoef(shares, gaps)[0, 1]
            near = np.corrcoef(shares[:7], gaps[:7])[0, 1]
            rows.append([setup.config.unseen[0], federation.names[i], f"{rho:.3f}", f"{near:.3f}"])
    print(f"\nis the gap linear in the weight? Pearson's ρ after {warm} rounds, weight 0 … 1 (and 0 … 0.6), seed 50")
    console.rows(["held out", "client", "ρ", "ρ to 0.6"], rows)


if __name__ == "__main__":
    main()
