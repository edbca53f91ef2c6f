"""Base-to-novel (FedDTL, 2026): local, base, novel accuracy and hm of the methods its tables compare, and its claims.

    python benchmarks/novel.py --data ../shared/data/caltech101 --pacs ../shared/data/pacs
    python benchmarks/novel.py --data ../shared/data/caltech101 --rounds 2 --seeds 50 --methods zero-shot,feddtl  # small

Half of the classes are dealt to 5 clients (iid, Dirichlet 0.1, or each class to one client); the other half is only tested.
PACS: each domain is split into 3 clients by Dirichlet 0.1; accuracy by domain. Settings are the recipes', except that
FedLoRA changes the same projections as FedDTL, so that the two differ only in what the claims are about. Each claim is
printed with its differences seed by seed (a seed gives all methods the same splits), whether it holds or not. Uses a GPU
where there is one; the output names the device. At these sizes it takes a day on 2 cores.

The measures are means over test images, as published; base, novel and hm over classes (macro) stand beside them, since
Caltech101's classes have between 6 and 160 test images. text_cosine is how far the text tower's class embeddings are from
the frozen ones in the last round (1: not at all), clipped the share of clipped actions (0 in the supervised stage).
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from study import mean_std, megabytes_per_round, run_each

from fedvlm.config import recipe
from fedvlm.config.config import resolve
from fedvlm.core.records import MEASURES, Number, value_of
from fedvlm.data.pool import Pools
from fedvlm.evaluation.novel import MACRO
from fedvlm.evaluation.protocols import matrix_row
from fedvlm.report.gains import gain
from fedvlm.system import console
from fedvlm.training.folder import RunFolder

Settings = dict[str, object]
METHODS: dict[str, Settings] = {  # recipe → what is changed in it
    "zero-shot": {},
    "promptfl": {"keep": False},
    "fedpgp": {},
    "vpt": {},
    "fedmaple": {},
    "pfeddc": {},
    "pfedmma": {},
    "fedlora": {"projections": "q,k,v,out"},
    "feddtl-decoupled": {},
    "feddtl-two-stage": {},
    "feddtl-reinforced": {},
    "feddtl": {},
    "feddtl-anchored": {},
}
PROMPTS = ("promptfl", "fedpgp")

Found = dict[str, list[RunFolder]]  # method → its runs, one per seed
EFFECTS = ("text_cosine", "clipped")  # what mechanisms did, in the last round
Scores = dict[int, dict[str, Number]]  # seed → measure → value in %


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="a folder of class/image")
    parser.add_argument("--pacs", default="", help="a folder of domain/class/image")
    parser.add_argument("--partitions", default="iid,dirichlet,disjoint")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--shots", type=int, default=16, help="training images per class and client")
    parser.add_argument("--full", action="store_true", help="all training images instead of --shots")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", default="50,77,98")
    parser.add_argument("--prompt-lr", type=float, default=0.0, help="of promptfl and fedpgp; 0 is the recipes'")
    parser.add_argument("--evaluate", type=int, default=5, help="score every so many rounds")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time; 0 is one per core")
    parser.add_argument("--out", default="runs/novel")
    args = parser.parse_args()
    if unknown := set(args.methods.split(",")) - METHODS.keys():
        parser.error(f"--methods {','.join(unknown)}: choose from {', '.join(METHODS)}")
    if not args.data and not args.pacs:
        parser.error("give --data FOLDER, --pacs FOLDER, or both")
    for partition in args.partitions.split(",") if args.data else ():
        layout = {"data": args.data, "protocol": "base-to-novel", "partition": partition, "clients": 5, "alpha": 0.1}
        print_base_to_novel(run_methods(args, layout), partition, about(args))
    if args.pacs:
        layout = {"data": args.pacs, "partition": "domain-dirichlet", "clients": 3, "alpha": 0.1}
        print_domains(run_methods(args, layout), about(args))


def about(args: argparse.Namespace) -> str:
    shots = "all images" if args.full else f"{args.shots} images per class and client"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return (
        f"{shots}, {args.rounds} rounds, seeds {args.seeds}, {device}; last round, test split, in %, ± std over seeds"
    )


def run_methods(args: argparse.Namespace, layout: Settings) -> Found:
    common = layout | {"shots": 0 if args.full else args.shots, "rounds": args.rounds, "seeds": args.seeds}
    common |= {"out": args.out, "evaluate_every": args.evaluate}
    setups = {}
    for name in (n for n in METHODS if n in args.methods.split(",")):
        rate = {"lr": args.prompt_lr} if args.prompt_lr and name in PROMPTS else {}
        setups[name] = resolve(name, common | METHODS[name] | rate)
    began = time.perf_counter()
    found = run_each(setups, args.jobs, Pools())
    print(f"{sum(map(len, found.values()))} runs in {(time.perf_counter() - began) / 60:.1f} minutes")
    return found


def print_base_to_novel(found: Found, partition: str, settings: str) -> None:
    print(f"\nbase-to-novel, {partition}, 5 clients, {settings}")
    scores = {name: measures(runs) for name, runs in found.items()}
    rows = [
        [
            *(name, *(mean_std([s[m] for s in scores[name].values()]) for m in (*MEASURES, *MACRO))),
            *(reinforced_from(runs), *(effect(runs, name) for name in EFFECTS)),
            *(f"{megabytes_per_round(runs):.2f}", published(runs[0])),
        ]
        for name, runs in found.items()
    ]
    measured = ["method", *MEASURES, *MACRO, "reinforced from round", *EFFECTS]
    console.rows([*measured, "MB/round", "paper: base/novel, ViT-B/16"], rows)
    print("the paper's claims here: mean difference ± s.e. over seeds, then seed by seed")
    if partition == "disjoint":
        print_claim("decoupling raises base", "base", scores, "feddtl-decoupled", "fedlora")
    print_claim("two stages keep novel", "novel", scores, "feddtl", "feddtl-decoupled")
    print_claim("two stages keep novel", "novel", scores, "feddtl-two-stage", "fedlora")
    for measure in ("hm", "hm_macro"):
        print_claim("an anchor raises hm (ours)", measure, scores, "feddtl-anchored", "feddtl")
    hm = {n: float(np.mean(known)) for n, s in scores.items() if (known := values(s, "hm"))}
    others = [n for n in sorted(hm, key=lambda n: -hm[n]) if not n.startswith("feddtl")]
    if others:
        print_claim("FedDTL has the best hm of all methods", "hm", scores, "feddtl", others[0])
    for name in hm if "feddtl" in hm else ():
        if name not in ("feddtl", *others[:1]):
            print_claim("  and hm", "hm", scores, "feddtl", name)


def published(run: RunFolder) -> str:
    """Base and novel accuracy in the paper under this run's settings; "" where it has none."""
    record = run.record
    found = recipe.published(record.method.name, record.method.on, record.data.name, record.config)
    return f"{found['base']:.2f}/{found['novel']:.2f}" if "novel" in found else ""


