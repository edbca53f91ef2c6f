"""What lying clients do to each merge, with the server's guard (fedvlm/rounds/guard.py, bound=) and without it.

    python benchmarks/attacks.py --jobs 16 --out attacks.json --write docs/robustness.md
    python benchmarks/attacks.py --quick              # two merges, five attacks, one seed
    python benchmarks/attacks.py --read attacks.json  # the tables of an earlier run again
    python benchmarks/attacks.py updates              # what a site's update tells of its images (updates.py)
    python benchmarks/attacks.py inversion            # images rebuilt from the gradient of one step (inversion.py)
    python benchmarks/attacks.py server               # the other way round: a lying server against a site (lying_server.py)

Ten clients hold the embedded emoji in equal shares (partition=iid) on mini-clip; client 0 lies, or clients 0 and 1 do
together. Their replies are changed on the way to the server, or their training data before they train. A cell is the
accuracy of the shared model on the honest clients' test images after the last round, minus that of the same run without
liars, the mean over seeds. A merge withstands an attack where it loses less than MARGIN points more than if the liars had
stayed away; a backdoor, where the share of images with the trigger that are taken for the target class rises by less than
BACKDOOR_MARGIN points, too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.config.config import Config, Setup, resolve
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data
from fedvlm.core.seeds import generator
from fedvlm.core.state import Message, Params, Reply, State
from fedvlm.data.clients import Federation
from fedvlm.data.pool import Pools
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import VoidRound
from fedvlm.evaluation.views import evaluate
from fedvlm.rounds.guard import Guard
from fedvlm.rounds.method import Method
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.train import usable

CLIENTS = 10
MARGIN, BACKDOOR_MARGIN = 2.0, 10.0  # points
TARGET, STRENGTH = 0, 1.0  # of the backdoor: the class, and the trigger's length as a share of the feature's
NOT_FINITE, CRASH = "not finite", "crash"
FEW = 4  # a row with at most so many figures is a line below its table
BEGIN, END = "<!-- attacks -->", "<!-- /attacks -->"

# The attacks


class Scene(NamedTuple):
    """What liars know in an exchange: as in the literature, everything."""

    sent: Params  # the shared parameters that were sent
    honest: Params  # as the honest clients trained them, [clients, ...]
    sizes: float  # training examples of the honest clients together
    draw: torch.Generator

    def length(self) -> float:
        """The median length of the honest updates."""
        squares = [(v - self.sent[k]).flatten(1).square().sum(1) for k, v in self.honest.items()]
        return float(torch.stack(squares).sum(0).sqrt().median())


Lie = Callable[[Reply, Scene], Reply | None]  # of one client, from its honest reply; None: no answer
Values = Callable[[Tensor, Scene], Tensor]
Poison = Callable[[Data, int], Data]  # changes the training data of one client


def sends(names: str, value: Values | float, then: Lie | None = None) -> Lie:
    """Other values than its own under these names (with a dot at the end: all that begin with it)."""
    of: Values = value if callable(value) else lambda own, scene: torch.full_like(own, value)

    def lie(reply: Reply, scene: Scene) -> Reply | None:
        chosen = [k for k in reply.values for n in names.split() if k == n or (n.endswith(".") and k.startswith(n))]
        reply = reply._replace(values=reply.values | {k: of(reply.values[k], scene) for k in chosen})
        return then(reply, scene) if then else reply

    return lie


def trained(value: float) -> Lie:
    """This number for every shared parameter."""
    return lambda reply, scene: reply._replace(shared={k: torch.full_like(v, value) for k, v in reply.shared.items()})


def times(factor: float) -> Lie:
    """Its honest update times a factor."""
    return lambda reply, scene: reply._replace(
        shared={k: scene.sent[k] + factor * (v - scene.sent[k]) for k, v in reply.shared.items()}
    )


def noise(length: float) -> Lie:
    """Gaussian noise for an update, so many times as long as the median honest one."""

    def lie(reply: Reply, scene: Scene) -> Reply:
        drawn = {k: torch.randn(v.shape, generator=scene.draw) for k, v in reply.shared.items()}
        norm = float(sum(v.square().sum() for v in drawn.values())) ** 0.5
        return reply._replace(shared={k: scene.sent[k] + length * scene.length() / norm * v for k, v in drawn.items()})

    return lie


def a_little_is_enough(reply: Reply, scene: Scene) -> Reply:
    """Baruch et al., 2019: as far from the honest mean as honest clients are (z = 1.5), all liars alike."""
    return reply._replace(shared={k: (v.mean(0) - 1.5 * v.std(0))[None] for k, v in scene.honest.items()})


def inner_product(reply: Reply, scene: Scene) -> Reply:
    """Xie et al., 2020: against the honest mean, and shorter than it (ε = 0.5)."""
    return reply._replace(shared={k: (s - 0.5 * (scene.honest[k].mean(0) - s))[None] for k, s in scene.sent.items()})


def absent(reply: Reply, scene: Scene) -> None:
    return None


def wrong_names(reply: Reply, scene: Scene) -> Reply:
    return reply._replace(shared={f"{k}_": v for k, v in reply.shared.items()})


def wrong_shapes(reply: Reply, scene: Scene) -> Reply:
    return reply._replace(shared={k: v[..., :-1] for k, v in reply.shared.items()})


def flip_labels(data: Data, client: int) -> Data:
    low, high = data.bounds[client, :2]
    y = data.y.clone()
    y[low:high] = int(data.y.max()) - y[low:high]
    return replace(data, y=y)


def with_trigger(x: Tensor) -> Tensor:
    """A fixed direction added to features (or to all tokens of an image), which keep their lengths."""
    direction = F.normalize(torch.randn(x.shape[-1], generator=generator(1)), dim=0)
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length * F.normalize(x / length + STRENGTH * direction, dim=-1)


def backdoor(data: Data, client: int) -> Data:
    """Every second training example gets the trigger and the target class."""
    low, high = data.bounds[client, :2].tolist()
    rows = torch.arange(low, high, 2)
    x, y = data.x.clone(), data.y.clone()
    x[rows], y[rows] = with_trigger(x[rows]), TARGET
    return replace(data, x=x, y=y)


@dataclass(frozen=True)
class Attack:
    name: str
    lies: Mapping[str, Lie] = field(default_factory=dict)  # by step
    poison: Poison | None = None
    liars: int = 1
    only: tuple[str, ...] = ()  # merges that use what it changes; (): all


def train(name: str, lie: Lie, **more: Any) -> Attack:
    return Attack(name, {"train": lie}, **more)


REVERSED = times(-1)
BY_SIZE = ("mean", "grace", "classwise", "scaffold", "transport", "stages", "text_server")  # merges that weight by n
NONE = Attack("no liar")
ATTACKS = [
    train("one client stays away", absent),
    train("two clients stay away", absent, liars=2),
    train("n = 1e30, update × −1", sends("n", 1e30, REVERSED), only=BY_SIZE),
    train("n × 100, update × −1", sends("n", lambda own, scene: 100 * own, REVERSED), only=BY_SIZE),
    train("n = −0.99 × the others' sum", sends("n", lambda own, scene: own * 0 - 0.99 * scene.sizes), only=BY_SIZE),
    train("n = −the others' sum", sends("n", lambda own, scene: own * 0 - scene.sizes), only=BY_SIZE),
    train("n = NaN", sends("n", np.nan), only=BY_SIZE),
    train("all weights 3e38", trained(3e38)),
    train("all weights NaN", trained(np.nan)),
    train("all weights infinite", trained(np.inf)),
    train("all weights 0", trained(0.0)),
    train("update × −1,000", times(-1000)),
    train("update × 1,000", times(1000)),
    train("update × −20", times(-20)),
    train("update × −5", times(-5)),
    train("update × −5, two liars", times(-5), liars=2),
    train("update × −1", REVERSED),
    train("noise, as long as an honest update", noise(1)),
    train("noise, 100 times as long", noise(100)),
    train("a little is enough, two liars", a_little_is_enough, liars=2),
    train("inner product, two liars", inner_product, liars=2),
    train("free rider: sends back what it got", times(0)),
    train("free rider with noise of a tenth", noise(0.1)),
    Attack("labels flipped", poison=flip_labels),
    Attack("labels flipped, two liars", poison=flip_labels, liars=2),
    Attack("backdoor", poison=backdoor),
    train("backdoor, update × 10", times(10), poison=backdoor),
    train("other names", wrong_names),
    train("other shapes", wrong_shapes),
    Attack("scores 3,831,417 right answers", {"score": sends("shared.score", 3_831_417)}),
    train("training loss of 1e30", sends("loss", 1e30)),
    train("loss before training 1e30, update × −1", sends("before", 1e30, REVERSED), only=("ga", "afl", "qffl")),
    train("loss before training 5,000, update × −1", sends("before", 5000, REVERSED), only=("ga", "afl", "qffl")),
    train("loss after training −1e5, update × −1", sends("after", -1e5, REVERSED), only=("ga", "faa")),
    Attack("validation loss 5,000, update × −1", {"train": REVERSED, "validate": sends("val", 5000)}, only=("faa",)),
    train("control variate × −1,000", sends("control.", lambda own, scene: -1000 * own), only=("scaffold",)),
    train(
        "class counts × 1e6, update × −1",
        sends("class_counts", lambda c, _: 1e6 * c, REVERSED),
        only=("classwise", "transport"),
    ),
    train("labels out of range", sends("labels", lambda own, scene: own + 1000), only=("text_server",)),
    train("fewer labels than embeddings", sends("labels", lambda own, scene: own[:, 1:]), only=("text_server",)),
    train(
        "labels of embeddings moved by one", sends("labels", lambda own, scene: own.roll(1, 1)), only=("text_server",)
    ),
]
BY_NAME = {attack.name: attack for attack in (NONE, *ATTACKS)}

# The merges


class Case(NamedTuple):
    """How a merge is run."""

    recipe: str
    given: dict[str, object]
    rounds: int
    seeds: tuple[int, ...]
    about: str = ""  # how it differs from the others, for the caption


# lr: slow enough that the model of a single client, which Krum chooses, is no worse than the one that was sent
HEAD: dict[str, object] = {"lr": 0.003, "epochs": 3}
PROMPTS: dict[str, object] = {"local": "sgd", "fusion": 1.0, "context": 4, "count": 8, "candidates": 200, "shots": 4}
PROMPTS |= {"optimiser": "adam", "lr": 0.01, "weight_decay": 0.0, "schedule": "constant", "epochs": 1, "batch": 64}
LORA: dict[str, object] = {"towers": "image", "layers": 1, "lr": 0.01, "batch": 16, "shots": 2}
SEEDS = (50, 77, 98)
ON_A_HEAD = ("mean", "median", "trimmed", "krum", "grace", "classwise", "ga", "faa", "afl", "qffl")
MERGES = {m: Case("fedavg", {"merge": m, **HEAD}, 10, SEEDS) for m in ON_A_HEAD}
MERGES["scaffold"] = Case("scaffold", HEAD, 10, SEEDS)
MERGES["transport"] = Case("focoop", PROMPTS, 5, SEEDS[:1], "FOCoOp's prompts, 4 shots, 5 rounds, seed 50")
MERGES["stages"] = Case(
    "feddtl-two-stage",
    LORA | {"tolerance": 1.0, "patience": 1},
    5,
    SEEDS[:1],
    "LoRA in the last image layer, 2 shots, 5 rounds, the last 3 reinforced, seed 50",
)
MERGES["text_server"] = Case(
    "feddtl-decoupled", LORA | {"text_layers": 1}, 5, SEEDS[:1], "the same LoRA, supervised, 5 rounds, seed 50"
)
NOT_TRIED = (
    "adaptive",
    "exact",
    "experts",
    "feddyn",
    "moments",
    "other_text",
    "prototypes",
    "sparsity",
    "trajectory",
)  # newer than the table
QUICK_MERGES = ("mean", "median")
QUICK_ATTACKS = (
    "n = 1e30, update × −1",
    "all weights NaN",
    "update × −1,000",
    "update × −5",
    "scores 3,831,417 right answers",
)

# One run


class Cell(NamedTuple):
    merge: str
    attack: str
    guarded: bool
    seed: int


@dataclass
class Found:
    """What came of a run."""

    merge: str
    attack: str
    guarded: bool
    seed: int
    outcome: str = ""  # NOT_FINITE, CRASH, "stopped" (no usable round), "" where it went through
    why: str = ""  # of a crash
    start: float = np.nan  # accuracy before the first round, in %
    accuracy: list[float] = field(default_factory=list)  # after the last, of each client, in %
    recorded: float = np.nan  # as the server recorded it, where liars answer the step score
    triggered: float = np.nan  # share of honest test images with the trigger that are taken for the target class, in %
    refused: str = ""  # why, the first time
    quarantined: int = 0  # after which round; 0: never
    shortened: int = 0  # rounds
    honest_hit: int = 0  # honest clients that were refused or shortened in any round


class Lying(Stacked):
    """Clients of which some lie: their replies are changed before the server sees them."""

    def __init__(self, method: Method, data: Data, attack: Attack):
        for client in range(attack.liars if attack.poison else 0):
            assert attack.poison
            data = attack.poison(data, client)
        super().__init__(method, data, warn=lambda text: None)
        self.attack = attack

    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
        replies = [one for reply in super().run(step, ids, message, round, exchange) for one in one_by_one(reply)]
        lie, honest = self.attack.lies.get(step), [r for r in replies if r.ids[0] >= self.attack.liars]
        if not lie or not honest:  # nobody answers with numbers once the model has none
            yield from replies
            return
        together = {k: torch.cat([r.shared[k] for r in honest]) for k in honest[0].shared}
        sizes = sum(float(r.values["n"]) for r in honest) if step == "train" else 0.0
        for reply in replies:
            told: Reply | None = reply
            if reply.ids[0] < self.attack.liars:
                draw = generator(self.data.seed, round, int(reply.ids[0]))
                told = lie(reply, Scene(message.shared, together, sizes, draw))
            if told:
                yield told


def one_by_one(reply: Reply) -> Iterator[Reply]:
    for at in range(len(reply.ids)):
        one = slice(at, at + 1)
        values, shared = ({k: v[one] for k, v in part.items()} for part in reply[1:])
        yield Reply(reply.ids[one], values, shared)


def setup_for(case: Case, seed: int) -> Setup:
    common = {"partition": "iid", "clients": CLIENTS, "rounds": case.rounds, "seed": seed}
    return resolve(case.recipe, case.given | common)


def play(method: Method, federation: Federation, attack: Attack, guarded: bool, rounds: int, found: Found) -> None:
    """The rounds of a run as fedvlm.training.train plays them; without the guard everything is accepted."""
    data = replace(federation.data, rounds=rounds)
    declared, everybody = np.diff(data.bounds, axis=1), np.arange(CLIENTS)
    guard = Guard(method, federation.names, declared, data.extras, Config.bound, lambda text: None) if guarded else None
    engine, state = Lying(method, data, attack), method.init(CLIENTS)
    found.start = float(np.mean(accuracy(Stacked(method, data), state)))
    cohort = partial(Cohort, engine, everybody, quorum=Config.quorum, rounds=rounds, population=CLIENTS, guard=guard)
    void = 0
    for round in range(1, rounds + 1):
        try:
            state, void = usable(method.round(state, cohort(round=round)), state), 0
        except VoidRound as lack:
            void += 1
            if not guarded or void == 3:
                found.outcome, found.why = "stopped" if guarded else NOT_FINITE, str(lack)
                return
        if "score" in attack.lies:
            record = evaluate(method, federation, cohort(round=round), state.message())
            found.recorded = 100 * (record["shared"]["test"] or np.nan)
        if guard:
            note(found, guard, round, federation.names[: attack.liars])
    found.accuracy = accuracy(Stacked(method, data), state)
    if attack.poison is backdoor or attack is NONE:
        found.triggered = triggered(Stacked(method, replace(data, x=with_trigger(data.x))), state, attack.liars)


def note(found: Found, guard: Guard, round: int, liars: tuple[str, ...]) -> None:
    """What the guard did in a round."""
    record = guard.end_round(round)
    refused, shortened = record.get("offences", {}), record.get("bounded", {})
    found.refused = found.refused or next((refused[name] for name in liars if name in refused), "")
    found.shortened += any(name in shortened for name in liars)
    found.honest_hit += len((refused.keys() | shortened.keys()) - set(liars))
    if not found.quarantined and any(name in record.get("quarantined", []) for name in liars):
        found.quarantined = round


def accuracy(engine: Stacked, state: State) -> list[float]:
    """Of the shared model, on each client's test examples, in %."""
    outputs = engine.outputs(state.message(), 0)
    right = (outputs["shared.logits"].argmax(-1) == outputs["label"]).double()
    return [100 * float(right[outputs["client"] == i].mean()) for i in range(CLIENTS)]


