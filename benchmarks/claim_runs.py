"""The runs that benchmarks/claims.py judges: each side of a comparison with an lr from one grid, then all seeds.

The grid is the recipe's lr times 0.3, 1 and 3; where the best is the first or last of them, the next is tried, too. What
counts is what the measure reports, on validation, in the first seed: P and what is scored by personal models, the personal
model; G and others, the shared one; C, their mean. Keys in a side's `choices` are then chosen likewise, one after the other.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from study import Shelf, finished_each, last_rounds

from fedvlm.config.config import Setup, resolve
from fedvlm.core.records import RoundRecord
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.training.folder import RunFolder

GRID = (0.3, 1.0, 3.0)  # times the recipe's lr, which was chosen on other data
WIDER = (0.003, 0.01, 0.03, 0.1, *GRID, 10.0, 30.0)  # what is tried where the best of the grid is its first or last
BY_PERSONAL_MODELS = ("P", "acc", "cacc", "auroc", "fpr95", "local", "base", "novel", "hm", "variance", "worst")


class Side(NamedTuple):
    """One method of a comparison, with all that is asked of it."""

    method: str
    data: str
    keys: tuple[tuple[str, object], ...]
    measure: str
    choices: tuple[
        tuple[str, tuple[object, ...]], ...
    ] = ()  # further keys that are chosen on validation, and from what

    @property
    def needed(self) -> set[str]:
        """Names of data."""
        return {self.data} | {str(value) for key, value in self.keys if key == "outsiders"}

    @classmethod
    def of(cls, given: Mapping[str, Any], data: str, keys: Mapping[str, object], measure: str) -> Side:
        on = {"on": given["on"]} if "on" in given else {}
        whole = {**keys, **on, **given.get("settings", {})}
        keys_of_runs = tuple(sorted((k, listed(v)) for k, v in whole.items()))
        choices = tuple((k, tuple(v)) for k, v in given.get("choices", {}).items())
        return cls(given["method"], data, keys_of_runs, criterion(measure), choices)


def listed(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def criterion(measure: str) -> str:
    if measure == "C":
        return "C"
    return "P" if measure in BY_PERSONAL_MODELS else "G"


class Study:
    """Runs, each once."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.pools = args, Pools()
        self.shelf = Shelf(args.out) if args.read else None
        self.data = dict(word.split("=", 1) for word in args.data) | {"emoji": "emoji"}
        self.chosen: dict[Side, float] = {}
        self.settled: dict[Side, dict[str, object]] = {}  # what was chosen of a side's `choices`
        self.failed: dict[Side, str] = {}
        self.runs: dict[Side, list[RunFolder]] = {}

    def setup(self, side: Side, lr: float | None, seeds: tuple[int, ...], tried: Mapping[str, object] = {}) -> Setup:
        keys = {**dict(side.keys), **self.settled.get(side, {}), **tried} | {
            "data": self.data[side.data],
            "seeds": seeds,
            "out": str(self.args.out),
            "bound": 0,
        }
        if "outsiders" in keys:
            keys["outsiders"] = self.data[str(keys["outsiders"])]
        keys["evaluate_every"] = keys.get("evaluate_every", max(1, int(str(keys.get("rounds", 30)))))
        if self.args.rounds and int(str(keys.get("rounds", 0))) > self.args.rounds:
            keys["rounds"] = keys["evaluate_every"] = self.args.rounds
        keys |= {} if lr is None else {"lr": lr}
        return resolve(side.method, keys)

    def play(self, sides: Sequence[Side]) -> None:
        """The lr of each side on validation, then all seeds with it."""
        known = list(dict.fromkeys(s for s in sides if s.needed <= self.data.keys()))
        rates: dict[Side, float] = {}  # of the recipes, where there is one to choose
        for side in known:
            try:
                plain = self.setup(side, None, self.args.seeds[:1])
                if "lr" in dict(side.keys) or not plain.config.rounds:
                    self.chosen[side] = math.nan
                else:
                    rates[side] = plain.local.lr
            except FedvlmError as error:
                self.failed[side] = str(error)
        self.choose(rates)
        self.settle([side for side in self.chosen if side.choices])
        final = {side: self.final(side) for side in known if side in self.chosen}
        self.runs |= self.finished(final)

    def choose(self, rates: Mapping[Side, float]) -> None:
        """The best factor of each side's lr; where it is the first or last that was tried, the next is tried, too."""
        found: dict[Side, dict[float, float]] = {side: {} for side in rates}
        missing = {side: set(GRID) for side in rates}
        while any(missing.values()):
            first = self.args.seeds[:1]
            tries = {
                (s, f): self.setup(s, rates[s] * f, first) for s, factors in missing.items() for f in sorted(factors)
            }
            runs = self.finished(tries)
            missing = {}
            for side in {side for side, _ in tries}:
                if any((side, f) not in runs for s, f in tries if s == side):
                    found.pop(side, None)  # a run failed
                    continue
                found[side] |= {f: validation(runs[s, f], s.measure) for s, f in tries if s == side}
                missing[side] = beyond(found[side])
        self.chosen |= {side: best(values) for side, values in found.items() if values}

    def settle(self, sides: Sequence[Side]) -> None:
        """The best value of each further key of a side, in the first seed, at the lr that was chosen."""
        for step in range(max((len(s.choices) for s in sides), default=0)):
            asked = {s: s.choices[step] for s in sides if step < len(s.choices)}
            tries = {
                (s, v): self.final(s, self.args.seeds[:1], {k: v}) for s, (k, values) in asked.items() for v in values
            }
            runs = self.finished(tries)
            for side, (key, values) in asked.items():
                scores = {v: validation(runs[side, v], side.measure) for v in values if (side, v) in runs}
                if scores:
                    self.settled.setdefault(side, {})[key] = max(scores, key=lambda v: scores[v])

    def finished(self, setups: dict[Any, Setup]) -> dict[Any, list[RunFolder]]:
        return self.shelf.of(setups) if self.shelf else finished_each(setups, self.args.jobs, self.pools)

    def tuned(self, side: Side) -> bool:
        return not math.isnan(self.chosen.get(side, math.nan))

    def final(self, side: Side, seeds: Sequence[int] = (), tried: Mapping[str, object] = {}) -> Setup:
        factor, asked = self.chosen[side], tuple(seeds or self.args.seeds)
        plain = self.setup(side, None, asked, tried)
        return self.setup(side, plain.local.lr * factor, asked, tried) if self.tuned(side) else plain

    def told(self, side: Side) -> str:
        """What was chosen for a side, in words."""
        factor = f" × {self.chosen[side]:g}" if self.tuned(side) else ""
        return " ".join([side.method + factor, *(f"{k}={v}" for k, v in self.settled.get(side, {}).items())])


def best(tried: Mapping[float, float]) -> float:
    return max(sorted(tried), key=lambda f: tried[f])


def beyond(tried: Mapping[float, float]) -> set[float]:
    """The next factor where the best is the first or last one tried; none where there are no more."""
    place = WIDER.index(best(tried))
    return {f for f in WIDER[max(0, place - 1) : place + 2] if f not in tried}


def validation(runs: Sequence[RunFolder], measure: str) -> float:
    """What chooses an lr: the accuracy on validation that belongs to the measure, mean over runs; of a run that fell apart,
    the worst."""

    def one(record: RoundRecord, view: str) -> float:
        score = record.get(view, {}).get("val")  # type: ignore[attr-defined]
        return -1.0 if score is None else float(score)

    views = {"P": ("personal",), "C": ("personal", "shared")}.get(measure, ("shared",))
    found = [one(r, v) for r in last_rounds(runs) for v in views if v in r]
    return float(np.mean(found)) if found else -1.0