def measures(runs: list[RunFolder]) -> Scores:
    last = {run.record.seed: run.record.finished.at("last") for run in runs}
    names = (*MEASURES, *MACRO)
    return {
        seed: {m: None if (v := value_of(scored, m)) is None else 100 * v for m in names}
        for seed, scored in last.items()
    }


def effect(runs: list[RunFolder], name: str) -> str:
    """The last recorded value, mean over seeds; "" where a method has none."""
    known = [[r["effects"][name] for r in run.rounds() if name in r.get("effects", {})] for run in runs]
    return f"{np.mean([values[-1] for values in known]):.3f}" if all(known) else ""


def values(scores: Scores, measure: str) -> list[float]:
    """Of every seed; empty where one lacks it."""
    known = [v for one in scores.values() if (v := one[measure]) is not None]
    return known if len(known) == len(scores) else []


def print_claim(claim: str, measure: str, scores: dict[str, Scores], one: str, other: str) -> None:
    """Whether `one` is above `other` by the rule of fedvlm/report/gains.py."""
    if one not in scores or other not in scores:
        return
    seeds = [s for s in scores[one] if s in scores[other]]
    ours, theirs = ({s: v for s in seeds if (v := scores[name][s][measure]) is not None} for name in (one, other))
    found = gain(ours, theirs)
    if found is None or found.seeds < len(seeds):
        return
    verdict = "holds" if found.above else "reversed" if found.below else "not decided"
    each = ", ".join(f"{ours[s] - theirs[s]:+.2f}" for s in seeds)
    print(f"{claim}: {one} against {other}, {measure} {found} ({each}): {verdict}")


def reinforced_from(runs: list[RunFolder]) -> str:
    """The first round of the reinforced stage, for each seed; "" where a method has no stages."""
    histories = [[(r["round"], r["stage"]) for r in run.rounds() if "stage" in r] for run in runs]
    if not any(histories):
        return ""
    return ", ".join(str(next((k for k, stage in one if stage == "reinforced"), "never")) for one in histories)


def print_domains(found: Found, settings: str) -> None:
    print(f"\nPACS, each domain split into 3 clients by Dirichlet 0.1, {settings}")
    names: list[str] = []
    rows = []
    for name, runs in found.items():
        by_domain = [{d: 100 * v for d, (v, _) in matrix_row(run.record).items()} for run in runs]
        names = names or list(by_domain[0])
        means = [float(np.mean(list(one.values()))) for one in by_domain]
        cells = [mean_std([one.get(d) for one in by_domain]) for d in names]
        rows.append([name, *cells, mean_std(means), reinforced_from(runs), f"{megabytes_per_round(runs):.2f}"])
    console.rows(["method", *names, "mean", "reinforced from round", "MB/round"], rows)


if __name__ == "__main__":
    main()