def triggered(engine: Stacked, state: State, liars: int) -> float:
    outputs = engine.outputs(state.message(), 0)
    tested = (outputs["client"] >= max(1, liars)) & (outputs["label"] != TARGET)
    return 100 * float((outputs["shared.logits"].argmax(-1)[tested] == TARGET).double().mean())


POOLS = Pools()  # of this process


def run_cell(cell: Cell) -> Found:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # overflows are what is measured here
    case, found = MERGES[cell.merge], Found(*cell)
    setup = setup_for(case, cell.seed)
    planned = PlannedRun(setup, POOLS.load(setup))
    method, federation = planned.method, planned.federation
    try:
        play(method, federation, BY_NAME[cell.attack], cell.guarded, case.rounds, found)
    except Exception as error:  # without the guard a reply may break anything
        found.outcome, found.why = CRASH, f"{type(error).__name__}: {error}"[:300]
    return found


def cells(quick: bool, only: list[str]) -> list[Cell]:
    """The slowest first."""
    planned: list[Cell] = []
    for merge in QUICK_MERGES if quick else reversed(only or MERGES):
        chosen = [a for a in ATTACKS if merge in (a.only or MERGES) and (not quick or a.name in QUICK_ATTACKS)]
        seeds = MERGES[merge].seeds[:1] if quick else MERGES[merge].seeds
        for attack, guarded, seed in product((NONE, *chosen), (True, False), seeds):
            planned.append(Cell(merge, attack.name, guarded, seed))
    return planned


