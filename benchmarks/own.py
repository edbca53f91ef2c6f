"""Our one-round method (moments) beside the others: writes the results of docs/moments-tables.md.

    python benchmarks/own.py --pacs ../shared/data/pacs --caltech ../shared/data/caltech101 --jobs 16 --write
    python benchmarks/own.py --pacs pacs.safetensors --tables pacs --methods moments analytic fedot --seeds 201 202
    python benchmarks/own.py --pacs ../shared/data/pacs --tables dp costs
    python benchmarks/own.py --caltech ../shared/data/caltech101 --outsiders ../shared/data/textures --tables outsiders
    python benchmarks/own.py --pacs pacs --caltech caltech101 --outsiders textures --read --write   # run folders alone

Tables: variants (choices within the method, on images that no other table tests: benchmarks/variants.py); pacs and emoji
(each domain held out in turn), both also with centre=own, where every client and every newcomer takes the mean of its own
unlabelled images off (another protocol: every method gets the same right); caltech (each class with one of 10 clients, 8
shots) and caltech-dirichlet; novel (half of the classes with nobody); outsiders; dp (accuracy against ε on PACS, with DP
training of the same head); costs; others (methods of 2022 to 2026 on 20 classes of Caltech101, in docs/results.md). Methods
that train take the rounds of the table with the lr of one grid, the recipe's times 0.3, 1 and 3, by the mean accuracy of
shared and personal models on the validation images of clients that train (first seed). What closed forms choose, they choose
on the same images. Seeds are others than those that the method was made with. ± is the standard error over seeds.

Every table is run for itself, and finished runs are not repeated, so several commands may fill one --out at the same time,
each with methods of its own, and a command that was stopped goes on. A method with a run that failed is left out of its
table and named below it. --write replaces the rows that were run; other rows of the same table with the same seeds stay, and
their date is told below it. dp, costs and variants are replaced whole. --read runs nothing: it needs of --out only run.json,
rounds.jsonl and measured/.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import results as results_document
from claim_runs import validation
from measured import Measured, cpu_seconds, distance_scores
from outsiders import SMALL_CLASSES
from rows import Section, joined, read
from study import Shelf, finished_each, last_rounds, results, seed_scores, standard_error
from variants import variants_table

from fedvlm.config.config import Setup, resolve
from fedvlm.core.records import value_of
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.evaluation.protocols import or_nan
from fedvlm.report.tables import DASH
from fedvlm.system import console
from fedvlm.training.folder import RunFolder
from fedvlm.training.planning import LEAVE_ONE_OUT

DOCUMENT = Path(__file__).parent.parent / "docs" / "moments-tables.md"
MARK = "<!-- results: written by benchmarks/own.py -->"
SEEDS = (201, 202, 203, 204, 205)
GRID = (0.3, 1.0, 3.0)  # times the recipe's lr, to begin with
WIDER = (0.03, 0.1, *GRID, 10.0, 30.0, 100.0)  # where the best is at an end, the next is tried, too
CLOSED = ("zero-shot", "analytic", "tofa", "tip-adapter", "moments", "moments-names")  # nothing to choose a lr for
ONE_ROUND = ("zero-shot", "analytic", "tofa", "tip-adapter", "moments")
GRADIENT = ("fedavg", "fedprox", "local-only", "fedlt", "fedot", "fedclip", "fft-gp", "ditto", "fedadapter", "knn-per")
PROMPTS = ("kgcoop", "prograd", "promptsrc", "plot", "proda", "fedtpg", "fedmgp", "pfedmoap", "pfedprompt", "dp-fpl")
LOW_RANK = ("fedlora", "ffa-lora", "rolora", "la-lora", "fedsa-lora", "flora", "hetlora", "fedex-lora", "fed-sb")
EPSILONS = (1.0, 2.0, 8.0, math.inf)
DOMAINS: dict[str, object] = {"protocol": LEAVE_ONE_OUT, "rounds": 30}
COST_ROUNDS = 50  # in the table costs: FedOT's
SKEWED: dict[str, object] = {"clients": 10, "shots": 8, "rounds": 25}
SMALL: dict[str, object] = {"classes": SMALL_CLASSES, "partition": "disjoint", "clients": 5, "shots": 8, "rounds": 10}
NOVEL: dict[str, object] = {
    "protocol": "base-to-novel",
    "partition": "disjoint",
    "clients": 5,
    "shots": 16,
    "rounds": 20,
}


class Layout(NamedTuple):
    """What the rows of a table have in common, and the methods with a row."""

    data: str
    keys: dict[str, object]
    methods: tuple[str, ...]


LAYOUTS = {
    "pacs": Layout("pacs", DOMAINS, (*ONE_ROUND, *GRADIENT, "promptfl")),
    "pacs-centred": Layout("pacs", DOMAINS | {"centre": "own"}, (*ONE_ROUND, *GRADIENT[:5])),
    "emoji": Layout("emoji", DOMAINS | {"rounds": 20}, (*ONE_ROUND, *GRADIENT[:5])),
    "emoji-centred": Layout("emoji", DOMAINS | {"rounds": 20, "centre": "own"}, (*ONE_ROUND, *GRADIENT[:5])),
    "caltech": Layout("caltech", SKEWED | {"partition": "disjoint"}, (*ONE_ROUND, *GRADIENT, "fedgh", "promptfl")),
    "caltech-dirichlet": Layout(
        "caltech", SKEWED | {"partition": "dirichlet", "alpha": 0.5}, (*ONE_ROUND, *GRADIENT, "fedgh", "promptfl")
    ),
    "novel": Layout("caltech", NOVEL, ("zero-shot", "moments-names", "fedclip", "promptfl", "fedtpg", "fedlora")),
    "outsiders": Layout(
        "caltech",
        SKEWED | {"partition": "disjoint"},
        ("zero-shot", "tofa", "moments", "fedavg", "local-only", "fedot", "promptfl"),
    ),
    "others": Layout(
        "caltech", SMALL, (*ONE_ROUND, "fedavg", "fedgh", "fedakt", "knn-per", "promptfl", *PROMPTS, *LOW_RANK)
    ),
}
OTHERS = "caltech101, 20 classes: rounds=10, shots=8, partition=disjoint, clients=5 (benchmarks/own.py --tables others)"
NEEDS = {"variants": ("pacs",), "dp": ("pacs",), "costs": ("pacs",), "outsiders": ("caltech", "outsiders")}
TABLES = ("variants", *LAYOUTS, "dp", "costs")
Lines = list[list[str]]


class Row(NamedTuple):
    method: str
    runs: list[RunFolder]
    setup: Setup


class Study:
    def __init__(self, args: argparse.Namespace):
        self.args, self.pools = args, Pools()
        self.missing, self.at_edge = list[str](), list[str]()  # methods: not run; whose lr is the last that was tried
        self.places = {"pacs": args.pacs, "emoji": "emoji", "caltech": args.caltech, "outsiders": args.outsiders}
        self.measured = Measured(Path(args.out, "measured"), args.read)

    def has_data(self, table: str) -> bool:
        names = NEEDS.get(table) or (LAYOUTS[table].data,)
        return all(self.places[name] for name in names)

    def keys(self, table: str) -> dict[str, object]:
        layout = LAYOUTS[table]
        keys = layout.keys | {"data": self.places[layout.data], "out": str(Path(self.args.out, table))}
        keys |= {"outsiders": self.places["outsiders"]} if table == "outsiders" else {}
        return keys | ({"rounds": self.args.rounds} if self.args.rounds else {})

    def setup(self, method: str, keys: Mapping[str, object], seeds: Sequence[int], **more: object) -> Setup:
        given = {k: v for k, v in keys.items() if k != "rounds" or method not in CLOSED} | more
        rounds = int(str(given.get("rounds", 1)))
        return resolve(method, {**given, "evaluate_every": max(1, rounds), "seeds": tuple(seeds)})

    def resolves(self, method: str, keys: Mapping[str, object]) -> bool:
        try:
            self.setup(method, keys, self.args.seeds[:1])
        except FedvlmError as error:
            console.note(f"{method}: {error}")
            return False
        return True

    def finished(self, setups: dict[Any, Setup]) -> dict[Any, list[RunFolder]]:
        """Of the setups whose runs are all there."""
        if not setups:
            return {}
        if self.args.read:
            return Shelf(Path(next(iter(setups.values())).config.out)).of(setups)
        return finished_each(setups, self.args.jobs, self.pools)

    def rows(self, table: str) -> list[Row]:
        """The lr of each method that trains, then all seeds."""
        keys, seeds = self.keys(table), self.args.seeds[: self.args.others_seeds if table == "others" else None]
        wanted = [m for m in LAYOUTS[table].methods if not self.args.methods or m in self.args.methods]
        methods = [m for m in wanted if self.resolves(m, keys)]
        rates = {m: self.setup(m, keys, seeds[:1]).local.lr for m in methods if m not in CLOSED}
        best = self.chosen(keys, rates, seeds[:1])
        final = {m: self.setup(m, keys, seeds) for m in methods if m in CLOSED}
        final |= {m: self.setup(m, keys, seeds, lr=rates[m] * f) for m, f in best.items()}
        found = self.finished(final)
        self.missing += [m for m in wanted if m not in found]
        return [Row(m, found[m], final[m]) for m in methods if m in found]

    def chosen(self, keys: Mapping[str, object], rates: Mapping[str, float], seed: Sequence[int]) -> dict[str, float]:
        """The factor of each method's lr that validation chooses. Where it is the largest or the smallest that was tried,
        the next is tried, too: the grid of every method goes on until its best lies inside."""
        scores: dict[str, dict[float, float]] = {m: {} for m in rates}
        todo = [(m, f) for m in rates for f in GRID]
        while todo:
            tried = self.finished({(m, f): self.setup(m, keys, seed, lr=rates[m] * f) for m, f in todo})
            for (m, f), runs in tried.items():
                scores[m][f] = validation(runs, "C")
            todo = [(m, f) for m in rates if (f := beyond(scores[m])) and (m, f) not in todo]
        self.at_edge += [m for m in rates if beyond(scores[m])]  # they diverged there, or --read has no more
        return {m: max(s, key=lambda f: s[f]) for m, s in scores.items() if s.keys() >= set(GRID)}


def beyond(scores: Mapping[float, float]) -> float:
    """The factor next to the best one, where that is the last on its side; 0: there is none."""
    if not scores.keys() >= set(GRID):
        return 0.0
    best, at = max(scores, key=lambda f: scores[f]), sorted(scores)
    step = 1 if best == at[-1] else -1 if best == at[0] else 0
    place = WIDER.index(best) + step
    return WIDER[place] if step and 0 <= place < len(WIDER) else 0.0


def cell(values: Sequence[float | None]) -> str:
    known = np.array([100 * v for v in values if v is not None])
    if not len(known) or len(known) < len(values):
        return DASH
    return f"{known.mean():.2f}" + (f" ± {standard_error(known):.2f}" if len(known) > 1 else "")


def sent(row: Row) -> list[str]:
    """Rounds, and MB in both directions."""
    found = results(row.runs)
    return [str(found[0].last["round"]), f"{np.mean([(r.bytes_up + r.bytes_down) / 1e6 for r in found]):.2f}"]


def domains_table(study: Study, table: str) -> tuple[list[str], Lines]:
    lines = []
    for row in study.rows(table):
        scores = [cell(list(seed_scores(row.runs, m).values())) for m in ("G", "P", "C")]
        lines.append([row.method, *scores, *sent(row)])
    return ["method", "G", "P", "C", "rounds", "MB"], lines


def clients_table(study: Study, table: str) -> tuple[list[str], Lines]:
    """Of a federation without domains: personal and shared models on the clients' own test images."""
    lines = []
    for row in study.rows(table):
        views = [[last.get(v, {}).get("test") for last in last_rounds(row.runs)] for v in ("personal", "shared")]  # type: ignore[attr-defined]
        lines.append([row.method, *map(cell, views), *sent(row)])
    return ["method", "personal", "shared", "rounds", "MB"], lines


