"""Every method on every data set, on one page and in one CSV; what was not run says so.

    python benchmarks/leaderboard.py --data ../shared/data --only emoji --minutes 20
    python benchmarks/leaderboard.py --only pacs caltech101-dirichlet --methods moments mine.yaml
    python benchmarks/leaderboard.py --methods moments "moments solver=ridge priors=0" --against moments
    python benchmarks/leaderboard.py --read --merge other/leaderboard        # records of another machine

Of each data set there is one protocol (PROTOCOLS), the same seeds for all methods, and one budget for tuning: a method that
trains gets its recipe's lr × 0.3, 1 or 3, by the mean accuracy of shared and personal models on validation images of a seed
that the table does not have; rounds are those of its recipe, at most --rounds. What closed forms choose they choose on
validation images, too. A row is a method or a recipe of your own, with further settings behind it.

G: the shared model on domains that nobody trained on; S: the shared model on clients that train; P: their own models; C:
G and P together; worst: P on the worst tenth of clients. Each with its standard error over seeds.

--out has a file for each method, data set and seed, written when it is done: a command that was stopped goes on, several may
fill one folder, and folders of several machines are merged by copying (--merge). --minutes: begins nothing new after that.
--against ROW prints each row's differences to that one, paired by seed, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from choose import digits
from claim_runs import validation
from study import standard_error

import fedvlm.report
from fedvlm.api import chosen, methods
from fedvlm.config.config import Setup
from fedvlm.config.families import IN_ONE_ROUND, family
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.report.gains import gain
from fedvlm.report.tables import DASH, costs, fairness_columns, scores
from fedvlm.system.table import Table
from fedvlm.training import train
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.planning import LEAVE_ONE_OUT, single_runs

DOMAINS: dict[str, object] = {"protocol": LEAVE_ONE_OUT}
SKEWED: dict[str, object] = {"clients": 10, "shots": 8}
DIRICHLET: dict[str, object] = {"partition": "dirichlet", "alpha": 0.5}
PROTOCOLS: dict[str, tuple[str, dict[str, object]]] = {
    "emoji": ("emoji", DOMAINS),
    "pacs": ("pacs", DOMAINS),
    "pacs-centred": ("pacs", DOMAINS | {"centre": "own"}),
    "digits": ("digits", DOMAINS),  # scikit-learn's, as three cameras (benchmarks/choose.py)
    "textures": ("textures", DIRICHLET | {"clients": 5}),
    "caltech101-dirichlet": ("caltech101", SKEWED | DIRICHLET),
    "caltech101-disjoint": ("caltech101", SKEWED | {"partition": "disjoint"}),
}
SEEDS = (601, 602, 603)
TUNING = 600  # the seed whose validation images choose an lr
GRID = (1.0, 0.3, 3.0)  # times the recipe's lr
MEASURES = ("G", "S", "P", "C", "worst")
COSTS = ("rounds", "mb", "seconds")
NOT_RUN = "not run"
Record = dict[str, float | None]


class Board:
    def __init__(self, args: argparse.Namespace):
        self.args, self.pools, self.ends = args, Pools(), time.monotonic() + 60 * args.minutes

    def setup(self, row: str, protocol: str, **more: object) -> Setup:
        method, *words = row.split()
        data, keys = PROTOCOLS[protocol]
        place = data if data == "emoji" else str(self.args.data / data)
        given = keys | {"data": str(digits(self.args.out)) if data == "digits" else place} | more
        found = chosen(method, given | dict(word.split("=", 1) for word in words))
        return found.with_(rounds=min(found.config.rounds, self.args.rounds), evaluate_every=found.config.rounds)

    def path(self, row: str, protocol: str, name: object) -> Path:
        return Path(self.args.out, protocol, row.replace("/", "_"), f"{name}.json")

    def runs(self, setup: Setup, folder: str) -> list[RunFolder]:
        pool = self.pools.encode(setup)
        planned = [PlannedRun(one, pool, Path(folder, str(k))) for k, one in enumerate(single_runs(setup, pool))]
        return [train.train(one) for one in planned]

    def rate(self, row: str, protocol: str) -> dict[str, object]:
        """The lr that validation chooses, as a setting; none where there is nothing to choose."""
        setup = self.setup(row, protocol)
        if is_closed(setup):
            return {}
        path = self.path(row, protocol, "lr")
        if not path.exists():
            tried = {}
            for factor in GRID:
                with tempfile.TemporaryDirectory() as folder:
                    one = self.setup(row, protocol, seed=TUNING, lr=factor * setup.local.lr)
                    tried[factor] = validation(self.runs(one, folder), "C")
            best = max(tried, key=lambda f: tried[f])
            write(path, {"lr": best * setup.local.lr, "factor": best, **{f"val × {f:g}": v for f, v in tried.items()}})
        return {"lr": json.loads(path.read_text())["lr"]}

    def play(self, row: str, protocol: str, seed: int) -> None:
        """One cell; nothing where it is there."""
        path = self.path(row, protocol, seed)
        if path.exists():
            return
        with tempfile.TemporaryDirectory() as folder:
            records = [
                r.record for r in self.runs(self.setup(row, protocol, seed=seed, **self.rate(row, protocol)), folder)
            ]
        found = scores(records, "last") | costs(records) | {"worst": fairness_columns(records, "last")["worst"]}
        write(path, {k: found[k] for k in (*MEASURES, *COSTS)})

    def fill(self) -> None:
        """Seed by seed, so that a table that is not complete has all methods with few seeds."""
        refused: dict[tuple[str, str], str] = {}
        for seed, protocol, row in product(self.args.seeds, self.args.only, self.args.methods):
            if time.monotonic() > self.ends:
                return
            if (row, protocol) not in refused:
                try:
                    self.play(row, protocol, seed)
                except FedvlmError as error:
                    refused[row, protocol] = str(error)
                    print(f"{protocol}, {row}: {error}", flush=True)

    def records(self, row: str, protocol: str) -> dict[int, Record]:
        paths = {seed: self.path(row, protocol, seed) for seed in self.args.seeds}
        return {seed: json.loads(path.read_text()) for seed, path in paths.items() if path.exists()}


def is_closed(setup: Setup) -> bool:
    """Whether no lr is used."""
    merge = setup.parts["merge"].name
    return merge in IN_ONE_ROUND or setup.method.name in ("zero-shot", "tip-adapter")


def write(path: Path, record: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps(record))
    path.with_suffix(".part").replace(path)


def cell(records: Mapping[int, Record], measure: str) -> str:
    values = np.array([v for r in records.values() if (v := r[measure]) is not None])
    if not len(values):
        return DASH
    error = f" ± {standard_error(values):.2f}" if len(values) > 1 and measure in MEASURES else ""
    return f"{values.mean():.2f}{error}"


def table(board: Board) -> tuple[Table, list[list[object]]]:
    """The page's rows, and the CSV's: one for each seed."""
    args, rows, lines = board.args, list[dict[str, str]](), list[list[object]]()
    done = 0
    for protocol, row in product(args.only, args.methods):
        records = board.records(row, protocol)
        done += len(records)
        found = {m: cell(records, m) for m in (*MEASURES, *COSTS)} if records else {"G": NOT_RUN}
        rows.append({"method": row, "data": protocol, "seeds": str(len(records))} | found)
        lines += [[row, protocol, seed, *(r[m] for m in (*MEASURES, *COSTS))] for seed, r in records.items()]
    counts = [len(args.methods), len(args.only), len(args.seeds)]
    grid = ", ".join(f"{g:g}" for g in GRID)
    head = "{} of {} cells were run: {} methods × {} data sets × {} seeds.".format(done, np.prod(counts), *counts)
    notes = [
        "% on test images, last round, mean ± standard error over seeds; mb: sent in both directions; seconds: of a run",
        f"lr: the recipe's × {grid}, by validation of seed {TUNING}; rounds: at most {args.rounds}",
    ]
    return Table(["method", "data", "seeds", *MEASURES, *COSTS], rows, notes, head=[head]), lines


def page(found: Table) -> str:
    home = Path(fedvlm.report.__file__).parent
    style, script = ((home / f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    body = found._repr_html_().replace("<table>", '<div><table class="sortable">').replace("</table>", "</table></div>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Leaderboard</title><style>{style}</style>'
        f"<body><main><h1>Leaderboard</h1>{body}</main><script>{script}</script></body></html>\n"
    )


def differences(board: Board, base: str) -> list[str]:
    """Of each row to `base`, by data set and measure, over the seeds that both have."""
    lines = ["| data | row | " + " | ".join(MEASURES) + " |", "| --- " * (2 + len(MEASURES)) + "|"]
    for protocol, row in product(board.args.only, board.args.methods):
        theirs, ours = board.records(base, protocol), board.records(row, protocol)
        if row == base or not ours:
            continue
        cells = []
        for m in MEASURES:
            both = ({s: v for s, r in side.items() if (v := r[m]) is not None} for side in (ours, theirs))
            found = gain(*both)
            low, high = found.interval if found else (0.0, 0.0)
            cells.append(f"{found.mean:+.2f} ({low:+.2f} to {high:+.2f})" if found else DASH)
        lines.append(f"| {protocol} | {row} | " + " | ".join(cells) + " |")
    return lines


def heads_and_one_round() -> list[str]:
    """The methods that train nothing but a head, or nothing at all; the rest by name (--methods)."""
    found = []
    for name in methods():
        parts = chosen(name, {}).parts
        if family(name, parts["adapter"].name, parts["merge"].name) in ("one round", "heads", "references"):
            found.append(name)
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--only", nargs="*", default=list(PROTOCOLS), choices=list(PROTOCOLS), metavar="DATA")
    parser.add_argument("--methods", nargs="*", default=[], help="default: heads, one-round methods and references")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--against", default="", metavar="ROW")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="folders of records to take over")
    parser.add_argument("--read", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/leaderboard"))
    args = parser.parse_args(words)
    args.methods = args.methods or heads_and_one_round()
    board = Board(args)
    for other in args.merge:
        for path in other.glob("*/*/*.json"):
            if not (mine := args.out / path.relative_to(other)).exists():
                mine.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, mine)
    if not args.read:
        board.fill()
    found, lines = table(board)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "leaderboard.html").write_text(page(found), encoding="utf-8")
    with (args.out / "leaderboard.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["method", "data", "seed", *MEASURES, *COSTS], *lines])
    print(found)
    if args.against:
        print("\n".join(differences(board, args.against)))


if __name__ == "__main__":
    main()
