"""What everything else is made of: parameters, state, a client's data, and the one wire between server and clients.

Every tensor a client step sees carries a leading client axis, so one piece of code serves one client (serial, loopback)
and many side by side (stacked): `params[name]` is [clients, ...], `batch.x` is [clients, examples, ...].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedvlm.seeds import keys, shuffled

Params = dict[str, Tensor]  # flat: a safetensors file, a Flower ArrayRecord
Halves = dict[str, tuple[Tensor, Tensor]]  # "base", "novel" → x and y of all test examples of these classes

SPLITS = ("train", "val", "test")
TASK = "task."  # before what a server says of the task itself: task.text, task.novel
REFERENCE = "reference."  # before the names of a model to stay near
WINDOW = 64  # steps planned ahead: one large client among many small ones must not cost memory for all


class FedvlmError(Exception):
    """Something the user can put right; shown without a traceback."""


class State(NamedTuple):
    """All that a run is on the server; with the clients' own rows it resumes bit for bit."""

    shared: Params  # every client may read it
    private: Params  # the row a newcomer starts from; a client's own row never travels
    server: Params  # nobody else's business


class Batch(NamedTuple):
    x: Tensor  # [clients, examples, ...]
    y: Tensor  # [clients, examples, ...]
    weight: Tensor  # [clients, examples]: 1/(real examples), 0 for padding
    step: int = 0  # which of a client's batches this is, the same for all side by side

    def mean(self, each: Tensor) -> Tensor:
        """One number a client, padding left out."""
        return (each * self.weight).sum(-1)


