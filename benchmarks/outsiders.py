"""FOCoOp's tables: accuracy, accuracy on corrupted images, and detection of outsiders (FPR95, AUROC) for many methods.

    python benchmarks/outsiders.py --caltech ../shared/data/caltech101 --outsiders ../shared/data/textures
    python benchmarks/outsiders.py --cifar CIFAR10 --outsiders ../shared/data/textures     # tools/cifar10.py makes CIFAR10
    python benchmarks/outsiders.py --small --caltech ../shared/data/caltech101 --outsiders ../shared/data/textures \\
        --methods promptfl promptfolio focoop                                              # minutes on two cores

Caltech101: each class is dealt to one of 10 clients, 8 shots. CIFAR-10: Dirichlet 0.1, 0.5 and 5, 10 clients, 8 shots.
--small: 20 classes of Caltech101, Dirichlet 0.5, 5 clients, 4 shots, 4 context vectors, 30 outsider prompts, 8 rounds, no
corrupted images. The clients' own models are tested on their own test images and on the outsiders, which are detected by
MCM; PromptFL, which has no private part, by its shared model. All methods train 2 epochs a round. Each method's learning
rate is chosen from one grid by the measure of the table, on validation: the accuracy of the clients' own models on their
validation images (first seed, last round; for CIFAR-10 with alpha = 0.5; the ablations use FOCoOp's). Test images and
outsiders are not used for it. Uses a GPU where there is one; the output names the device.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from study import last_rounds, mean_std, megabytes_per_round, run_each, standard_error

from fedvlm.config.config import Setup, resolve
from fedvlm.core.records import value_of
from fedvlm.data.pool import Pools
from fedvlm.evaluation.protocols import or_nan
from fedvlm.report.tables import DASH
from fedvlm.system import console
from fedvlm.training.folder import RunFolder

GRID = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
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
SMALL_CLASSES = (
    *("accordion", "bass", "brain", "butterfly", "car_side", "chair", "cougar_face", "crayfish", "crocodile_head"),
    *(
        "dalmatian",
        "dolphin",
        "electric_guitar",
        "emu",
        "ewer",
        "flamingo",
        "grand_piano",
        "hedgehog",
        "ibis",
        "kangaroo",
    ),
    "lamp",
)
SMALL = {"classes": SMALL_CLASSES, "partition": "dirichlet", "alpha": 0.5, "clients": 5, "shots": 4, "corrupt": 0}
SMALL_PROMPTS = {"context": 4, "count": 30, "candidates": 4000}
OWN = {
    "promptfl": {"keep": False, "gaps": False}
}  # its recipe scores what a client trained last, FOCoOp's paper does not
MEASURES = {"ACC": "acc", "CACC": "cacc", "FPR95": "fpr95", "AUROC": "auroc"}

Found = dict[str, list[RunFolder]]  # method → its runs, one per seed
Settings = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caltech", default="", help="a folder of class/image")
    parser.add_argument("--cifar", default="", help="a folder of class/image")
    parser.add_argument("--outsiders", required=True, help="a folder of images of no class")
    parser.add_argument("--out", default="runs/outsiders")
    parser.add_argument("--seeds", default="50,77,98")
    parser.add_argument("--rounds", type=int, default=0, help="default: 25, with --small 8")
    parser.add_argument("--small", action="store_true", help="a cut-down study, see above")
    parser.add_argument("--corrupt", type=int, default=1, help="corrupted versions of each test image")
    parser.add_argument("--grid", default=",".join(map(str, GRID)), help="learning rates to choose from")
    parser.add_argument("--precision", default="full", choices=["full", "half"])
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time; 0 is one per core")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    args = parser.parse_args()
    args.rounds = args.rounds or (8 if args.small else 25)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    common: Settings = {"outsiders": args.outsiders, "corrupt": args.corrupt, "clients": 10, "shots": 8}
    common |= {"rounds": args.rounds, "evaluate_every": args.rounds, "out": args.out, "jobs": args.jobs}
    data: dict[str, list[Settings]] = {}
    if args.caltech:
        title = "Caltech101, 20 classes" if args.small else "Caltech101, each class dealt to one client"
        data[title] = [{"data": args.caltech, "partition": "pathological"} | (SMALL if args.small else {})]
    if args.cifar:
        skewed: Settings = {"data": args.cifar, "partition": "dirichlet"}
        data["CIFAR-10"] = [skewed | {"alpha": alpha} for alpha in (0.5, 0.1, 5.0)]
    pools = Pools()
    for title, layouts in data.items():
        rates: dict[str, float] = {}
        for layout in layouts:
            began = time.perf_counter()
            found = study(args, common | layout, rates, pools)
            name = title + (f", alpha = {layout['alpha']}" if "alpha" in layout else "")
            about = f"mini-clip ({args.precision} precision), {device}, {args.rounds} rounds, seeds {args.seeds}"
            print(f"\n{name}; {about}")
            print(f"test split, last round, clients' own models, ± std over seeds; {time.perf_counter() - began:.0f} s")
            rows = [[m, f"{rates[m]:g}" if m in rates else DASH, *row(runs)] for m, runs in found.items()]
            console.rows(["method", "lr", *MEASURES, "AUROC, max-logit", "AUROC, energy", "MB/round"], rows)
            print_differences(found)


def study(args: argparse.Namespace, given: Settings, rates: dict[str, float], pools: Pools) -> Found:
    """Chooses the learning rates that `rates` lacks, and adds them to it; then runs every seed."""
    seeds = args.seeds.split(",")
    untuned = [m for m in args.methods if m != "zero-shot" and "without" not in m and m not in rates]
    grid = [float(lr) for lr in args.grid.split(",")]
    candidates = {(m, lr): setup_for(m, given | {"lr": lr, "seeds": seeds[0]}, args) for m in untuned for lr in grid}
    best: dict[str, float] = {}
    for (m, lr), runs in run_each(candidates, args.jobs, pools).items():
        score = or_nan(last_rounds(runs)[0]["personal"]["val"])
        if score > best.get(m, -1):
            best[m], rates[m] = score, lr
    rates |= {m: rates["focoop"] for m in args.methods if "without" in m and "focoop" in rates}
    chosen = {m: {"lr": rates[m]} if m in rates else {} for m in args.methods}
    setups = {m: setup_for(m, given | lr | {"seeds": args.seeds}, args) for m, lr in chosen.items()}
    return run_each(setups, args.jobs, pools)


def setup_for(method: str, given: Settings, args: argparse.Namespace) -> Setup:
    if method == "zero-shot":
        return resolve(method, given | {"rounds": 0})
    given = given | {"epochs": 2} | OWN.get(method, {})
    known = resolve(method, given).parts["adapter"].settings
    sizes: Settings = {"precision": args.precision} | (SMALL_PROMPTS if args.small else {})
    return resolve(method, given | {k: v for k, v in sizes.items() if k in known})


def row(runs: list[RunFolder]) -> list[str]:
    rounds = last_rounds(runs)
    cells = [mean_std([value_of(r, key) for r in rounds], 100) for key in MEASURES.values()]
    for score in ("max-logit", "energy"):
        cells.append(mean_std([r["detection"]["personal"][f"{score}.auroc"] for r in rounds], 100))
    return [*cells, f"{megabytes_per_round(runs):.2f}"]


def print_differences(found: Found) -> None:
    """The paper's claims: FOCoOp detects outsiders best without losing accuracy, and each of its two modules matters."""
    if "focoop" not in found:
        return
    values = {
        m: {k: np.array([100 * or_nan(value_of(r, k)) for r in last_rounds(runs)]) for k in MEASURES.values()}
        for m, runs in found.items()
    }
    for m in found:
        if m != "focoop":
            changes = {name: values["focoop"][k] - values[m][k] for name, k in MEASURES.items()}
            known = {name: v for name, v in changes.items() if not np.isnan(v).any()}
            text = ", ".join(f"{name} {v.mean():+.2f} ± {standard_error(v):.2f}" for name, v in known.items())
            print(f"focoop against {m}, seed by seed (± s.e.): {text}")


if __name__ == "__main__":
    main()