def novel_table(study: Study, table: str) -> tuple[list[str], Lines]:
    """Personal models where a method has them, then the shared model."""
    measures, of_shared = ("local", "base", "novel", "hm"), ("base", "novel", "hm")
    lines = []
    for row in study.rows(table):
        last = last_rounds(row.runs)
        scores = [[value_of(r, m) for r in last] for m in measures]
        scores += [[r["base_to_novel"].get("shared", {}).get(m) for r in last] for m in of_shared]
        lines.append([row.method, *map(cell, scores), *sent(row)])
    return ["method", *measures, *(f"shared {m}" for m in of_shared), "rounds", "MB"], lines


def outsiders_table(study: Study, table: str) -> tuple[list[str], Lines]:
    lines = []
    for row in study.rows(table):
        found = [last["detection"]["personal"] for last in last_rounds(row.runs)]
        names = ("auroc", "fpr95", "energy.auroc", "energy.fpr95")
        accuracy = cell([last["personal"]["test"] for last in last_rounds(row.runs)])
        lines.append([row.method, accuracy, *(cell([f[n] for f in found]) for n in names)])
        if row.method == "moments":
            measures = {r.folder.name: partial(distance_scores, study.pools, row.setup, r) for r in row.runs}
            distances = [study.measured(f"distance-{name}", measure) for name, measure in measures.items()]
            cells = [cell([d.get(n) for d in distances]) for n in ("auroc", "fpr95")]
            lines.append(["moments, by Mahalanobis distance", accuracy, *cells, DASH, DASH])
    return ["method", "accuracy", "AUROC, MCM", "FPR95", "AUROC, energy", "FPR95, energy"], lines