@dataclass(frozen=True)
class Data:
    """The examples of a few clients, side by side, at one moment of a run.

    A client's rows lie together in the pool, train then val then test; `bounds` [clients, 4] says where.
    """

    x: Tensor
    y: Tensor
    bounds: np.ndarray
    ids: np.ndarray
    seed: int = 0
    round: int = 0
    rounds: int = 1
    outside: Tensor | None = None  # examples of no class, which everybody may look at
    corrupted: Tensor | None = None  # of each example so many corrupted versions, [examples, versions, …]
    halves: Halves = field(default_factory=dict)  # which everybody may look at

    def __len__(self) -> int:
        return len(self.ids)

    def counts(self, split: str) -> np.ndarray:
        at = SPLITS.index(split)
        return self.bounds[:, at + 1] - self.bounds[:, at]  # type: ignore[no-any-return]

    @property
    def kind(self) -> torch.dtype:
        """Of losses and weights: the features', where those are neither whole numbers (pixels, characters) nor halves."""
        return self.x.dtype if self.x.dtype in (torch.float32, torch.float64) else torch.get_default_dtype()

    def here(self, values: np.ndarray) -> Tensor:
        """On the device where the examples lie."""
        return torch.from_numpy(values).to(self.x.device)

    def sizes(self) -> Tensor:
        return self.here(self.counts("train")).to(self.kind)

    def holds(self, classes: int) -> Tensor:
        """Training examples by client and class, [clients, classes]."""
        rows = [torch.bincount(self.y[int(low) : int(high)], minlength=classes) for low, high, *_ in self.bounds]
        return torch.stack(rows).to(self.kind)

    def bent(self) -> Data:
        """The corrupted versions of the test examples, as data of their own."""
        assert self.corrupted is not None
        n, test = self.corrupted.shape[1], self.bounds[:, [2, 2, 2, 3]]
        return replace(self, x=self.corrupted.flatten(0, 1), y=self.y.repeat_interleave(n, 0), bounds=n * test)

    def batches(self, size: int, epochs: int = 1) -> Iterator[Batch]:
        """Shuffled training batches. Clients must come largest first: those still training are always a prefix,
        so a client that is done costs nothing and moves no more (a zero gradient would still feed momentum)."""
        counts = self.counts("train")
        if (np.diff(counts) > 0).any():
            raise ValueError("clients must be ordered by training examples, largest first")
        orders = [shuffled(keys(self.seed, self.round, e, clients=self.ids), counts) for e in range(epochs)]
        order = np.stack(orders) + np.repeat(self.bounds[:, 0], counts)  # [epochs, examples]
        starts = np.cumsum(counts) - counts
        steps = -(-counts // size)  # a client goes on to its next epoch without waiting for larger ones
        total, lane = int(steps.max(initial=0)) * epochs, np.arange(size)
        for low in range(0, total, WINDOW):  # planned [step, client, lane] at once, for those who still train at `low`
            at = np.arange(low, min(low + WINDOW, total))[:, None]
            n = int((steps * epochs > low).sum())
            epoch, first = np.divmod(at, steps[:n])
            left = counts[:n] - first * size
            epoch = np.minimum(epoch, epochs - 1)  # past its end a client is cut off below
            where = (starts[:n] + first * size)[..., None] + np.minimum(lane, left[..., None] - 1)
            rows = self.here(order[epoch[..., None], where])
            real = (lane < left[..., None]) / np.minimum(left, size)[..., None]
            labels = self.y[rows] if self.y.dim() == 1 else rows  # masks are too large to be laid out ahead
            plan = (rows, labels, self.here(real).to(self.kind))
            for step, active, *parts in zip(
                at[:, 0].tolist(), (at < steps[:n] * epochs).sum(1).tolist(), *plan, strict=True
            ):
                which, label, weight = parts if active == n else (part[:active] for part in parts)
                yield Batch(self.pick(which), label if self.y.dim() == 1 else self.y[label], weight, step)

    def pick(self, rows: Tensor) -> Tensor:
        """x at these rows; a quarter of the time of x[rows] on a CPU (benchmarks/steps.py)."""
        return self.x.index_select(0, rows.reshape(-1)).view(*rows.shape, *self.x.shape[1:])

    def blocks(self, limit: int = 2048) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
        """Every example once, as one row of examples shared by all clients: x [1, m, ...], y [m], and for each
        example its cell, 3 × (position of its client) + split. For work in which all clients use the same model.
        2,048 examples at a time keep a hidden layer in cache."""
        place = np.argsort(self.bounds[:, 0], kind="stable")
        bounds = self.bounds[place]
        lengths = np.diff(bounds, axis=1)
        cells = np.repeat((3 * place[:, None] + np.arange(3)).reshape(-1), lengths.reshape(-1))
        together = bool((bounds[1:, 0] == bounds[:-1, 3]).all())  # neighbours in the pool need no copy
        rows = None if together else np.concatenate([np.arange(b[0], b[3]) for b in bounds])
        for first in range(0, len(cells), limit):
            cell = cells[first : first + limit]
            low = int(bounds[0, 0]) + first
            part = slice(low, low + len(cell)) if rows is None else self.here(rows[first : first + len(cell)])
            yield self.x[part][None], self.y[part], cell

    def lanes(self, limit: int = 4096) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
        """Every example once, each in its client's lane: x [clients, m, ...], y [clients, m], cells (−1 is padding).
        For work in which each client uses a model of its own. Yields prefixes of the clients: largest first is best."""
        lengths = np.diff(self.bounds, axis=1)
        total = lengths.sum(1)
        width = int(max(min(16, limit), limit // max(1, len(self))))
        lane = np.arange(width)
        split = np.repeat(np.tile(np.arange(3), len(self)), lengths.reshape(-1))
        starts = np.concatenate([[0], np.cumsum(total)])[:-1]
        for first in range(0, int(total.max(initial=0)), width):
            active = int(np.flatnonzero(total > first)[-1]) + 1
            left = total[:active] - first
            real = lane < left[:, None]
            at = first + np.clip(lane, 0, np.maximum(left[:, None] - 1, -first))
            rows = self.here(np.where(real, self.bounds[:active, 0, None] + at, self.bounds[0, 0]))
            where = np.minimum(starts[:active, None] + at, len(split) - 1)
            cells = np.where(real, 3 * np.arange(active)[:, None] + split[where], -1)
            yield self.pick(rows), self.y[rows], cells


class Engine(Protocol):
    """Carries a named step to clients and brings back what they reply, a few clients at a time."""

    def run(
        self, step: str, ids: np.ndarray, down: Params, round: int, exchange: int
    ) -> Iterator[tuple[np.ndarray, Params]]: ...


@dataclass
class Cohort:
    """The clients of one round. `ask` and `stream` are the only wire, so they know every byte that crosses."""

    engine: Engine
    ids: np.ndarray
    round: int
    quorum: float = 0.0
    rounds: int = 1  # of the whole run: schedules need it
    population: int = 0  # clients that could have been asked
    lost: frozenset[int] = frozenset()  # clients that will not answer (a rehearsal of failures)
    bytes_down: int = 0
    bytes_up: int = 0
    exchange: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    def stream(self, step: str, down: Params) -> Iterator[tuple[np.ndarray, Params]]:
        """Replies a few clients at a time, [clients, ...] each: memory does not grow with the cohort."""
        self.bytes_down += len(self.ids) * nbytes(down)
        asked = np.array([i for i in self.ids if int(i) not in self.lost], dtype=np.int64)
        answered = 0
        for ids, up in self.engine.run(step, asked, down, self.round, self.exchange):
            answered += len(ids)
            self.bytes_up += nbytes(up)
            yield ids, up
        self.exchange += 1
        self.notes["answered"] = answered
        need = max(1, int(np.ceil(self.quorum * len(self.ids))))
        if answered < need:
            raise NoQuorum(
                f"round {self.round}: {answered} of {len(self.ids)} clients answered and quorum={self.quorum:g} needs "
                f"{need}; bring clients back and `fedvlm resume` the run, or lower quorum="
            )

    def ask(self, step: str, down: Params) -> tuple[np.ndarray, Params]:
        """All replies at once, in the order of client ids; a client that failed is absent."""
        parts = list(self.stream(step, down))
        ids = np.concatenate([ids for ids, _ in parts]) if parts else np.empty(0, np.int64)
        order = np.argsort(ids)
        at = torch.from_numpy(order)
        return ids[order], {k: torch.cat([up[k] for _, up in parts])[at] for k in (parts[0][1] if parts else {})}

    def ask_some(self, ids: np.ndarray, step: str, down: Params) -> tuple[np.ndarray, Params]:
        """The same of these clients only; the bytes are still this cohort's."""
        part = replace(self, ids=ids, notes={})
        try:
            return part.ask(step, down)
        finally:
            self.bytes_down, self.bytes_up = part.bytes_down, part.bytes_up


class NoQuorum(FedvlmError):
    """Too few clients answered."""


def tracked(name: str) -> bool:
    """Whether a parameter is a running statistic: it travels and is averaged like any other, but follows what a batch
    shows, not the loss; nothing ties, corrects or looks ahead along it."""
    return name.rpartition(".")[2].startswith("running_")


def told(name: str) -> bool:
    """Whether an entry of a message is about the task or the moment (class embeddings, a reference model), not a model's
    own: it goes down, is not trained, and does not come up."""
    return name.startswith((TASK, REFERENCE))


def nbytes(params: Params) -> int:
    return sum(v.numel() * v.element_size() for v in params.values())


def only(params: Params, names: Iterable[str]) -> Params:
    return {k: params[k] for k in names}


def spread(params: Params, clients: int) -> Params:
    """A copy for each client, to train on."""
    return {k: v.expand(clients, *v.shape).clone(memory_format=torch.contiguous_format) for k, v in params.items()}


def lift(params: Params) -> Params:
    """A client axis of one: the same parameters for everybody, not copied."""
    return {k: v[None] for k, v in params.items()}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weightᵀ + bias, client by client. Written weight-first: the gradient of the (large) weight then comes out
    of a batched product in the layout it is stored in, 1.5 times as fast on a CPU (benchmarks/steps.py)."""
    out = (torch.bmm(weight, x.mT) if len(weight) == len(x) else weight @ x.mT).mT
    return out if bias is None else out + bias[:, None]