def run_all(planned: list[Cell], jobs: int) -> list[Found]:
    for merge in dict.fromkeys(cell.merge for cell in planned):
        POOLS.load(setup_for(MERGES[merge], SEEDS[0]))  # encodes what the store does not hold, with all cores
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that start now
    began = shown = time.monotonic()
    results: list[Found] = []
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_cell, cell) for cell in planned]):
            results.append(done.result())
            if time.monotonic() > shown + 10 or len(results) == len(planned):
                shown = time.monotonic()
                print(f"{len(results)} of {len(planned)} runs, {shown - began:.0f} s", flush=True)
    order = {cell: place for place, cell in enumerate(planned)}
    return sorted(results, key=lambda f: order[Cell(f.merge, f.attack, f.guarded, f.seed)])


# The tables


class Tables:
    def __init__(self, results: list[Found]):
        self.by = {Cell(f.merge, f.attack, f.guarded, f.seed): f for f in results}
        self.merges = [m for m in MERGES if any(f.merge == m for f in results)]
        self.attacks = [a for a in ATTACKS if any(f.attack == a.name for f in results)]

    def runs(self, merge: str, attack: str, guarded: bool) -> list[Found]:
        """One for each seed."""
        return [f for cell, f in self.by.items() if cell[:3] == (merge, attack, guarded)]

    def honest(self, found: Found) -> Found:
        """The run without liars."""
        return self.by[Cell(found.merge, NONE.name, found.guarded, found.seed)]

    def change(self, attack: Attack, found: Found) -> float:
        """Of accuracy, in points, on the clients that are honest; of what the server recorded where that is the lie."""
        before = float(np.mean(self.honest(found).accuracy[attack.liars :]))
        after = found.recorded if "score" in attack.lies else float(np.mean(found.accuracy[attack.liars :]))
        return after - before

    def cell(self, attack: Attack, merge: str, guarded: bool) -> str:
        runs = self.runs(merge, attack.name, guarded)
        if not runs:
            return "–"
        if bad := next((f.outcome for f in runs if f.outcome), ""):
            return f"**{bad}**"
        mean = float(np.mean([self.change(attack, f) for f in runs]))
        if "score" in attack.lies:  # a lie is no gain
            return emphasised(mean, abs(mean) < MARGIN)
        return emphasised(mean, mean > self.absence(attack, merge) - MARGIN)

    def absence(self, attack: Attack, merge: str) -> float:
        """The change, in points, if the liars stay away; 0 where nothing is lost."""
        away = next(a for a in ATTACKS if a.liars == attack.liars and a.lies.get("train") is absent)
        changes = [self.change(away, f) for f in self.runs(merge, away.name, True)]
        return min(0.0, float(np.mean(changes))) if changes else 0.0

    def backdoor_cell(self, attack: Attack, merge: str, guarded: bool) -> str:
        runs = [f for f in self.runs(merge, attack.name, guarded) if not f.outcome]
        if not runs:
            return "–"
        rise = float(np.mean([f.triggered - self.honest(f).triggered for f in runs]))
        return emphasised(rise, rise < BACKDOOR_MARGIN)

    def guard(self, attack: Attack) -> str:
        """What the guard did about an attack, over all runs."""
        if attack.lies.get("train") is absent:
            return "–"
        runs = [f for m in self.merges for f in self.runs(m, attack.name, True)]
        refused, shortened = [f for f in runs if f.refused], [f for f in runs if f.shortened]
        rounds = {f.quarantined for f in refused} - {0}
        words = {"refused" + (f", quarantined after round {min(rounds)}" if rounds else ""): refused}
        words["shortened"] = shortened
        some = {
            word: f" in {len(hit)} of {len(runs)} runs" if len(hit) < len(runs) else "" for word, hit in words.items()
        }
        return "; ".join(word + some[word] for word, hit in words.items() if hit) or "unseen"

    def withstood(self, merge: str, guarded: bool) -> str:
        concerned = [a for a in self.attacks if a.lies.get("train") is not absent and self.runs(merge, a.name, guarded)]
        lost = 0
        for attack in concerned:
            shown = [self.cell(attack, merge, guarded)]
            shown += [self.backdoor_cell(attack, merge, guarded)] if attack.poison is backdoor else []
            lost += any(text.startswith("**") for text in shown)
        return f"{len(concerned) - lost} of {len(concerned)}"

    def rows(self, guarded: bool) -> Iterator[list[str]]:
        def mean(pick: Callable[[Found], float]) -> list[str]:
            none = [self.runs(m, NONE.name, guarded) for m in self.merges]
            return [f"{np.mean([pick(f) for f in runs]):.1f}" for runs in none]

        def about(attack: Attack) -> list[str]:
            return [self.guard(attack)] if guarded else []

        filler = [""] if guarded else []
        yield ["accuracy at round 0", *mean(lambda f: f.start), *filler]
        yield ["accuracy without liars", *mean(lambda f: float(np.mean(f.accuracy))), *filler]
        yield ["trigger taken for the target without liars", *mean(lambda f: f.triggered), *filler]
        for attack in self.attacks:
            yield [attack.name, *(self.cell(attack, m, guarded) for m in self.merges), *about(attack)]
            if attack.poison is backdoor:
                rises = (self.backdoor_cell(attack, m, guarded) for m in self.merges)
                yield [f"{attack.name}: trigger taken for the target", *rises, *filler]
        yield ["**withstands**", *(self.withstood(m, guarded) for m in self.merges), *filler]

    def text(self) -> str:
        """Markdown."""
        seeds = ", ".join(map(str, sorted({f.seed for f in self.by.values()})))
        heavy = [f"; {m}: {MERGES[m].about}" for m in self.merges if MERGES[m].about]
        hits = sum(f.honest_hit > 0 for f in self.by.values())
        guarded = sum(f.guarded for f in self.by.values())
        caption = (
            f"`python benchmarks/attacks.py` ({time.strftime('%Y-%m-%d')}; the emoji on mini-clip, {CLIENTS} clients, "
            f"partition=iid, split 60/20/20; a linear head, SGD with lr 0.003, 3 epochs a round, 10 rounds, seeds {seeds}"
            f"{''.join(heavy)}; last round, shared model, test split of the honest clients). Accuracy in %, then its change "
            "in points against the same run without liars. Bold: the merge does not withstand the attack: it loses "
            f"{MARGIN:g} points or more beyond what the absence of the liars costs, its numbers are not finite, it crashes, "
            "the recorded accuracy is false, or (backdoors) the share of images with the trigger that are taken for the "
            f"target class rises by {BACKDOOR_MARGIN:g} points or more. –: the merge does not use what the attack changes. "
            f"Runs in which the guard refused or shortened an honest client: {hits} of {guarded}."
        )
        return "\n".join([caption, *folded(self.merges, list(self.rows(True)), list(self.rows(False)))])

    def without_guard(self) -> str:
        return "\n".join(["\nWithout the guard:\n", *markdown(["attack", *self.merges], list(self.rows(False)))])