def private_table(study: Study, table: str) -> tuple[list[str], Lines]:
    """The shared head at the level of examples, in one round and by DP-SGD; both with the strength or lr that validation
    chooses, which is not accounted."""
    keys = study.keys("pacs") | {"out": str(Path(study.args.out, table))}
    first, tries = study.args.seeds[:1], dict[tuple[float, str, float], Setup]()
    for epsilon in EPSILONS:
        dp: dict[str, object] = {} if math.isinf(epsilon) else {"dp": "example", "epsilon": epsilon}
        for x in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0):
            more = {"balance": False, "averaging": 0, "texts": (4.0,), "strengths": (x,)} | dp
            tries[epsilon, "moments", x] = study.setup("moments", keys, first, **more)
        for x in (0.01, 0.03, 0.1, 0.3):
            more = {"adapter": "affine", "lr": x, "rounds": study.args.dp_rounds} | dp
            tries[epsilon, "fedavg", x] = study.setup("fedavg", keys, first, **more)
    tried = study.finished(tries)
    chosen: dict[tuple[float, str], tuple[float, float]] = {}
    for (epsilon, method, x), runs in tried.items():
        score = float(np.mean([or_nan(r["shared"]["val"]) for r in last_rounds(runs)]))
        chosen[epsilon, method] = max(chosen.get((epsilon, method), (-1.0, 0.0)), (score, x))
    final = {k: tries[*k, x].with_(seeds=tuple(study.args.seeds)) for k, (_, x) in chosen.items()}
    lines = []
    for (epsilon, method), runs in study.finished(final).items():
        shared = [r["shared"]["test"] for r in last_rounds(runs)]
        scores = [cell(list(seed_scores(runs, "G").values())), cell(shared)]
        word = "strength" if method == "moments" else "lr"
        about = [str(results(runs)[0].last["round"]), f"{word} {chosen[epsilon, method][1]:g}"]
        lines.append([f"{epsilon:g}".replace("inf", "∞"), method, *scores, *about])
    return ["ε", "method", "G", "shared model on clients", "rounds", "chosen"], lines


