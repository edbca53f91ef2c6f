"""FedAvg, FedCLIP, FedOT, FedLT and FFT-GP once more, from the papers' equations alone, beside fedvlm's own runs.

    python benchmarks/reference.py --data ../shared/data/pacs                         # prints; 10 minutes of one core
    python benchmarks/reference.py --data ../shared/data/pacs --write                 # docs/results.md

Written to be read, not to be fast: torch.nn, torch.optim, autograd, one client after the other. From fedvlm it takes the
stored embeddings, who holds which image in which split (checked here), and the settings of its runs (lr, schedule, batch,
epochs, rounds, optimiser, weight decay, weights), nothing that trains or scores. Initial values and the order of batches are
its own, so that equal figures are not expected: G, P and C (leave-one-domain-out, test split, last round) should agree
within 2 points. What it found is kept in --out, and not computed again for the same settings.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from measured import Measured
from results import write_section
from study import run_each, seed_scores
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.config.config import Setup, resolve
from fedvlm.data.clients import federate
from fedvlm.data.pool import Pools
from fedvlm.system import console
from fedvlm.training.folder import RunFolder
from fedvlm.training.planning import single_runs

METHODS: dict[
    str, dict[str, object]
] = {  # settings are fixed here: the check is of equations, not of what recipes ship
    "fedavg": {"lr": 0.03, "schedule": "constant"},
    "fedclip": {"lr": 0.001},
    "fedot": {"lr": 0.01},
    "fedlt": {"lr": 0.03},
    "fft-gp": {"lr": 0.001},
}
MEASURES = ("G", "P", "C")
LIMIT = 2.0  # points
Weights = dict[str, Tensor]


class Part(NamedTuple):
    x: Tensor  # embeddings
    y: Tensor


@dataclass
class Client:
    name: str
    train: Part
    val: Part
    test: Part


@dataclass
class Problem:
    clients: list[Client]
    unseen: Client
    names: Tensor  # normalised embeddings of the class names
    scale: float


class Settings(NamedTuple):
    lr: float
    batch: int
    epochs: int
    rounds: int
    optimiser: str
    weight_decay: float
    uniform: bool  # weights of the mean
    align: float
    cosine: bool  # lr falls from round to round by half a cosine

    def in_round(self, t: int) -> Settings:
        return self._replace(lr=self.lr / 2 * (1 + math.cos(math.pi * (t - 1) / self.rounds))) if self.cosine else self


# models


class Classifier(nn.Module):
    """FedAvg: logits = s · W h."""

    private: tuple[str, ...] = ()

    def __init__(self, problem: Problem):
        super().__init__()
        self.scale = problem.scale
        self.head = nn.Parameter(problem.names.clone())

    def features(self, h: Tensor) -> Tensor:
        return F.normalize(h, dim=1)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale * self.features(h) @ self.head.T


class Masked(nn.Module):
    """FedCLIP, Eq. 3: h* = softmax(W₂ tanh(W₁ h + b₁) + b₂) · h, and cosines with the class names."""

    private: tuple[str, ...] = ()

    def __init__(self, problem: Problem):
        super().__init__()
        self.scale = problem.scale
        self.register_buffer("names", problem.names, persistent=False)
        d = problem.names.shape[1]
        self.attention = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, d), nn.Softmax(dim=1))

    def features(self, h: Tensor) -> Tensor:
        return F.normalize(self.attention(h) * h, dim=1)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale * self.features(h) @ self.names.T


class Orthogonal(Classifier):
    """FedOT: logits = s · w_g W h / ‖W h‖, W = (I + R)(I − R)⁻¹, R = (X − Xᵀ)/2, X private from 0."""

    private = ("x",)

    def __init__(self, problem: Problem):
        super().__init__(problem)
        d = problem.names.shape[1]
        self.x = nn.Parameter(torch.zeros(d, d))

    def features(self, h: Tensor) -> Tensor:
        skew, one = (self.x - self.x.T) / 2, torch.eye(len(self.x))
        w = (one + skew) @ torch.linalg.inv(one - skew)
        return F.normalize(F.normalize(h, dim=1) @ w.T, dim=1)


class Unconstrained(Classifier):
    """FedLT: the same with any private matrix W, from I."""

    private = ("w",)

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.w = nn.Parameter(torch.eye(problem.names.shape[1]))

    def features(self, h: Tensor) -> Tensor:
        return F.normalize(F.normalize(h, dim=1) @ self.w.T, dim=1)


Model = Classifier | Masked
MODELS: dict[str, type[Model]] = {
    "fedavg": Classifier, "fedclip": Masked, "fedot": Orthogonal, "fedlt": Unconstrained, "fft-gp": Masked,
}  # fmt: skip


# clients


def batches(part: Part, s: Settings, rng: torch.Generator) -> Iterator[Part]:
    for _ in range(s.epochs):
        for rows in torch.randperm(len(part.y), generator=rng).split(s.batch):
            yield Part(part.x[rows], part.y[rows])


def optimiser_of(model: Model, s: Settings) -> torch.optim.Optimizer:
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[s.optimiser]
    return made(model.parameters(), lr=s.lr, weight_decay=s.weight_decay)


def update(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def plain(model: Model, client: Client, s: Settings, rng: torch.Generator) -> None:
    optimiser = optimiser_of(model, s)
    for x, y in batches(client.train, s, rng):
        update(optimiser, F.cross_entropy(model(x), y))


def balanced(model: Model, client: Client, s: Settings, rng: torch.Generator) -> None:
    """BGP, Algorithm 2: a step on the task, then one on the task and the alignment with the model that was sent."""
    sent, optimiser = copy.deepcopy(model), optimiser_of(model, s)
    for train, held in zip(batches(client.train, s, rng), batches(client.train, s, rng), strict=True):
        update(optimiser, F.cross_entropy(model(train.x), train.y))
        with torch.no_grad():
            fixed = sent.features(held.x)
        aligned = coral(model.features(held.x), fixed)
        update(optimiser, F.cross_entropy(model(held.x), held.y) + s.align * aligned)


def coral(a: Tensor, b: Tensor) -> Tensor:
    means = (a.mean(0) - b.mean(0)).square().mean()
    return means + (torch.cov(a.T) - torch.cov(b.T)).square().mean() if len(a) > 1 else means


# server


def average(replies: Sequence[Weights], weights: Sequence[float]) -> Weights:
    return {k: sum(w * r[k] for w, r in zip(weights, replies, strict=True)) for k in replies[0]}  # type: ignore[misc]


@torch.no_grad()
def validation_loss(model: Model, weights: Weights, client: Client) -> float:
    model.load_state_dict(weights, strict=False)
    return float(F.cross_entropy(model(client.val.x), client.val.y))


def fair(
    model: Model, clients: Sequence[Client], replies: Sequence[Weights], a: np.ndarray, t: int, rounds: int
) -> np.ndarray:
    """FAA, Algorithm 1. Weights that Eq. 10 makes negative become 0 and the others are divided by their sum; where a slope
    is not positive, which the paper excludes, the weights are GA's."""
    own = np.array([validation_loss(model, r, c) for r, c in zip(replies, clients, strict=True)])

    def gaps(weights: np.ndarray) -> np.ndarray:
        merged = average(replies, weights.tolist())
        return np.array([validation_loss(model, merged, c) for c in clients]) - own

    gap = gaps(a)
    moved = np.clip(a + 0.2 / len(a) * (1 - (t - 1) / rounds) * gap / np.abs(gap).max(), 0, 1)  # GA
    moved /= moved.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (moved - a) / (gap - gaps(moved))  # Eq. 11
    if not (np.isfinite(slope) & (slope > 0)).all():
        return moved
    best = a + slope * (gap - (slope * gap).sum() / slope.sum())  # Eqs. 9 and 10
    best = np.maximum(best, 0)
    return best / best.sum()


