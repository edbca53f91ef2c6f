"""Our one-round method (moments) beside the others: writes the results of docs/moments.md.

    python benchmarks/own.py --pacs ../shared/data/pacs --caltech ../shared/data/caltech101 --jobs 16 --write
    python benchmarks/own.py --pacs pacs.safetensors --tables pacs --methods moments analytic fedot --seeds 201 202
    python benchmarks/own.py --pacs pacs.safetensors --tables dp
    python benchmarks/own.py --caltech ../shared/data/caltech101 --outsiders ../shared/data/textures --tables outsiders

Tables: variants (choices within the method, by validation alone); pacs and emoji (each domain held out in turn), both also
with centre=own, where every client and every newcomer takes the mean of its own unlabelled images off (another protocol:
every method gets the same right); caltech (each class with one of 10 clients, 8 shots); dp (accuracy against ε on PACS, with
DP training of the same head); outsiders. Methods that train take 50 rounds (caltech: 25) with the lr of one grid, the
recipe's times 0.3, 1 and 3, by the mean accuracy of shared and personal models on the validation images of clients that
train (first seed). What closed forms choose, they choose on the same images. Seeds are others than those that the method was
made with. ± is the standard error over seeds. CPU-seconds are of one run, measured alone in this process, without the last
evaluation.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from claims import validation
from study import last_rounds, results, run_each, seed_scores, standard_error

from fedvlm import console, ridge, train
from fedvlm.config import Setup, resolve
from fedvlm.data.pool import Pools
from fedvlm.evaluate.protocols import or_nan
from fedvlm.folder import RunFolder
from fedvlm.local.moments import CROSS, SECOND
from fedvlm.metrics.detection import auroc, fpr_at
from fedvlm.planning import single_runs
from fedvlm.report.tables import DASH

DOCUMENT = Path(__file__).parent.parent / "docs" / "moments.md"
MARK = "<!-- results: written by benchmarks/own.py -->"
SEEDS = (201, 202, 203, 204, 205)
GRID = (0.3, 1.0, 3.0)  # times the recipe's lr
CLOSED = ("zero-shot", "analytic", "tofa", "tip-adapter", "moments")
METHODS = [
    *("zero-shot", "fedavg", "fedprox", "ditto", "fedclip", "fedot", "fedlt", "fedadapter", "local-only"),
    *("analytic", "tofa", "tip-adapter", "moments"),
]
VALIDATED = (301, 302, 303)  # seeds of the table variants
TABLES = ("variants", "pacs", "pacs-centred", "emoji", "emoji-centred", "caltech", "dp", "outsiders")
SHRINK = 0.1  # of the covariance within classes, in mean eigenvalues
EPSILONS = (1.0, 2.0, 8.0, math.inf)
DISJOINT = {"partition": "disjoint", "clients": 10, "shots": 8, "rounds": 25}


class Row(NamedTuple):
    method: str
    runs: list[RunFolder]
    setup: Setup


class Study:
    def __init__(self, args: argparse.Namespace):
        self.args, self.pools = args, Pools()
        self.places = {"pacs": args.pacs, "emoji": "emoji", "caltech": args.caltech}

    def keys(self, table: str) -> dict[str, object] | None:
        """What all methods of a table have in common; None where its data were not given."""
        name, _, centred = table.partition("-")
        place = self.places[name]
        if not place:
            return None
        keys: dict[str, object] = {"data": place, "rounds": self.args.rounds, "out": str(Path(self.args.out, table))}
        keys |= DISJOINT if name == "caltech" else {"protocol": "leave-one-domain-out"}
        return keys | ({"centre": "own"} if centred else {})

    def setup(self, method: str, keys: Mapping[str, object], seeds: Sequence[int], **more: object) -> Setup:
        given = {k: v for k, v in keys.items() if k != "rounds" or method not in CLOSED}
        rounds = given.get("rounds", 1)
        return resolve(method, {**given, "evaluate": max(1, int(str(rounds))), "seeds": tuple(seeds), **more})

    def rows(self, methods: Sequence[str], keys: Mapping[str, object]) -> list[Row]:
        """The lr of each method that trains, then all seeds."""
        first = self.args.seeds[:1]
        rates = {m: self.setup(m, keys, first).local.lr for m in methods if m not in CLOSED}
        tries = {(m, f): self.setup(m, keys, first, lr=rates[m] * f) for m in rates for f in GRID}
        tried = run_each(tries, self.args.jobs, self.pools)
        best = {m: max(GRID, key=lambda f: validation(tried[m, f], "C")) for m in rates}
        final = {
            m: self.setup(m, keys, self.args.seeds, **({"lr": rates[m] * best[m]} if m in rates else {}))
            for m in methods
        }
        found = run_each(final, self.args.jobs, self.pools)
        return [Row(m, found[m], final[m]) for m in methods]

    def cpu_seconds(self, setup: Setup) -> float:
        """Of one run in this process, without scoring."""
        pool = self.pools.load(setup)
        one = single_runs(setup, pool)[0]
        with tempfile.TemporaryDirectory() as folder:
            torch.set_num_threads(1)
            method, federation = train.prepare(one, pool)
            begun = time.process_time()
            run = train.train_on(one, pool, method, federation, Path(folder, "run"), lambda record: None)
            spent = time.process_time() - begun
            assert run.done
        with tempfile.TemporaryDirectory() as folder:  # what there is to do without training: rows, scores, records
            idle = one.with_(rounds=0)
            begun = time.process_time()
            train.train_on(idle, pool, *train.prepare(idle, pool), Path(folder, "run"), lambda record: None)
        return max(spent - (time.process_time() - begun), 0.0)


def cell(values: Sequence[float | None]) -> str:
    known = np.array([100 * v for v in values if v is not None])
    if not len(known) or len(known) < len(values):
        return DASH
    return f"{known.mean():.2f}" + (f" ± {standard_error(known):.2f}" if len(known) > 1 else "")


def domains_table(study: Study, rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    lines = []
    for row in rows:
        scores = [cell(list(seed_scores(row.runs, m).values())) for m in ("G", "P", "C")]
        lines.append([row.method, *scores, *costs(study, row)])
    return ["method", "G", "P", "C", "rounds", "MB", "CPU-s"], lines


def clients_table(study: Study, rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Of a federation without domains: personal and shared models on the clients' own test images."""
    lines = []
    for row in rows:
        views = [[last.get(v, {}).get("test") for last in last_rounds(row.runs)] for v in ("personal", "shared")]
        lines.append([row.method, *map(cell, views), *costs(study, row)])
    return ["method", "personal", "shared", "rounds", "MB", "CPU-s"], lines