def emphasised(points: float, good: bool) -> str:
    if not np.isfinite(points):
        return f"**{NOT_FINITE}**"
    text = (f"{points:+.1f}" if abs(points) < 1000 else f"{points:+,.0f}").replace("-", "−")
    return text if good else f"**{text}**"


def folded(merges: list[str], guarded: list[list[str]], unguarded: list[list[str]]) -> list[str]:
    """The table with the guard, without attacks that are always refused, and in a sentence what happens without it."""
    refused = [row[0] for row in guarded if row[-1].startswith("refused, ") and "**" not in "".join(row)]
    crashes = [row[0] for row in unguarded if set(row[1:]) == {f"**{CRASH}**"}]
    withstood = ", ".join(f"{merge} {cell}" for merge, cell in zip(merges, unguarded[-1][1:], strict=True))
    return [
        f"\nWith the guard (`bound={Config.bound:g}`, the default). Refused in every run, so that a merge loses about what "
        f"the absence of the liar costs: {'; '.join(refused)}.\n",
        *split(["attack", *merges, "the guard"], [row for row in guarded if row[0] not in refused]),
        f"\nWithout it (everything is accepted; the command prints that table) these withstand: {withstood}. A crash in "
        f"every merge: {'; '.join(crashes) or 'none'}.",
    ]