# protocol


class Trained(NamedTuple):
    model: Model  # any weights
    shared: Weights  # with a newcomer's private part
    personal: list[Weights]  # by client


def trained(method: str, problem: Problem, s: Settings, seed: int) -> Trained:
    torch.manual_seed(seed)
    model = MODELS[method](problem)
    start = {k: v.detach().clone() for k, v in model.named_parameters()}
    shared = {k: v for k, v in start.items() if k not in model.private}
    newcomer = {k: v for k, v in start.items() if k in model.private}
    own = [newcomer for _ in problem.clients]
    sizes = np.array([len(c.train.y) for c in problem.clients], float)
    weights = np.ones(len(sizes)) / len(sizes) if s.uniform or method == "fft-gp" else sizes / sizes.sum()
    train: Callable[..., None] = balanced if method == "fft-gp" else plain
    replies: list[Weights] = []
    for t in range(1, s.rounds + 1):
        replies = []
        for k, client in enumerate(problem.clients):
            model.load_state_dict(shared | own[k], strict=False)
            train(model, client, s.in_round(t), torch.Generator().manual_seed(1000 * (1000 * seed + t) + k))
            found = {name: v.detach().clone() for name, v in model.named_parameters()}
            own[k] = {name: found[name] for name in newcomer}
            replies.append({name: found[name] for name in shared})
        if method == "fft-gp":
            weights = fair(model, problem.clients, replies, weights, t, s.rounds)
        shared = average(replies, weights.tolist())
    personal = [r if method == "fft-gp" else shared for r in replies]  # FFT-GP: the model that a client trained last
    return Trained(model, shared | newcomer, [p | o for p, o in zip(personal, own, strict=True)])