def costs(study: Study, row: Row) -> list[str]:
    found = results(row.runs)
    megabytes = np.mean([(r.bytes_up + r.bytes_down) / 1e6 for r in found])
    spent = study.cpu_seconds(row.setup) if study.args.costs else math.nan
    rounds = str(found[0].last["round"])
    return [rounds, f"{megabytes:.2f}", DASH if math.isnan(spent) else f"{spent:.2f}"]


def private_table(study: Study) -> tuple[list[str], list[list[str]]]:
    """The shared head at the level of examples, in one round and by DP-SGD of as many rounds as the other tables have."""
    keys = study.keys("pacs")
    assert keys is not None
    plain = {"adapter": "affine", "balance": False, "texts": (4.0,)}
    lines = []
    for epsilon in EPSILONS:
        dp: dict[str, object] = {} if math.isinf(epsilon) else {"dp": "example", "epsilon": epsilon}
        tries = {
            ("moments", x): study.setup("moments", keys, study.args.seeds[:1], **(plain | dp), strengths=(x,))
            for x in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
        }
        for x in (0.01, 0.03, 0.1, 0.3):
            more = {"adapter": "affine", "lr": x, "rounds": study.args.dp_rounds} | dp
            tries["fedavg", x] = study.setup("fedavg", keys, study.args.seeds[:1], **more)
        tried = run_each(tries, study.args.jobs, study.pools)
        best = {}
        for method, x in tries:
            score = float(np.mean([or_nan(r["shared"]["val"]) for r in last_rounds(tried[method, x])]))
            best[method] = max(best.get(method, (-1.0, 0.0)), (score, x))
        for method, (_, x) in best.items():
            chosen = tries[method, x].with_(seeds=tuple(study.args.seeds))
            runs = run_each({method: chosen}, study.args.jobs, study.pools)[method]
            shared = [r["shared"]["test"] for r in last_rounds(runs)]
            by_seed = [cell(list(seed_scores(runs, "G").values())), cell(shared)]
            told = "strength" if method == "moments" else "lr"
            lines.append([f"{epsilon:g}", method, *by_seed, str(results(runs)[0].last["round"]), f"{told} {x:g}"])
    return ["ε", "method", "G", "shared model on clients", "rounds", "chosen"], lines


def outsiders_table(study: Study) -> tuple[list[str], list[list[str]]]:
    keys = study.keys("caltech")
    assert keys is not None
    keys |= {"outsiders": study.args.outsiders}
    lines = []
    for row in study.rows([m for m in study.args.methods if m in ("zero-shot", "fedot", "tofa", "moments")], keys):
        found = [last["detection"]["personal"] for last in last_rounds(row.runs)]
        names = ("auroc", "fpr95", "energy.auroc", "energy.fpr95")
        accuracy = cell([last["personal"]["test"] for last in last_rounds(row.runs)])
        lines.append([row.method, accuracy, *(cell([f[n] for f in found]) for n in names)])
        if row.method == "moments":
            distances = [distance_scores(study, row.setup, run) for run in row.runs]
            lines.append(["moments, distance", accuracy, *(cell(x) for x in zip(*distances, strict=True)), DASH, DASH])
    return ["method", "accuracy", "AUROC, MCM", "FPR95", "AUROC, energy", "FPR95, energy"], lines