def costs_table(study: Study, table: str) -> tuple[list[str], Lines]:
    """Of one run on PACS, alone in this process: training, without encoding, scoring and records."""
    keys, found = (
        study.keys("pacs") | {"device": "cpu", "rounds": study.args.rounds or COST_ROUNDS},
        dict[str, dict[str, Any]](),
    )
    for method in LAYOUTS["pacs"].methods:
        if method != "zero-shot" and (not study.args.methods or method in study.args.methods):
            setup = study.setup(method, keys, study.args.seeds[:1])
            found[method] = study.measured(f"cost-{method}", partial(cpu_seconds, study.pools, setup))
    known = {m: f for m, f in found.items() if f}
    study.missing += [m for m in found if m not in known]
    ours = known.get("moments", {}).get("seconds", math.nan)
    lines = [
        [m, str(f["rounds"]), f"{f['mb']:.2f}", f"{f['seconds']:.2f}", f"{f['seconds'] / ours:.2g}"]
        for m, f in sorted(known.items(), key=lambda item: item[1]["seconds"])
    ]
    return ["method", "rounds", "MB", "CPU-seconds", "times moments'"], lines


MAKERS = {"variants": variants_table, "dp": private_table, "costs": costs_table, "outsiders": outsiders_table}
MAKERS |= {t: domains_table for t in LAYOUTS if LAYOUTS[t].keys.get("protocol") == LEAVE_ONE_OUT}
MAKERS |= {"novel": novel_table} | dict.fromkeys(("caltech", "caltech-dirichlet", "others"), clients_table)