def federated(method: str, problem: Problem, s: Settings, seed: int) -> tuple[float, list[float]]:
    """The accuracy of the shared model on the unseen client, and of each client's own model on its test images."""
    model, shared, personal = trained(method, problem, s, seed)
    scores = [accuracy(model, p, c) for p, c in zip(personal, problem.clients, strict=True)]
    return accuracy(model, shared, problem.unseen), scores


@torch.no_grad()
def accuracy(model: Model, weights: Weights, client: Client) -> float:
    model.load_state_dict(weights, strict=False)
    return 100 * float((model(client.test.x).argmax(1) == client.test.y).double().mean())


def problem_of(setup: Setup, pools: Pools) -> Problem:
    """The embeddings of a run's images, by client and split."""
    pool = pools.load(setup)
    federation = federate(pool, setup.config, setup.config.seed)
    data = federation.data
    check_split(federation.domains, data.bounds, data.y, federation.items)
    clients = [
        Client(name, *(Part(data.x[low:high].float(), data.y[low:high]) for low, high in pairwise(b)))
        for name, b in zip(federation.names, data.bounds.tolist(), strict=True)
    ]
    (held,) = federation.unseen
    names = F.normalize(pool.task.names().float(), dim=1)
    return Problem([c for k, c in enumerate(clients) if k != held], clients[held], names, float(pool.task.scale))


def check_split(domains: Sequence[str], bounds: np.ndarray, y: Tensor, items: np.ndarray) -> None:
    """No image is in two places, and each class of a domain is split 60 : 20 : 20 up to one image."""
    assert len(set(items.tolist())) == len(items) and len(set(domains)) == len(domains)
    for b in bounds.tolist():
        counts = [Counter(y[low:high].tolist()) for low, high in pairwise(b)]
        for label, whole in sum(counts, Counter()).items():
            for part, share in zip(counts, (0.6, 0.2, 0.2), strict=True):
                assert abs(part[label] - share * whole) < 1


def settings_of(run: RunFolder) -> Settings:
    """Of a run of fedvlm, as recorded."""
    record = run.record
    local, merge = record.local.settings, record.merge.settings
    assert not local["momentum"] and local["objective"] == "cross-entropy"
    return Settings(
        lr=float(str(local["lr"])),
        batch=int(str(local["batch"])),
        epochs=int(str(local["epochs"])),
        rounds=int(str(record.config["rounds"])),
        optimiser=str(local["optimiser"]),
        weight_decay=float(str(local["weight_decay"])),
        uniform=merge.get("weights") == "uniform",
        align=float(str(local.get("align", 0))),
        cosine=local["schedule"] == "cosine",
    )


