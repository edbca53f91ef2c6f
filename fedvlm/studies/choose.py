"""`fedvlm choose`: which method for these images, within some minutes.

What is cheap comes first: the frozen model and one-round methods in full, then methods that train, family by family, for a
ninth of their rounds. The best of these try three learning rates for a third of their rounds. The best one-round method and
at most two others that are close to the best run in full, with all seeds and held-out domains. All this goes by validation
images (of the clients that train, and of those held out, for new ones); test images are looked at in the last table only.
Every run is an ordinary run in a folder, so that the same command goes on where it stopped, and repeats nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fedvlm import api
from fedvlm.config import catalogue
from fedvlm.config.config import Setup
from fedvlm.config.families import FAMILIES, ONE_ROUND, REFERENCE, family
from fedvlm.core.records import RoundRecord, Settings
from fedvlm.errors import FedvlmError
from fedvlm.report.columns import DEFINED
from fedvlm.report.gains import ENOUGH, FROZEN, gain
from fedvlm.studies.comparison import SEEDS
from fedvlm.studies.sweep import Point, varied
from fedvlm.system import console
from fedvlm.system.formatting import counted, duration
from fedvlm.system.interrupts import key_words, shell_line
from fedvlm.system.machine import runs_home
from fedvlm.system.table import Table
from fedvlm.training.folder import SWEEP, RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.planning import LEAVE_ONE_OUT, checked, estimate, single_runs
from fedvlm.training.processes import RunsFailed

if TYPE_CHECKING:
    from fedvlm.data.pool import Pools

GOALS = {"new-clients": ("G",), "own-clients": ("P",), "both": ("G", "P")}
CANDIDATES = (
    *(FROZEN, "moments", "tip-adapter", "fedavg", "ditto", "scaffold", "knn-per", "local-only", "fedclip", "fedot"),
    *("fft-gp", "promptfl", "kgcoop", "fedlora", "vpt"),
)
FIRST, SECOND = 9, 3  # a candidate first trains one part in so many of its rounds, then of these
SURVIVORS = 3  # trained methods that try several learning rates
FINALISTS = 2  # trained methods that run in full at most, beside the best one-round method
MARGIN = 0.03  # of validation accuracy, behind which a method is not run in full
FACTORS = (1 / 3, 1.0, 3.0)  # of the recipe's learning rate
TARGETS = 3  # held-out domains at a time while candidates are compared


@dataclass(frozen=True)
class Wish:
    """What is asked for."""

    goal: str = ""  # new-clients, own-clients or both; "": both, where domains can be held out
    minutes: float = 10.0
    mb: float = math.inf  # that a whole run may send, both directions, all clients together
    private: float = 0.0  # ε of differential privacy for each client; 0: none
    methods: tuple[str, ...] = CANDIDATES


@dataclass
class Try:
    """A method with settings, and what validation said of it."""

    setup: Setup  # with all rounds
    point: Point = field(default_factory=dict)
    score: float = -math.inf
    seconds: float = 0.0  # of a round, all runs of the search together

    @property
    def label(self) -> str:
        return self.setup.method.label

    @property
    def trains(self) -> bool:
        return family_of(self.setup) != ONE_ROUND and self.label != FROZEN


@dataclass
class Chosen:
    """The answer: a method with its settings, its evidence and the command that trains it."""

    method: str
    settings: Settings
    sentence: str
    runs: api.Runs
    not_tried: dict[str, str]  # method → why
    command: str
    seconds: float

    @property
    def table(self) -> Table:
        return self.runs.table()

    def __repr__(self) -> str:
        missing = [f"not tried: {name}: {why}" for name, why in self.not_tried.items()]
        return "\n".join([self.sentence, "", str(self.table), *missing, f"next: {self.command}"])


def choose(
    data: object = "",
    goal: str = "",
    minutes: float = 10.0,
    mb: float = math.inf,
    private: float = 0.0,
    methods: Sequence[str] = CANDIDATES,
    **keys: object,
) -> Chosen:
    """The best method for these images that validation finds within the minutes, with a table of the finalists on test.

    goal: new-clients, own-clients or both. mb: megabytes that a whole run may send. private: ε for each client. methods:
    the candidates. Further keys are those of a run."""
    given = api.prepared({"data": data or "emoji", **keys})
    return Search(given, Wish(goal, float(minutes), float(mb), float(private), tuple(methods))).answer()


class Search:
    """Candidates that are tried with more and more rounds while there is time."""

    def __init__(self, given: Mapping[str, object], wish: Wish):
        self.began, self.wish, self.not_tried = time.monotonic(), wish, dict[str, str]()
        if wish.goal not in ("", *GOALS):
            why = "; detection is measured on test images only: bench with outsiders=FOLDER" * (
                wish.goal == "outsiders"
            )
            raise FedvlmError(f"goal={wish.goal}: give {', '.join(GOALS)}{why}")
        self.seeds = tuple(map(int, cast("Iterable[int]", given.get("seeds") or SEEDS)))
        self.given = dict(given)
        for key in ("seeds", "out"):  # its own
            self.given.pop(key, None)
        if wish.private:
            self.given |= {"dp": "client", "epsilon": wish.private}
        self.pools: Pools = api.new_pools()
        first = checked(api.chosen("fedavg", self.given), self.pools)
        self.given.setdefault("rounds", first.setup.config.rounds)  # the same for all, so that rows are comparable
        domains = first.pool.source.domains
        alone = "protocol" not in self.given and "unseen" not in self.given
        self.held_out: tuple[str, ...] = tuple(domains) if alone and len(domains) >= 3 else ()
        self.tests_new = bool(self.held_out) or not alone
        self.goal = wish.goal or ("both" if self.tests_new else "own-clients")
        if "G" in GOALS[self.goal] and not self.tests_new:
            raise FedvlmError(
                f"goal={self.goal}: nobody can be held out of data={self.given['data']}; give unseen=CLIENT"
            )
        self.out = Path(str(given.get("out") or runs_home() / f"choose-{Path(str(self.given['data'])).name}"))

    @property
    def left(self) -> float:
        """Seconds."""
        return 60 * self.wish.minutes - (time.monotonic() - self.began)

    def answer(self) -> Chosen:
        cheap, trained = self.candidates()
        self.rung(cheap, 1)
        tried = [t for name in FAMILIES for t in self.rung(of_family(trained, name), FIRST)]
        survivors = sorted(tried, key=lambda t: -t.score)[:SURVIVORS]
        varied_rates = [t for one in survivors for t in self.with_rates(one)]
        second = self.rung(varied_rates, SECOND) or tried
        best = {t.label: t for t in sorted(second, key=lambda t: t.score)}  # of each method the last, which is the best
        ranked = sorted(best.values(), key=lambda t: -t.score)
        one_round = sorted((t for t in cheap if t.score > -math.inf and t.label != FROZEN), key=lambda t: -t.score)[:1]
        return self.final([t for t in cheap if t.label == FROZEN] + one_round + finalists(ranked, one_round))

    def candidates(self) -> tuple[list[Try], list[Try]]:
        """What costs one round at most, and what trains."""
        found = list[Try]()
        for name in self.wish.methods:
            idle = {*catalogue.for_purpose("training", "privacy")} if name == FROZEN else ()
            keys = {k: v for k, v in self.given.items() if k not in idle}
            try:
                found.append(Try(api.chosen(name, keys)))
            except FedvlmError as error:
                self.not_tried[name] = str(error)
        return [t for t in found if not t.trains], [t for t in found if t.trains]

    def with_rates(self, one: Try) -> list[Try]:
        """The method with learning rates around its recipe's; as it is where it has none."""
        rate = one.setup.parts["local"].settings.get("lr")
        if not isinstance(rate, float | int) or "lr" in self.given:
            return [one]
        points: list[Point] = [{"lr": float(f"{rate * factor:.3g}")} for factor in FACTORS]
        return [replace(one, setup=varied(one.setup, point), point=point, score=-math.inf) for point in points]

    def rung(self, tries: list[Try], part: int) -> list[Try]:
        """Trains each for one part in so many of its rounds, on the first seed, as far as the time suffices, and returns
        those that have a score."""
        planned: list[tuple[Try, list[PlannedRun]]] = []
        used = 0.0
        for one in tries:
            try:
                runs, needs = self.search_runs(one, part)
            except FedvlmError as error:
                self.not_tried.setdefault(one.label, str(error))
                continue
            if used + needs > self.left and not all(r.folder.joinpath("run.json").is_file() for r in runs):
                why = (
                    f"it needs about {duration(needs)}, and {duration(max(0.0, self.left - used))} are left of minutes="
                )
                self.not_tried.setdefault(one.label, why)
                continue
            used += needs
            planned.append((one, runs))
        done = self.executed([run for _, runs in planned for run in runs])
        for one, runs in planned:
            results = [done[r.folder].record.finished for r in runs if r.folder in done]
            if len(results) < len(runs):
                self.not_tried.setdefault(one.label, "a run failed, see above")
                continue
            one.score = mean([validation(r.last, self.goal) for r in results])
            one.seconds = sum(r.seconds / max(1, r.last["round"]) for r in results)
        return [t for t, _ in planned if t.score > -math.inf]

    def search_runs(self, one: Try, part: int) -> tuple[list[PlannedRun], float]:
        """The runs of the search, and about how many seconds they take; an error where the method does not apply, or
        sends too much."""
        rounds = one.setup.config.rounds
        fewer = max(1, math.ceil(rounds / part)) if rounds else 0
        targets = self.held_out[:: max(1, len(self.held_out) // TARGETS)][:TARGETS]
        changes: dict[str, object] = {"rounds": fewer, "evaluate_every": max(1, fewer)}
        if targets:
            changes |= {"protocol": LEAVE_ONE_OUT, "unseen": targets}
        setup = one.setup.with_(seeds=self.seeds[:1], out=str(self.out / SWEEP), **changes)
        checked(setup, self.pools)
        pool = self.pools.encode(setup)
        runs = [PlannedRun(single, pool) for single in single_runs(setup, pool)]
        if not rounds:
            return runs, 0.0
        cost = estimate(runs[0])
        megabytes = (cost.up + cost.down) / 1e6 * (1 if one.setup.local.one_round else rounds)
        if megabytes > self.wish.mb:
            raise FedvlmError(f"it sends {megabytes:.3g} MB, more than mb={self.wish.mb:g}")
        return runs, cost.seconds * fewer * len(runs)

    def final(self, finalists: list[Try]) -> Chosen:
        """All seeds and all held-out domains; with fewer seeds where the time does not suffice, which the table shows."""
        if not any(t.trains or t.label != FROZEN for t in finalists):
            raise FedvlmError(
                "no candidate could be tried:\n" + "\n".join(f"{n}: {why}" for n, why in self.not_tried.items())
            )
        ratio = max(1, len(self.held_out)) / max(1, min(TARGETS, len(self.held_out)))
        each = sum(t.seconds * t.setup.config.rounds * ratio for t in finalists if t.trains)
        seeds = self.seeds[: max(1, min(len(self.seeds), int(self.left / each) if each else len(self.seeds)))]
        if len(seeds) < len(self.seeds):
            console.warn(f"minutes={self.wish.minutes:g} allow {counted(len(seeds), 'seed')} of {len(self.seeds)}")
        planned: dict[str, list[PlannedRun]] = {}
        for one in finalists:
            changes: dict[str, object] = {"seeds": seeds, "out": str(self.out)}
            changes |= {"protocol": LEAVE_ONE_OUT} if self.held_out else {}
            setup = one.setup.with_(evaluate_every=max(1, one.setup.config.rounds), **changes)
            pool = self.pools.encode(setup)
            planned[one.label] = [PlannedRun(single, pool) for single in single_runs(setup, pool)]
        done = self.executed([run for runs in planned.values() for run in runs])
        for one in finalists:
            found = [done[r.folder] for r in planned[one.label] if r.folder in done]
            one.score = mean([validation(r.record.finished.last, self.goal) for r in found])
        runs = api.Runs([api.Run(run) for run in done.values()])
        winner = max((t for t in finalists if t.label != FROZEN), key=lambda t: t.score)
        table = runs.table()
        words = ["run", winner.label, *key_words(self.given | winner.point)]
        words.append(f"out={self.out / 'chosen'}")
        return Chosen(
            winner.label,
            dict(winner.point),
            sentence(winner.label, table, self.goal),
            runs,
            self.not_tried,
            shell_line(["fedvlm", *words]),
            time.monotonic() - self.began,
        )

    def executed(self, planned: list[PlannedRun]) -> dict[Path, RunFolder]:
        try:
            found = api.execute(planned, planned[0].setup.config.jobs).files if planned else []
        except RunsFailed as error:
            found = error.finished
            console.warn(str(error))
        return {run.folder: run for run in found}


def finalists(ranked: Sequence[Try], one_round: Sequence[Try]) -> list[Try]:
    """The trained methods that run in full: those within MARGIN of the best of all; where there is none, the quickest within
    MARGIN of the best of them, for comparison."""
    leader = max((t.score for t in [*ranked, *one_round]), default=0.0)
    near = [t for t in ranked if t.score >= leader - MARGIN][:FINALISTS]
    return near or sorted((t for t in ranked if t.score >= ranked[0].score - MARGIN), key=lambda t: t.seconds)[:1]


def family_of(setup: Setup) -> str:
    return family(setup.method.name, setup.parts["adapter"].name, setup.parts["merge"].name)


def of_family(tries: Sequence[Try], name: str) -> list[Try]:
    """The references that train, such as local-only, are tried with the heads."""
    return [t for t in tries if family_of(t.setup) == name or (name == "heads" and family_of(t.setup) == REFERENCE)]


def validation(last: RoundRecord, goal: str) -> float:
    """The accuracy on validation images by this goal: of held-out clients with the shared model, of the others with their
    own; −∞ where there is no such model."""
    views = {"G": last.get("newcomer", {}), "P": last.get("personal", {})}
    found = [views[measure].get("val") for measure in GOALS[goal]]
    known = [v for v in found if v is not None and not math.isnan(v)]
    return sum(known) / len(known) if len(known) == len(found) else -math.inf


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else -math.inf


def sentence(winner: str, table: Table, goal: str) -> str:
    """What the winner costs, and how it stands to the next row for each goal: on test images, by the rule of gains.py."""
    row = next(v for v in table.values if v["method"] == winner or str(v["method"]).startswith(f"{winner} "))
    name = str(row["method"])
    rounds, megabytes = row.get("rounds"), row.get("mb")
    cost = f"{counted(int(float(rounds or 0)), 'round')}, {float(megabytes or 0):.3g} MB"
    parts: dict[str, list[str]] = {}  # what is said → of which goals
    for measure in ("P", "G"):
        ours = table.by_seed.get(name, {}).get(measure)
        others = {n: s[measure] for n, s in table.by_seed.items() if n != name and s.get(measure)}
        if not ours or not others:
            continue
        rival = max(others, key=lambda n: sum(others[n].values()) / len(others[n]))
        found = gain(ours, others[rival])
        assert found is not None
        if found.above or found.below:
            text = f"{abs(found.mean):.1f} points {'above' if found.above else 'below'} {rival} on"
        elif found.seeds < ENOUGH:
            text = f"{found.mean:+.1f} points to {rival}, which {counted(found.seeds, 'seed')} cannot decide, on"
        else:
            text = f"level with {rival} on"
        parts.setdefault(text, []).append(DEFINED[measure].word)
    said = [f"{text} {' and '.join(goals)}" for text, goals in parts.items()]
    return f"{name}: {cost}" + (f"; {', '.join(said)}" if said else "")