def distance_scores(study: Study, setup: Setup, run: RunFolder) -> tuple[float, float]:
    """AUROC and FPR95 by Mahalanobis distance to the nearest class mean, both of all clients' moments; mean over clients."""
    saved = run.load()
    assert saved is not None
    second, cross = (saved[0].server[k].double() for k in (SECOND, CROSS))
    means, within = ridge.class_means(ridge.Moments(ridge.unpacked(second), cross))
    within = within + SHRINK * within.trace() / len(within) * torch.eye(len(within), dtype=within.dtype)
    whiten = torch.linalg.cholesky(torch.linalg.inv(within))
    pool = study.pools.load(setup)
    one = next(s for s in single_runs(setup, pool) if s.config.seed == run.record.seed)
    data = train.prepare(one, pool)[1].data

    def nearness(x: torch.Tensor) -> torch.Tensor:
        return -torch.cdist(x.double() @ whiten, means @ whiten).amin(1)

    outside = nearness(data.extras["outsiders"].x)
    pairs = [(nearness(data.x[low:high]), outside) for low, high in data.bounds[:, 2:] if high > low]
    areas, rates = ([or_nan(measure(*pair)) for pair in pairs] for measure in (auroc, fpr_at))
    return float(np.mean(areas)), float(np.mean(rates))


def variants_table(study: Study) -> tuple[list[str], list[list[str]]]:
    """What of the method is a choice, by validation alone: no test image has a part in it. `newcomer` is the accuracy of the
    chosen candidates on clients whose moments were left out, `personal` that of personal heads on validation images; the
    last column, their mean over both data sets, is the criterion."""
    variants = [
        {"choose": choose, "balance": balance, "weights": weights}
        for choose in ("both", "newcomers", "clients")
        for balance in (True, False)
        for weights in ("uniform", "size")
    ]
    lines = []
    for variant in variants:
        cells, scores = [], []
        for table in ("pacs", "emoji"):
            keys = study.keys(table)
            if keys:
                out = str(Path(study.args.out, "variants", table))
                setup = study.setup("moments", keys, VALIDATED, **variant, out=out)
                last = last_rounds(run_each({"one": setup}, study.args.jobs, study.pools)["one"])
                found = [[r["effects"]["as_newcomer"], r["personal"]["val"]] for r in last]
                means = np.array(found, dtype=float).mean(0)
                cells += [f"{100 * m:.2f}" for m in means]
                scores.append(means.mean())
        lines.append([*map(str, variant.values()), *cells, f"{100 * float(np.mean(scores)):.2f}"])
    named = [f"{t}: {what}" for t in ("pacs", "emoji") if study.keys(t) for what in ("newcomer", "personal")]
    return ["choose", "balance", "weights", *named, "criterion"], sorted(lines, key=lambda line: -float(line[-1]))


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pacs", default="", help="a folder of domain/class/image, or its embeddings")
    parser.add_argument("--caltech", default="")
    parser.add_argument("--outsiders", default="", help="a folder of images of no class, for the table of that name")
    parser.add_argument("--tables", nargs="*", default=TABLES, choices=TABLES)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--dp-rounds", type=int, default=10, help="of DP training, in the table dp")
    parser.add_argument("--jobs", type=int, default=0, help="runs at once; 0: one per core")
    parser.add_argument("--out", default="runs/own")
    parser.add_argument("--no-costs", dest="costs", action="store_false", help="do not measure CPU-seconds")
    parser.add_argument("--write", action="store_true", help="into docs/moments.md")
    args = parser.parse_args()
    study, texts = Study(args), []
    for table in args.tables:
        missing = (
            not args.outsiders
            if table == "outsiders"
            else study.keys("pacs" if table in ("dp", "variants") else table) is None
        )
        if missing or (table == "outsiders" and not args.caltech):
            print(f"{table}: its data were not given")
            continue
        head, lines = tabulated(study, table)
        print(f"\n{table}")
        console.rows(head, lines)
        texts.append(f"### {table}\n\n{markdown(head, lines)}\n")
    if args.write:
        about = f"Written on {date.today()}; seeds {', '.join(map(str, args.seeds))}; ± standard error over seeds.\n"
        before = DOCUMENT.read_text(encoding="utf-8").partition(MARK)[0]
        DOCUMENT.write_text("\n".join([before + MARK, about, *texts]), encoding="utf-8")


def tabulated(study: Study, table: str) -> tuple[list[str], list[list[str]]]:
    if table == "variants":
        return variants_table(study)
    if table == "dp":
        return private_table(study)
    if table == "outsiders":
        return outsiders_table(study)
    keys = study.keys(table)
    assert keys is not None
    rows = study.rows(study.args.methods, keys)
    return clients_table(study, rows) if table == "caltech" else domains_table(study, rows)


if __name__ == "__main__":
    main()