def reference(method: str, setup: Setup, s: Settings, pools: Pools) -> dict[str, dict[str, float]]:
    """G, P and C by seed."""
    rows: dict[str, list[tuple[float, list[float]]]] = {}
    for one in single_runs(setup, pools.encode(setup)):
        seed = one.config.seed
        rows.setdefault(str(seed), []).append(federated(method, problem_of(one, pools), s, seed))
    return {seed: summary(found) for seed, found in rows.items()}


def summary(rows: Sequence[tuple[float, list[float]]]) -> dict[str, float]:
    held, kept = [g for g, _ in rows], [p for _, personal in rows for p in personal]
    return {"G": float(np.mean(held)), "P": float(np.mean(kept)), "C": float(np.mean(held + kept))}


HEAD = ["method", *(f"{m}, {who}" for m in MEASURES for who in ("fedvlm", "reference", "difference"))]


def row_of(method: str, ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> list[str]:
    """Means over seeds, and of the differences by seed the mean and standard deviation."""
    cells = [method]
    for m in MEASURES:
        difference = np.array(ours[m]) - np.array(theirs[m])
        spread = f" ± {difference.std(ddof=1):.2f}" if len(difference) > 1 else ""
        cells += [f"{np.mean(ours[m]):.2f}", f"{np.mean(theirs[m]):.2f}", f"{difference.mean():+.2f}{spread}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data/pacs")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[50, 77, 98])
    parser.add_argument("--rounds", type=int, default=0, help="0: as the recipes say")
    parser.add_argument("--jobs", type=int, default=0, help="runs of fedvlm at once; 0: one per core")
    parser.add_argument("--out", default="runs/reference")
    parser.add_argument("--write", action="store_true", help="docs/results.md")
    args = parser.parse_args()
    given = {
        "data": args.data,
        "protocol": "leave-one-domain-out",
        "seeds": args.seeds,
        "out": args.out,
        "evaluate_every": 10,
    }
    given |= {"rounds": args.rounds} if args.rounds else {}
    setups, pools = {m: resolve(m, given | METHODS[m]) for m in args.methods}, Pools()
    torch.set_num_threads(1)
    kept, rows, told, far = Measured(Path(args.out) / "reference", read=False), [], [], []
    for method, runs in run_each(setups, args.jobs, pools).items():
        s = settings_of(runs[0])
        what = hashlib.sha256(json.dumps([*s, args.data, args.seeds]).encode()).hexdigest()[:12]
        theirs = kept(f"{method}-{what}", partial(reference, method, setups[method], s, pools))
        ours = {m: seed_scores(runs, m) for m in MEASURES}
        found = [{m: [100 * float(str(ours[m][int(k)])) for k in theirs] for m in MEASURES}]
        found += [{m: [theirs[k][m] for k in theirs] for m in MEASURES}]
        rows.append(row_of(method, *found))
        told.append(f"{method} lr={s.lr:g}{' schedule=cosine' * s.cosine} rounds={s.rounds}")
        far += [f"{method} {m}" for m in MEASURES if abs(np.mean(found[0][m]) - np.mean(found[1][m])) > LIMIT]
        console.rows(HEAD, rows[-1:])
    if args.write:
        name = Path(args.data).name
        title = f"{name}: beside an independent reference, protocol=leave-one-domain-out (benchmarks/reference.py)"
        notes = [
            f"test accuracy in %, last round; mean over seeds {', '.join(map(str, args.seeds))}, differences by seed ± "
            "standard deviation; the same images in the same splits, other initial values and order of batches",
            f"settings of both: {', '.join(told)}; else as the recipes say",
            "fft-gp: the reference aligns normalised features, and fedvlm features of the embedding's length "
            "(fedvlm/parts/adapters/attention.py), which holds personal models nearer to the shared one",
            f"means further apart than {LIMIT:g} points: {', '.join(far) or 'none'}",
        ]
        write_section(title, HEAD, rows, notes)


if __name__ == "__main__":
    main()
