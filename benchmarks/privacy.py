"""What differential privacy costs: accuracy against ε, at the level of clients and of examples.

    python benchmarks/privacy.py --data ../shared/data/pacs --methods fedavg --write
    python benchmarks/privacy.py --data ../shared/data/pacs --methods promptfl fedlora --seeds 50 --epsilons 8 1

Clients: domain-dirichlet, 50 in each domain, each in a round with probability 1/2 (Poisson); the clipping norm follows the
median. Examples: domain-iid, 5 clients in each domain; the clipping norm is chosen on validation from one grid for all
methods at the first ε (first seed). lr is chosen on validation from one grid (the recipe's times RATES) without privacy
(first seed). Everything else is the recipe's. Runs are kept in --out: those that are there are not
repeated. --write puts the table of all runs in --out into docs/privacy.md, and the figure beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from study import last_rounds, mean_std, run_each

from fedvlm.config.config import Setup, resolve
from fedvlm.core.records import RunRecord
from fedvlm.data.pool import Pools
from fedvlm.system import console
from fedvlm.training.folder import RunFolder, find_runs

METHODS = ("fedavg", "fedot", "promptfl", "fedlora")
EPSILONS = (16.0, 8.0, 4.0, 2.0, 1.0)
CLIPS = (0.3, 1.0, 3.0, 10.0)
RATES = (1.0, 3.0, 10.0)  # times the recipe's lr: few clients of many train in a round, and few rounds
SEEDS = (50, 77, 98)
WITHOUT = 0.0  # in place of an ε: no privacy
LAYOUTS: dict[str, dict[str, object]] = {
    "client": {
        "partition": "domain-dirichlet",
        "clients": 50,
        "participation": 0.5,
        "sampling": "poisson",
    },
    "example": {"partition": "domain-iid", "clients": 5},
}
DOCUMENT = Path(__file__).parent.parent / "docs" / "privacy.md"
BEGIN, END = "<!-- benchmarks/privacy.py: begin -->\n", "<!-- benchmarks/privacy.py: end -->"


class Row(NamedTuple):
    level: str
    method: str
    epsilon: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="emoji")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--levels", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--epsilons", nargs="*", type=float, default=EPSILONS)
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", default="runs/privacy")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    pools = Pools()
    for level in args.levels:
        for method in args.methods:
            one = chosen_clip(args, level, method, pools)
            study = {e: one(e, tuple(args.seeds)) for e in (WITHOUT, *args.epsilons)}
            run_each(study, args.jobs, pools)
    found = rows(find_runs([args.out]))
    epsilons = sorted({row.epsilon for row in found if row.epsilon}, reverse=True)
    console.rows(["level", "method", *map(label, (WITHOUT, *epsilons))], list(lines(found, epsilons)))
    if args.write:
        write(found, epsilons)


def chosen_clip(args: argparse.Namespace, level: str, method: str, pools: Pools) -> Build:
    """A function from (ε, seeds) to a setup, with the clipping norm that is best on validation."""
    first, rate = (args.seeds[0],), resolve(method, {}).local.lr
    plain = best_of({rate * f: Build(args, level, method, rate * f)(WITHOUT, first) for f in RATES}, args, pools)
    if level == "client":
        return Build(args, level, method, plain, {"clip_quantile": 0.5})
    tries = {c: Build(args, level, method, plain, {"clip_norm": c}) for c in CLIPS}
    best = best_of({c: build(args.epsilons[0], first) for c, build in tries.items()}, args, pools)
    return tries[best]


def best_of(tries: dict[float, Setup], args: argparse.Namespace, pools: Pools) -> float:
    """On validation."""
    runs = run_each(tries, args.jobs, pools)
    return max(tries, key=lambda value: last_rounds(runs[value])[0]["personal"]["val"] or 0.0)


class Build(NamedTuple):
    args: argparse.Namespace
    level: str
    method: str
    lr: float
    clip: Mapping[str, float] = {}

    def __call__(self, epsilon: float, seeds: tuple[int, ...]) -> Setup:
        args = self.args
        private = {"dp": self.level, "epsilon": epsilon, **self.clip} if epsilon else {}
        given = {"data": args.data, "rounds": args.rounds, "evaluate_every": args.rounds, "seeds": seeds, "gaps": False}
        given["lr"] = self.lr
        out = {"out": str(Path(args.out) / self.level)}
        return resolve(self.method, given | LAYOUTS[self.level] | private | out)


def rows(runs: list[RunFolder]) -> dict[Row, list[RunRecord]]:
    """Finished runs by row; of the clipping norms and lr that were tried, those that most seeds have."""
    found: dict[Row, dict[object, list[RunRecord]]] = {}
    for run in runs:
        record = run.record
        if record.result is not None:
            row = Row(run.folder.parent.name, record.method.name, float(str(record.config["epsilon"])))
            chosen = record.config["clip_norm"], record.local.settings["lr"]
            found.setdefault(row, {}).setdefault(chosen, []).append(record)
    return {row: max(tried.values(), key=lambda r: (len(r), validation(r))) for row, tried in found.items()}


def validation(records: list[RunRecord]) -> float:
    return float(np.mean([r.finished.last["personal"]["val"] or 0.0 for r in records]))


def accuracies(records: list[RunRecord]) -> list[float]:
    return [r.finished.last["personal"]["test"] or 0.0 for r in records]


def lines(found: dict[Row, list[RunRecord]], epsilons: list[float]):
    for level, method in dict.fromkeys((row.level, row.method) for row in found):
        cells = [found.get(Row(level, method, e), []) for e in (WITHOUT, *epsilons)]
        yield [level, method, *(mean_std(accuracies(c), 100) if c else "–" for c in cells)]


def label(epsilon: float) -> str:
    return f"ε = {epsilon:g}" if epsilon else "without"


def write(found: dict[Row, list[RunRecord]], epsilons: list[float]) -> None:
    head = ["level", "method", *map(label, (WITHOUT, *epsilons))]
    table = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *lines(found, epsilons))]
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    picture = draw(found)
    body = "\n".join([*table, "", caption(found), "", f"![accuracy against ε]({picture.name})", ""])
    DOCUMENT.write_text(f"{before}{BEGIN}{body}{END}{after}", encoding="utf-8")


def caption(found: dict[Row, list[RunRecord]]) -> str:
    records = [r for part in found.values() for r in part]
    one, deltas = records[0], sorted({f"{r.finished.privacy.delta:.2g}" for r in records if r.finished.privacy})
    seeds = {row: len(part) for row, part in found.items()}
    fewer = sorted({f"{row.method} ({row.level})" for row, n in seeds.items() if n < len(SEEDS)})
    note = f"; fewer than {len(SEEDS)} seeds: {', '.join(fewer)}" if fewer else ""
    return (
        f"Test accuracy of personal models in %, mean over clients, ± std over {max(seeds.values())} seeds; "
        f"{one.data.name}, {one.backbone.name}, {one.rounds} rounds, δ = {', '.join(deltas)}; "
        f"lr of every method from one grid, on validation without privacy{note}."
    )


def draw(found: dict[Row, list[RunRecord]]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    levels = list(dict.fromkeys(row.level for row in found))
    figure, axes = plt.subplots(1, len(levels), figsize=(4.5 * len(levels), 3.2), sharey=True, squeeze=False)
    for axis, level in zip(axes[0], levels, strict=True):
        for method in dict.fromkeys(row.method for row in found if row.level == level):
            points = sorted(
                (r.epsilon, accuracies(v)) for r, v in found.items() if r[:2] == (level, method) and r.epsilon
            )
            values = [100 * float(np.mean(v)) for _, v in points]
            (curve,) = axis.plot([e for e, _ in points], values, "o-", label=method)
            if without := found.get(Row(level, method, WITHOUT)):
                axis.axhline(100 * float(np.mean(accuracies(without))), ls=":", c=curve.get_color())
        axis.set_xscale("log", base=2)
        axis.set_xticks(
            sorted({r.epsilon for r in found if r.epsilon}),
            [f"{e:g}" for e in sorted({r.epsilon for r in found if r.epsilon})],
        )
        axis.set(xlabel="ε", title=f"{level} level")
    axes[0][0].set_ylabel("accuracy in %")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    path = DOCUMENT.with_suffix(".png")
    figure.savefig(path, dpi=110)
    return path


if __name__ == "__main__":
    main()