def section(study: Study, table: str) -> Section | None:
    """A table, which is also printed; None where nothing was run."""
    study.missing.clear()
    study.at_edge.clear()
    print(f"\n{table}: begun", flush=True)
    head, lines = MAKERS[table](study, table)
    console.rows(head, lines)
    seeds = study.args.seeds[: study.args.others_seeds if table == "others" else None]
    rule = "" if table in ("variants", "costs") else f"seeds {', '.join(map(str, seeds))}, ± standard error over them"
    found = Section(head, lines, str(date.today()), rule, tuple(study.at_edge), tuple(study.missing))
    print(f"{table}: {len(lines)} rows; {found.text().splitlines()[-1]}", flush=True)
    return found if lines else None


def with_kept_rows(found: Section, table: str, before: str) -> str:
    """The text of a table, with the rows of `before`, its text until now, that were not run again. Not of dp, costs and
    variants: their rows are compared with each other, and belong to one command and one machine."""
    return (joined(found, read(before), LAYOUTS[table].methods) if table in LAYOUTS else found).text()


def tables_of(text: str) -> dict[str, str]:
    """The tables of the document, by name."""
    return dict(part.split("\n", 1) for part in text.partition(MARK)[2].split("\n### ")[1:])


def written(text: str, sections: Mapping[str, str]) -> str:
    """The document with these tables in place of those of the same name, all in the order of TABLES."""
    found = {name: body.strip("\n") for name, body in (tables_of(text) | dict(sections)).items()}
    parts = [f"### {name}\n\n{found[name]}" for name in TABLES if name in found]
    return "\n\n".join([text.partition(MARK)[0] + MARK, *parts]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pacs", default="", help="a folder of domain/class/image, or its embeddings")
    parser.add_argument("--caltech", default="")
    parser.add_argument("--outsiders", default="", help="a folder of images of no class, for the table of that name")
    parser.add_argument("--tables", nargs="*", default=TABLES, choices=TABLES)
    parser.add_argument("--methods", nargs="*", default=[], help="of each table; default: all that it has")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--others-seeds", type=int, default=3, help="so many of the seeds in the table others")
    parser.add_argument("--rounds", type=int, default=0, help="of methods that train; 0: as the table says")
    parser.add_argument("--dp-rounds", type=int, default=10, help="of DP training, in the table dp")
    parser.add_argument("--jobs", type=int, default=0, help="runs at once; 0: one per core")
    parser.add_argument("--out", default="runs/own")
    parser.add_argument("--read", action="store_true", help="run nothing: tables of what --out has")
    parser.add_argument("--write", action="store_true", help="into docs/moments-tables.md and docs/results.md")
    args = parser.parse_args()
    study = Study(args)
    for table in args.tables:
        if not study.has_data(table):
            print(f"{table}: its data were not given")
            continue
        found = section(study, table)
        if args.write and found:
            write(table, found, join=not args.rounds)


def write(table: str, found: Section, join: bool) -> None:
    """Into its document; join: with the rows of methods that were not run again."""
    path = results_document.DOCUMENT if table == "others" else DOCUMENT
    text = path.read_text(encoding="utf-8")
    name = OTHERS if table == "others" else table
    before = (results_document.sections if table == "others" else tables_of)(text).get(name, "")
    made = {name: with_kept_rows(found, table, before if join else "")}
    path.write_text((results_document.written if table == "others" else written)(text, made), encoding="utf-8")


if __name__ == "__main__":
    main()
