"""FOCoOp's tables: accuracy, accuracy on corrupted images, and telling outsiders (FPR95, AUROC), for prompts and others.

    python benchmarks/outsiders.py --caltech ../shared/data/caltech101 --outsiders ../shared/data/textures
    python benchmarks/outsiders.py --cifar CIFAR10 --outsiders ../shared/data/textures     # tools/cifar10.py makes CIFAR10

Caltech101: its classes dealt to 10 clients without overlap, 8 shots. CIFAR-10: Dirichlet 0.1, 0.5 and 5, 10 clients, 8
shots. The clients' own models on their own test images, which are told from the outsiders by MCM. Every method's learning
rate is chosen from one grid on the clients' validation images (first seed, last round; on CIFAR-10 with alpha = 0.5; the
ablations take FOCoOp's); test images and outsiders stay out of it. Runs unchanged on a GPU or not, and says on which.
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
from fedvlm.evaluate.views import selection
from fedvlm.report.tables import plus_minus
from fedvlm.folder import Run

GRID = (1e-3, 1e-2, 1e-1, 1.0)
METHODS = [
    "zero-shot",
    "promptfl",
    "promptfolio",
    "fedpgp",
    "fedotp",
    "fedlocoop",
    "fedgallop",
    "fedlapt",
    "fedclip",
    "fedot",
    "focoop",
    "focoop-without-bos",
    "focoop-without-goc",
]
MEASURES = {"ACC": "acc", "CACC": "cacc", "FPR95": "fpr95", "AUROC": "auroc"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--caltech", default="")
    parser.add_argument("--cifar", default="")
    parser.add_argument("--outsiders", required=True)
    parser.add_argument("--out", default="runs/outsiders")
    parser.add_argument("--seeds", default="50,77,98")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--corrupt", type=int, default=1, help="corrupted versions of an image")
    parser.add_argument("--grid", default=",".join(map(str, GRID)))
    parser.add_argument("--precision", default="full", choices=["full", "half"])
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    common = {"outsiders": args.outsiders, "corrupt": args.corrupt, "clients": 10, "shots": 8, "rounds": args.rounds}
    common |= {"evaluate": args.rounds, "out": args.out, "jobs": args.jobs}
    settings: dict[str, list[dict[str, Any]]] = {}
    if args.caltech:
        settings["Caltech101, classes dealt out"] = [{"data": args.caltech, "partition": "pathological"}]
    if args.cifar:
        skewed = {"data": args.cifar, "partition": "dirichlet"}
        settings["CIFAR-10"] = [skewed | {"alpha": alpha} for alpha in (0.5, 0.1, 5.0)]
    for title, layouts in settings.items():
        rates: dict[str, float] = {}
        for layout in layouts:
            began = time.perf_counter()
            found = study(args, common | layout, rates)
            name = title + (f", alpha = {layout['alpha']}" if "alpha" in layout else "")
            print(
                f"\n{name}; mini-clip ({args.precision} precision), {where}, {args.rounds} rounds, seeds {args.seeds}"
            )
            print(f"test split, last round, clients' own models, ± std over seeds; {time.perf_counter() - began:.0f} s")
            rows = [[m, f"{rates[m]:g}" if m in rates else "–", *row(runs)] for m, runs in found.items()]
            console.rows(["method", "lr", *MEASURES, "AUROC, max-logit", "AUROC, energy", "MB/round"], rows)
            claims(found)


def study(args: argparse.Namespace, given: dict[str, Any], rates: dict[str, float]) -> dict[str, list[Run]]:
    """Chooses learning rates that are not chosen yet, then runs every seed: method → its runs."""
    seeds = args.seeds.split(",")
    tune = [m for m in args.methods if m != "zero-shot" and "without" not in m and m not in rates]
    tried = [
        (m, lr, setup(m, given, args, lr=lr, seeds=seeds[0])) for m in tune for lr in map(float, args.grid.split(","))
    ]
    best: dict[str, float] = {}
    for (m, lr, _), run in zip(tried, run_all(jobs_of([s for *_, s in tried]), args.jobs), strict=True):
        score = selection(run.info["result"]["last"])
        if score > best.get(m, -1):
            best[m], rates[m] = score, lr
    rates |= {m: rates["focoop"] for m in args.methods if "without" in m and "focoop" in rates}
    setups = [setup(m, given, args, **({"lr": rates[m]} if m in rates else {}), seeds=args.seeds) for m in args.methods]
    jobs = [jobs_of([s]) for s in setups]
    done = iter(run_all([j for part in jobs for j in part], args.jobs))
    return {m: [next(done) for _ in part] for m, part in zip(args.methods, jobs, strict=True)}


def setup(method: str, given: dict[str, Any], args: argparse.Namespace, **more: Any) -> Any:
    chosen = given | more | ({"rounds": 0} if method == "zero-shot" else {})
    if hasattr(resolve(method, chosen).adapter, "precision"):
        chosen["precision"] = args.precision
    return resolve(method, chosen)


def row(runs: list[Run]) -> list[str]:
    last = [r.info["result"]["last"] for r in runs]
    cells = [spread([100 * x[key] for x in last]) for key in MEASURES.values()]
    cells += [
        spread([100 * x["detection"]["personal"][f"{score}.auroc"] for x in last]) for score in ("max-logit", "energy")
    ]
    results = [r.info["result"] for r in runs]
    wire = np.mean([(r["bytes_up"] + r["bytes_down"]) / max(1, r["last"]["round"]) for r in results]) / 1e6
    return [*cells, f"{wire:.2f}"]


def spread(values: list[float]) -> str:
    return plus_minus(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def claims(found: dict[str, list[Run]]) -> None:
    """The paper's: FOCoOp tells outsiders best without losing accuracy, and each of its two modules matters."""
    if "focoop" not in found:
        return
    last = {m: [r.info["result"]["last"] for r in runs] for m, runs in found.items()}
    got = {m: {k: np.array([100 * x[k] for x in part]) for k in MEASURES.values()} for m, part in last.items()}
    for m in found:
        if m != "focoop":
            change = {k: got["focoop"][k] - got[m][k] for k in MEASURES.values()}
            told = [f"{name} {v.mean():+.2f} ± {error(v):.2f}" for name, k in MEASURES.items() for v in [change[k]]]
            print(f"focoop against {m}, seed by seed (± s.e.): {', '.join(told)}")


def error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


if __name__ == "__main__":
    main()