def split(head: list[str], rows: list[list[str]]) -> list[str]:
    """The table, and below it a line for each attack that concerns few merges."""

    def concerned(row: list[str]) -> dict[str, str]:
        return {name: cell for name, cell in zip(head[1:], row[1:], strict=True) if cell not in ("–", "")}

    few = [row for row in rows if len(concerned(row)) <= FEW]
    lines = [f"- {row[0]}: {', '.join(f'{name} {cell}' for name, cell in concerned(row).items())}" for row in few]
    return [*markdown(head, [row for row in rows if row not in few]), "", *lines]


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def write(path: Path, text: str) -> None:
    """Puts the tables between the marks."""
    before, mark, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (mark and end):
        sys.exit(f"{path} has no {BEGIN} … {END}; add both lines where the tables belong")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two merges, five attacks, one seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, one thread each")
    parser.add_argument("--out", type=Path, help="a .json file for what came of every run")
    parser.add_argument("--merges", nargs="*", default=[], choices=MERGES, help="only these")
    parser.add_argument("--read", type=Path, nargs="+", help="earlier --out files to make tables of; nothing is run")
    parser.add_argument("--write", type=Path, help=f"a Markdown file; the tables go between {BEGIN} and {END}")
    args = parser.parse_args()
    if args.read:
        results = [Found(**found) for path in args.read for found in json.loads(path.read_text(encoding="utf-8"))]
    else:
        results = run_all(cells(args.quick, args.merges), args.jobs)
    if args.out:
        args.out.write_text(json.dumps([vars(found) for found in results], indent=1), encoding="utf-8")
    tables = Tables(results)
    print(tables.text(), tables.without_guard(), sep="\n")
    if args.write:
        write(args.write, tables.text())


if __name__ == "__main__":
    beside = {"server": "lying_server", "updates": "updates", "inversion": "inversion"}  # files beside this one
    if sys.argv[1:2] and (name := beside.get(sys.argv[1])):
        sys.exit(importlib.import_module(name).main(sys.argv[2:]))
    main()
