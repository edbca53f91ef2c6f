"""Base-to-novel (FedDTL, 2026): local, base, novel accuracy and HM of the methods its tables compare, and its claims.

    python benchmarks/novel.py --data ../shared/data/caltech101 --pacs ../shared/data/pacs
    python benchmarks/novel.py --data ../shared/data/caltech101 --rounds 2 --seeds 50 --methods zero-shot,feddtl  # small

Half of the classes are dealt to 5 clients (iid, Dirichlet 0.1, or each class to one client), the other half is only asked
for. PACS: each domain cut into 3 clients by Dirichlet 0.1; accuracy by domain. Settings are the recipes', but that FedLoRA
changes the projections FedDTL does, so that the two differ in what the claims are about alone. A claim is printed with its
differences seed by seed (the splits differ by seed, and so do all methods with them), whether it holds or not. Runs
unchanged on a GPU or not (a day on 2 cores at these sizes), and says on which.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch

from fedvlm import console
from fedvlm.commands import jobs_of, run_all
from fedvlm.config import resolve
from fedvlm.evaluate.protocols import MEASURES, by_seed, row
from fedvlm.report.tables import DASH, plus_minus
from fedvlm.folder import Run

METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # name here → recipe, and what is changed in it
    "zero-shot": ("zero-shot", {}),
    "promptfl": ("promptfl", {"keep": False}),
    "fedpgp": ("fedpgp", {}),
    "vpt": ("vpt", {}),
    "fedmaple": ("fedmaple", {}),
    "pfeddc": ("pfeddc", {}),
    "pfedmma": ("pfedmma", {}),
    "fedlora": ("fedlora", {"projections": "q,k,v,out"}),
    "feddtl-decoupled": ("feddtl-decoupled", {}),
    "feddtl-two-stage": ("feddtl-two-stage", {}),
    "feddtl-reinforced": ("feddtl-reinforced", {}),
    "feddtl": ("feddtl", {}),
}
NAMED = ("zero-shot", "pfeddc", "fedpgp", "pfedmma", "promptfl", "fedmaple", "feddtl")  # in the paper's Tables 13 to 16
PAPER = {  # its base / novel on Caltech101 with ViT-B/16, by partition and whether all images are used
    ("iid", False): "86.81/93.52 91.38/88.91 89.83/90.07 93.46/92.25 89.42/92.44 91.24/92.18 97.42/94.08",
    ("disjoint", False): "86.81/93.52 63.40/76.43 89.10/93.72 80.33/92.05 89.36/91.62 89.72/91.98 95.69/94.44",
    ("dirichlet", False): "86.81/93.52 82.52/83.59 90.52/93.64 89.49/92.76 89.40/92.54 90.70/92.95 96.23/94.24",
    ("iid", True): "86.81/93.52 96.70/89.44 92.00/89.60 97.68/92.50 94.83/90.59 96.70/91.98 98.13/93.21",
    ("disjoint", True): "86.81/93.52 51.23/67.44 79.75/80.43 71.85/81.91 84.94/77.16 88.41/75.00 97.42/92.13",
    ("dirichlet", True): "86.81/93.52 79.36/83.61 87.45/89.88 84.46/87.99 86.81/71.60 95.37/84.10 98.22/93.98",
}
PROMPTS = ("promptfl", "fedpgp")

Found = dict[str, list[Run]]  # method → its runs, one a seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="", help="a folder of class/image")
    parser.add_argument("--pacs", default="", help="a folder of domain/class/image")
    parser.add_argument("--partitions", default="iid,dirichlet,disjoint")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--shots", type=int, default=16)
    parser.add_argument("--full", action="store_true", help="all training images in place of a few a class and client")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", default="50,77,98")
    parser.add_argument("--prompt-lr", type=float, default=0.0, help="of promptfl and fedpgp; 0 is the recipes'")
    parser.add_argument("--evaluate", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--out", default="runs/novel")
    args = parser.parse_args()
    if unknown := set(args.methods.split(",")) - METHODS.keys():
        parser.error(f"--methods {','.join(unknown)}: choose of {', '.join(METHODS)}")
    if not args.data and not args.pacs:
        parser.error("give --data FOLDER, --pacs FOLDER, or both")
    for partition in args.partitions.split(",") if args.data else ():
        layout = {"data": args.data, "protocol": "base-to-novel", "partition": partition, "clients": 5, "alpha": 0.1}
        theirs = PAPER.get((partition, args.full), "") if "caltech101" in args.data and args.shots == 16 else ""
        novel(runs(args, layout), partition, about(args), dict(zip(NAMED, theirs.split(), strict=False)))
    if args.pacs:
        layout = {"data": args.pacs, "partition": "domain-dirichlet", "clients": 3, "alpha": 0.1}
        domains(runs(args, layout), about(args))


def about(args: argparse.Namespace) -> str:
    shots = "all images" if args.full else f"{args.shots} images a class and client"
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{shots}, {args.rounds} rounds, seeds {args.seeds}, {where}; last round, test split, in %, ± std over seeds"


def runs(args: argparse.Namespace, layout: dict[str, Any]) -> Found:
    common = layout | {"shots": 0 if args.full else args.shots, "rounds": args.rounds, "seeds": args.seeds}
    common |= {"out": args.out, "evaluate": args.evaluate}
    setups = {}
    for name in (n for n in METHODS if n in args.methods.split(",")):
        recipe, change = METHODS[name]
        rate = {"lr": args.prompt_lr} if args.prompt_lr and name in PROMPTS else {}
        setups[name] = resolve(recipe, common | change | rate)
    jobs = [jobs_of([s]) for s in setups.values()]
    began = time.perf_counter()
    done = iter(run_all([j for part in jobs for j in part], args.jobs))
    print(f"{sum(map(len, jobs))} runs in {(time.perf_counter() - began) / 60:.1f} minutes")
    return {name: [next(done) for _ in part] for name, part in zip(setups, jobs, strict=True)}


def novel(found: Found, partition: str, told: str, theirs: dict[str, str]) -> None:
    print(f"\nbase-to-novel, {partition}, 5 clients, {told}")
    scores = {name: measures(part) for name, part in found.items()}
    rows = [
        [
            *(name, *(spread([s[m] for s in scores[name].values()]) for m in MEASURES)),
            *(switched(part), sent(part), theirs.get(name, "")),
        ]
        for name, part in found.items()
    ]
    console.rows(["method", *MEASURES, "reinforced from round", "MB/round", "paper: base/novel, ViT-B/16"], rows)
    print("the paper's claims here: mean difference ± s.e. over seeds, then seed by seed")
    if partition == "disjoint":
        claim("decoupling lifts base", "base", scores, "feddtl-decoupled", "fedlora")
    claim("two stages keep novel", "novel", scores, "feddtl", "feddtl-decoupled")
    claim("two stages keep novel", "novel", scores, "feddtl-two-stage", "fedlora")
    others = {n: np.mean(hm) for n, s in scores.items() if None not in (hm := [v["hm"] for v in s.values()])}
    if best := [n for n in sorted(others, key=lambda n: -others[n]) if not n.startswith("feddtl")]:
        claim("FedDTL has the best hm of all methods", "hm", scores, "feddtl", best[0])
    for name in others if "feddtl" in others else ():
        if name not in ("feddtl", *best[:1]):
            claim("  and hm", "hm", scores, "feddtl", name)


def measures(part: list[Run]) -> dict[int, dict[str, float | None]]:
    return {
        s: {m: None if (v := one.get(m)) is None else 100 * v for m in MEASURES}
        for s, one in by_seed([r.info for r in part]).items()
    }


def claim(says: str, measure: str, scores: dict[str, dict], one: str, other: str) -> None:
    """Whether `one` is above `other`, seed by seed: not merely on average, but beyond two standard errors."""
    if one not in scores or other not in scores:
        return
    seeds = [s for s in scores[one] if s in scores[other]]
    pairs = [(scores[one][s][measure], scores[other][s][measure]) for s in seeds]
    if any(None in pair for pair in pairs):
        return
    change = np.array([a - b for a, b in pairs])
    error = change.std(ddof=1) / len(change) ** 0.5 if len(change) > 1 else np.inf
    verdict = "holds" if change.mean() > 2 * error else "reversed" if change.mean() < -2 * error else "not decided"
    told = f"{change.mean():+.2f}" + (f" ± {error:.2f}" if len(change) > 1 else " (one seed)")
    apart = ", ".join(f"{c:+.2f}" for c in change)
    print(f"{says}: {one} against {other}, {measure} {told} ({apart}): {verdict}")


def switched(part: list[Run]) -> str:
    """The first reinforced round, seed by seed; nothing where a method knows no stages."""
    rounds = [[(r["round"], r["stage"]) for r in run.rounds() if "stage" in r] for run in part]
    if not any(rounds):
        return ""
    return ", ".join(str(next((k for k, stage in one if stage == "reinforced"), "never")) for one in rounds)


def sent(part: list[Run]) -> str:
    results = [r.info["result"] for r in part]
    return f"{np.mean([(r['bytes_up'] + r['bytes_down']) / max(1, r['last']['round']) for r in results]) / 1e6:.2f}"


def spread(values: list[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known or len(known) < len(values):
        return DASH
    return plus_minus(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else None)


def domains(found: Found, told: str) -> None:
    print(f"\nPACS, each domain cut into 3 clients by Dirichlet 0.1, {told}")
    names: list[str] = []
    rows = []
    for name, part in found.items():
        by_domain = [{d: 100 * v for d, (v, _) in row(r.info).items()} for r in part]
        names = names or list(by_domain[0])
        means: list[float | None] = [float(np.mean(list(one.values()))) for one in by_domain]
        cells = [spread([one.get(d) for one in by_domain]) for d in names]
        rows.append([name, *cells, spread(means), switched(part), sent(part)])
    console.rows(["method", *names, "mean", "reinforced from round", "MB/round"], rows)


if __name__ == "__main__":
    main()
