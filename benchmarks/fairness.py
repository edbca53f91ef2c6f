"""FFT-GP on PACS: {mean, GA, FAA} × {sgd, prox, ditto, perfedavg, bgp} on FedCLIP's adapter, 4 held-out domains × 3 seeds.

    python benchmarks/fairness.py --data ../shared/data/pacs

Scored as in the paper: G on all images of the held-out domain, P on the clients' validation images, with personal models
that are the local ones as trained last, for every row. BGP takes twice FedAvg's updates (the paper's) and, as bgp-same, as
many as FedAvg. Prints G, P, C and the variance over clients of the generalisation gap (validation loss of the averaged
model − that of the client's own); what the mechanisms did (effects); a test, run by run, of the paper's claim in Fig. 6
(variance FAA < GA < mean); Pearson's ρ for its claim in Fig. 2 (the gap is linear in a client's weight); and the bytes
sent. One learning rate for all: the one that `benchmarks/pacs.py` chose for FedCLIP on validation.
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
from study import last_rounds, mean_std, megabytes_per_round, results, run_each, seed_scores, standard_error

from fedvlm.config.config import Setup, resolve
from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Replies
from fedvlm.core.state import Message
from fedvlm.data.pool import Pools
from fedvlm.engines.stacked import Stacked
from fedvlm.system import console
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.planning import single_runs

MERGES, LOCALS = ("mean", "ga", "faa"), ("sgd", "prox", "ditto", "perfedavg", "bgp", "bgp-same")
LIMIT = 45  # CPU-minutes that all runs together may take

Found = dict[tuple[str, str], list[RunFolder]]  # (merge, local) → its runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data/pacs")
    parser.add_argument("--out", default="runs/fairness")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", default="50,77,98")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    if not Path(args.data).is_dir():
        sys.exit(f"{args.data}: no such folder; give --data a folder with PACS as domain/class/image")
    pools = Pools()
    setups = {(merge, local): setup_for(args, merge, local) for merge, local in product(MERGES, LOCALS)}
    pools.encode(setups["mean", "sgd"])
    began = time.perf_counter()
    found = run_each(setups, 0, pools)
    used = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    count, minutes = sum(map(len, found.values())), (time.perf_counter() - began) / 60
    print(f"{count} runs in {minutes:.1f} minutes, {used / 60:.1f} CPU-minutes (at most {LIMIT} allowed)")
    print_scores(found)
    print_effects(found)
    print_variance_claims(found)
    print_linearity(args, pools)


def setup_for(args: argparse.Namespace, merge: str, local: str) -> Setup:
    rule, _, same = local.partition("-")
    given = {
        "data": args.data,
        "merge": merge,
        "local": rule,
        "lr": args.lr,
        "rounds": args.rounds,
        "evaluate_every": 5,
    }
    given |= {"protocol": "leave-one-domain-out", "seeds": args.seeds, "out": args.out}
    given |= {"unseen_split": "all", "personal_split": "val"}
    given |= {"gaps": True} if merge == "mean" else {}
    # P is of one kind in the whole table: the paper's personal models are the local ones, as trained last
    given |= {"keep": True} if local in ("sgd", "prox", "perfedavg") else {}
    given |= {"budget": "same"} if same else {}
    return resolve("fedclip", given)


def gap_variance(run: RunFolder) -> float:
    """Mean over the second half of the rounds."""
    values = [r["gap_variance"] for r in run.rounds() if "gap_variance" in r]
    return float(np.mean(values[len(values) // 2 :]))


def print_scores(found: Found) -> None:
    rows = []
    for (merge, local), runs in found.items():
        cells = [mean_std(list(seed_scores(runs, metric).values()), 100) for metric in ("G", "P", "C")]
        variance = np.mean([gap_variance(r) for r in runs])
        seconds = np.mean([r.seconds for r in results(runs)]) / max(1, last_rounds(runs)[0]["round"])
        costs = [f"{variance:.4f}", f"{megabytes_per_round(runs):.2f}", f"{seconds:.3f}"]
        rows.append([local, merge, *cells, *costs])
    print(
        "\nFedCLIP's adapter; last round; G on all images of the held-out domain, P on validation images; ± std over seeds; "
        "gap variance over the second half of the rounds"
    )
    console.rows(["local", "merge", "G", "P", "C", "gap variance", "MB/round", "s/round"], rows)


def print_effects(found: Found) -> None:
    """Medians over runs and rounds: a claim is only tested where its mechanism acts."""
    rows = []
    for (merge, local), runs in found.items():
        effects = [r.get("effects", {}) for run in runs for r in run.rounds()]
        for name in dict.fromkeys(k for e in effects for k in e):
            rows.append([local, merge, name, f"{np.median([e[name] for e in effects if name in e]):.3g}"])
    print("\nwhat the mechanisms did in a round (see `effects` of the local rule and the merge)")
    console.rows(["local", "merge", "effect", "median"], rows)


def print_variance_claims(found: Found) -> None:
    """Fig. 6; runs with the same held-out domain and seed are compared."""
    print("\nis the variance of the gaps smaller? difference run by run, mean ± 2 standard errors")
    rows = []
    for local, (a, b) in product(LOCALS, (("ga", "mean"), ("faa", "ga"), ("faa", "mean"))):
        one, other = (np.array([gap_variance(r) for r in found[merge, local]]) for merge in (a, b))
        change = one - other
        mean, error = change.mean(), 2 * standard_error(change)
        verdict = "yes" if mean < -error else "no: larger" if mean > error else "not shown"
        rows.append([local, f"{a} < {b}", f"{mean:+.4f} ± {error:.4f}", verdict])
    console.rows(["local", "claim", "difference", "holds here"], rows)


@torch.no_grad()
def print_linearity(args: argparse.Namespace, pools: Pools, rounds: int = 5) -> None:
    """Fig. 2: after a few rounds, one client's weight is moved from 0 to 1, the others share the rest, and its gap is
    measured."""
    rows = []
    setup = setup_for(args, "ga", "sgd").with_(seeds=(), seed=50)
    pool = pools.load(setup)
    for one in single_runs(setup, pool):
        planned = PlannedRun(one, pool)
        method, federation = planned.method, planned.federation
        engine, state = Stacked(method, federation.data), method.init(len(federation.names))
        with torch.enable_grad():
            for round in range(1, rounds + 1):
                state = method.round(state, Cohort(engine, federation.seen, round, rounds=args.rounds))
            trained = Cohort(engine, federation.seen, rounds + 1).ask("train", state.message())
        replies = Replies(*trained)
        for k, i in enumerate(replies.ids):
            weights, gaps = np.linspace(0, 1, 11), []
            for own in weights:
                weight = torch.full((len(replies.ids),), (1 - own) / (len(replies.ids) - 1), dtype=torch.float64)
                weight[k] = own
                mean = Message(replies.sum(weight))
                loss = Cohort(engine, np.array([i]), rounds + 1).ask("validate", mean).values["val"]
                gaps.append(float(loss - replies.values["after"][k]))
            rho = np.corrcoef(weights, gaps)[0, 1]
            rho_low = np.corrcoef(weights[:7], gaps[:7])[0, 1]
            rows.append([one.config.unseen[0], federation.names[i], f"{rho:.3f}", f"{rho_low:.3f}"])
    print(
        f"\nis the gap linear in the weight? Pearson's ρ after {rounds} rounds, weights 0 to 1 (and 0 to 0.6), seed 50"
    )
    console.rows(["held out", "client", "ρ", "ρ to 0.6"], rows)


if __name__ == "__main__":
    main()
