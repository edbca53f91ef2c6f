"""Sweeps: `lr=0.001,0.01,0.1` in a bench tries every value, and the table shows the one chosen on validation.

Every method gets the same grid, on the first seed, with all held-out targets. A setting is chosen for each method by the
criterion that also chooses rounds (`evaluate.views.selection`): the validation accuracy of the clients that train, mean
of shared and personal models, last round. Test images have no part in it. The chosen setting then runs on all seeds.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fedvlm import api
from fedvlm.config import catalogue
from fedvlm.config.config import Setup, keys_of_method
from fedvlm.config.keys import Key
from fedvlm.core.records import Value
from fedvlm.errors import FedvlmError
from fedvlm.evaluation.views import selection
from fedvlm.report.tables import format_value
from fedvlm.studies.comparison import bench_folder, trains_nothing
from fedvlm.system import console
from fedvlm.training.folder import SWEEP, RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.planning import single_runs, unused_keys
from fedvlm.training.processes import RunsFailed

if TYPE_CHECKING:
    from fedvlm.data.pool import Pools

CRITERION = "validation accuracy of the clients that train, mean of shared and personal models, last round"

Point = dict[str, Value]  # a setting: key → value


@dataclass(frozen=True)
class Search:
    """What is tried: the values, or the interval, of each key."""

    axes: dict[str, list[Value]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.axes)

    def of(self, keys: Mapping[str, Key]) -> Search:
        """The axes of a method that has these keys."""
        return Search({k: v for k, v in self.axes.items() if k in keys})

    def __str__(self) -> str:
        return " ".join(f"{k}={','.join(map(format_value, v))}" for k, v in self.axes.items())


def separated(methods: Sequence[str], given: Mapping[str, object]) -> tuple[dict[str, object], Search]:
    """What holds for all runs, and what is swept: keys with several values that take one."""
    fixed = dict(given)
    axes: dict[str, list[Value]] = {}
    for name, value in given.items():
        known = [key for m in methods if (key := swept_keys(m, given).get(name))]
        if not several(value) or (known and known[0].length):
            continue
        if not known:
            check_not_swept(name, value)
            continue
        del fixed[name]
        axes[name] = values(known[0], value)
    return fixed, Search(axes)


def check_not_swept(name: str, value: object) -> None:
    for key in catalogue.load().run:
        if key.name == name and not key.length and (key.type != "str" or key.choices):
            raise FedvlmError(
                f"{name}={value}: a sweep chooses on validation, and {name}= changes the task or the budget; start a bench "
                "for each value"
            )


def swept_keys(method: str, given: Mapping[str, object]) -> dict[str, Key]:
    """The keys of a method that may be swept, by the names that a command line may give them."""
    homes = keys_of_method(method, given)
    found = {k.name: k for k in homes.pop("run") if "tuned" in k.traits}
    for home, keys in homes.items():
        found |= {f"{home}.{k.name}": k for k in keys} | {k.name: k for k in keys}
    return found


def several(value: object) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, str) and "," in value)


def values(key: Key, given: object) -> list[Value]:
    items = given.split(",") if isinstance(given, str) else list(given)  # type: ignore[call-overload]
    found = list(dict.fromkeys(key.coerce(i.strip() if isinstance(i, str) else i) for i in items))
    if len(found) < 2:
        raise FedvlmError(f"{key.name}={given}: a sweep needs at least two values")
    return list(found)


@dataclass
class Choice:
    """What was chosen for a method, and what it was chosen from."""

    setup: Setup  # with the chosen values
    point: Point
    score: float  # on validation
    runs: list[RunFolder]


class Sweep:
    """A search over the settings of several methods."""

    def __init__(self, setups: Sequence[Setup], search: Search, pools: Pools):
        self.setups, self.search, self.pools = setups, search, pools

    def chosen(self) -> tuple[list[Setup], list[str]]:
        """The setups with the values that validation chose, and the notes for their table."""
        setups, search = self.setups, self.search
        own = [Search() if trains_nothing(s) else search.of(keys_to_sweep(s)) for s in setups]
        if not any(own):
            raise FedvlmError(f"none of these methods has {', '.join(f'{k}=' for k in search.axes)}")
        for setup, one in zip(setups, own, strict=True):
            lacking = [f"{k}=" for k in search.axes if k not in one.axes]
            if lacking and not trains_nothing(setup):
                console.warn(
                    f"{setup.method.label} has no {', '.join(lacking)}: it is left out of that part of the sweep"
                )
        console.note(f"sweep of {search}, on the first seed")
        pairs = [(s, o) for s, o in zip(setups, own, strict=True) if o]
        found = dict(zip((id(s) for s, _ in pairs), self.by_grid(pairs), strict=True))
        for choice in found.values():
            self.keep(choice)
        return [found[id(s)].setup if id(s) in found else s for s in setups], notes(setups, own, found, search)

    def by_grid(self, pairs: list[tuple[Setup, Search]]) -> list[Choice]:
        """All points of all methods in one queue; of equal scores the first in the grid is chosen."""
        grids = [points(search) for _, search in pairs]
        tries = [varied(setup, point) for (setup, _), grid in zip(pairs, grids, strict=True) for point in grid]
        runs = iter(self.tried(tries))
        out = []
        for (setup, _), grid in zip(pairs, grids, strict=True):
            found = [Choice(setup, point, score(done), done) for point, done in ((p, next(runs)) for p in grid)]
            out.append(best(setup, found))
        return out

    def tried(self, setups: list[Setup]) -> list[list[RunFolder]]:
        """The finished runs of each setup on its first seed; a run that failed is missing."""
        planned = []
        for setup in setups:
            one = setup.with_(seeds=(first_seed(setup),), out=str(bench_folder(setup) / SWEEP))
            planned.append(self.planned(one))
        try:
            finished = api.execute([p for part in planned for p in part], setups[0].config.jobs).files
        except RunsFailed as error:
            finished = error.finished
            console.warn(f"in the sweep {error}")
        done = {run.folder: run for run in finished}
        return [[done[p.folder] for p in part if p.folder in done] for part in planned]

    def planned(self, setup: Setup) -> list[PlannedRun]:
        pool = self.pools.encode(setup)
        return [PlannedRun(single, pool) for single in single_runs(setup, pool)]

    def keep(self, choice: Choice) -> None:
        """Copies the runs of the chosen setting to where those of all seeds go, so that they are recognised there."""
        places = {p.folder.name for p in self.planned(choice.setup)}
        for run in choice.runs:
            target = bench_folder(choice.setup) / run.folder.name
            if run.folder.name in places and not target.exists():
                shutil.copytree(run.folder, target, ignore=shutil.ignore_patterns(".lock"))


def keys_to_sweep(setup: Setup) -> dict[str, Key]:
    unused = unused_keys(setup)
    found = swept_keys(setup.method.path or setup.method.name, setup.given)
    return {k: v for k, v in found.items() if k.removeprefix("local.") not in unused}


def varied(setup: Setup, point: Point) -> Setup:
    return api.chosen(setup.method.path or setup.method.name, setup.given | point)


def points(search: Search) -> list[Point]:
    return [dict(zip(search.axes, chosen, strict=True)) for chosen in itertools.product(*search.axes.values())]


def first_seed(setup: Setup) -> int:
    return (setup.config.seeds or (setup.config.seed,))[0]


def score(runs: Sequence[RunFolder]) -> float:
    """The criterion, mean over held-out targets; −∞ where a run failed or diverged."""
    found = [selection(run.record.finished.last) for run in runs]
    return float(np.mean(found)) if found and not any(map(math.isnan, found)) else -math.inf


def best(setup: Setup, found: list[Choice]) -> Choice:
    complete = max(len(c.runs) for c in found)
    usable = [c for c in found if c.runs and len(c.runs) == complete]
    if not usable:
        raise FedvlmError(f"{setup.method.label}: every run of the sweep failed, see above")
    chosen = max(usable, key=lambda c: c.score)
    return Choice(varied(setup, chosen.point), chosen.point, chosen.score, chosen.runs)


def notes(setups: Sequence[Setup], own: Sequence[Search], found: Mapping[int, Choice], search: Search) -> list[str]:
    seed = first_seed(setups[0])
    out = [
        f"sweep of {search}: chosen on seed {seed} by the {CRITERION}; the same for every method; test images unused"
    ]
    chosen = [f"{s.method.label} {shown(found[id(s)].point)}" for s in setups if id(s) in found]
    out.append(f"chosen: {'; '.join(chosen)}")
    for setup, one in zip(setups, own, strict=True):
        lacking = [k for k in search.axes if k not in one.axes]
        if lacking:
            why = "it trains nothing" if trains_nothing(setup) else f"it has no {', '.join(lacking)}"
            out.append(f"{setup.method.label} is not in {'this' if not one else 'all of the'} sweep: {why}")
    return out


def shown(point: Point) -> str:
    return " ".join(f"{k}={format_value(v)}" for k, v in point.items())
