"""The types everything else uses: parameters, state, a client's data, messages, and the one channel between server and
clients.

Every tensor that a client step sees has a leading client axis, so that the same code serves one client (serial, loopback)
and many side by side (stacked): `params[name]` is [clients, ...], `batch.x` is [clients, examples, ...].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedvlm.errors import FedvlmError as FedvlmError
from fedvlm.errors import NoQuorum as NoQuorum
from fedvlm.seeds import keys, shuffled

if TYPE_CHECKING:
    from fedvlm.guard import Guard
    from fedvlm.local.model import Model
    from fedvlm.merge.base import Merge
    from fedvlm.privacy.descent import PrivateDescent
    from fedvlm.secure.settings import Secure, Summation, Summed

Params = dict[str, Tensor]  # flat, so that a safetensors file can hold it
Note = float | str | dict[int, float] | list[int]  # what is recorded of a round: a number, a word, or by client

SPLITS = ("train", "val", "test")
EFFECT = "effect."  # prefix of what a local rule tells of its mechanism (Local.effects) among a reply's values
WINDOW = 64  # steps planned ahead: one large client among many small ones must not cost memory for all


class State(NamedTuple):
    """All that a run is on the server; together with the clients' private rows it resumes bit for bit."""

    shared: Params  # parameters that every client may read
    private: Params  # the row a new client starts from; a client's own row never travels
    server: Params  # server-only state, never sent
    task: Params = {}  # class embeddings that the server trains and sends: "text", "novel"; empty: the frozen ones

    def message(self, stage: str = "", reference: Params | None = None, extra: Params | None = None) -> Message:
        return Message(self.shared, self.task, reference or {}, extra or {}, stage)


@dataclass(frozen=True)
class Message:
    """What the server sends down with a step."""

    shared: Params  # the shared model
    task: Params = field(default_factory=dict)  # class embeddings that replace the frozen ones: "text", "novel"
    reference: Params = field(default_factory=dict)  # another model, for objectives that stay near one
    extra: Params = field(default_factory=dict)  # what a merge tells its own local rule (SCAFFOLD's control variate)
    stage: str = ""  # of a schedule, by name; "" where there is none

    def parts(self) -> dict[str, Params]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "stage"}

    def to(self, device: torch.device) -> Message:
        moved = {k: on_device(v, device) for k, v in self.parts().items()}
        return Message(**moved, stage=self.stage)

    @property
    def nbytes(self) -> int:
        return sum(nbytes(p) for p in self.parts().values())


class Reply(NamedTuple):
    """What some clients answer, [clients, ...] each."""

    ids: np.ndarray
    values: Params  # by the names of the step's schema
    shared: Params = {}  # the shared parameters as trained, where the step trains

    @property
    def nbytes(self) -> int:
        return nbytes(self.values) + nbytes(self.shared)


class Batch(NamedTuple):
    x: Tensor  # [clients, examples, ...]
    y: Tensor  # [clients, examples, ...]
    weight: Tensor  # [clients, examples]: 1/(real examples), 0 for padding
    step: int = 0  # which of a client's batches this is, the same for all clients side by side

    def mean(self, each: Tensor) -> Tensor:
        """The mean over real examples, one number per client."""
        return (each * self.weight).sum(-1)


class Extra(NamedTuple):
    """Further examples to evaluate on, carried by engines without knowing what they are for."""

    x: Tensor
    y: Tensor | None = None
    aligned: bool = (
        False  # x[i] belongs to example i of the pool, and so to its client; else everybody may read all of it
    )

    def to(self, device: torch.device | str) -> Extra:
        return self._replace(x=self.x.to(device), y=None if self.y is None else self.y.to(device))


@dataclass(frozen=True)
class Data:
    """The examples of a few clients, side by side, in one round of a run.

    A client's rows are contiguous in the pool: train, then val, then test; `bounds` [clients, 4] holds the offsets.
    """

    x: Tensor
    y: Tensor
    bounds: np.ndarray
    ids: np.ndarray
    seed: int = 0
    round: int = 0
    rounds: int = 1
    extras: dict[str, Extra] = field(default_factory=dict)  # "outsiders", "corrupted", "base", "novel", …
    private: PrivateDescent | None = None  # trains in place of local.descent.optimise (dp=example)

    def __len__(self) -> int:
        return len(self.ids)

    def counts(self, split: str) -> np.ndarray:
        at = SPLITS.index(split)
        return self.bounds[:, at + 1] - self.bounds[:, at]  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """Of losses and weights: the dtype of x where that is float32 or float64 (not pixels, characters, float16)."""
        return self.x.dtype if self.x.dtype in (torch.float32, torch.float64) else torch.get_default_dtype()

    def tensor(self, values: np.ndarray) -> Tensor:
        """As a tensor on the device of the examples."""
        return torch.from_numpy(values).to(self.x.device)

    def sizes(self) -> Tensor:
        return self.tensor(self.counts("train")).to(self.dtype)

    def class_counts(self, classes: int) -> Tensor:
        """Training examples by client and class, [clients, classes]."""
        lengths = self.counts("train")
        owner = np.repeat(np.arange(len(self)), lengths)
        cells = self.tensor(owner * classes) + self.y[self.tensor(stretches(self.bounds[:, 0], lengths))]
        return torch.bincount(cells, minlength=len(self) * classes).view(len(self), classes).to(self.dtype)

    def batches(self, size: int, epochs: int = 1) -> Iterator[Batch]:
        """Shuffled training batches. Clients must be ordered largest first: those still training are then always a prefix,
        and a client that is done is left out (a zero gradient would still change its momentum)."""
        counts = self.counts("train")
        if (np.diff(counts) > 0).any():
            raise ValueError("clients must be ordered by training examples, largest first")
        orders = [shuffled(keys(self.seed, self.round, e, clients=self.ids), counts) for e in range(epochs)]
        order = np.stack(orders) + np.repeat(self.bounds[:, 0], counts)  # [epochs, examples]
        starts = np.cumsum(counts) - counts
        steps = -(-counts // size)  # a client starts its next epoch without waiting for larger ones
        total, lane = int(steps.max(initial=0)) * epochs, np.arange(size)
        for low in range(
            0, total, WINDOW
        ):  # planned [step, client, lane] at once, for clients that still train at `low`
            at = np.arange(low, min(low + WINDOW, total))[:, None]
            n = int((steps * epochs > low).sum())
            epoch, first = np.divmod(at, steps[:n])
            left = counts[:n] - first * size
            epoch = np.minimum(epoch, epochs - 1)  # a client past its last step is removed below
            where = (starts[:n] + first * size)[..., None] + np.minimum(lane, left[..., None] - 1)
            rows = self.tensor(order[epoch[..., None], where])
            real = (lane < left[..., None]) / np.minimum(left, size)[..., None]
            labels = self.y[rows] if self.y.dim() == 1 else rows  # masks are too large to be copied ahead of time
            plan = (rows, labels, self.tensor(real).to(self.dtype))
            for step, active, *parts in zip(
                at[:, 0].tolist(), (at < steps[:n] * epochs).sum(1).tolist(), *plan, strict=True
            ):
                which, label, weight = parts if active == n else (part[:active] for part in parts)
                yield Batch(self.take(which), label if self.y.dim() == 1 else self.y[label], weight, step)

    def take(self, rows: Tensor) -> Tensor:
        """x[rows] in a quarter of the time on a CPU (benchmarks/steps.py)."""
        return self.x.index_select(0, rows.reshape(-1)).view(*rows.shape, *self.x.shape[1:])

    def blocks(self, limit: int = 2048) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
        """Every example once, for evaluating one model on all clients: x [1, m, ...], y [m], and the cell of each example,
        3 × (position of its client) + split. 2,048 examples at a time keep a hidden layer in the CPU cache."""
        place = np.argsort(self.bounds[:, 0], kind="stable")
        bounds = self.bounds[place]
        lengths = np.diff(bounds, axis=1)
        cells = np.repeat((3 * place[:, None] + np.arange(3)).reshape(-1), lengths.reshape(-1))
        together = bool((bounds[1:, 0] == bounds[:-1, 3]).all())  # contiguous in the pool: no copy needed
        rows = None if together else stretches(bounds[:, 0], lengths.sum(1))
        for first in range(0, len(cells), limit):
            cell = cells[first : first + limit]
            low = int(bounds[0, 0]) + first
            part = slice(low, low + len(cell)) if rows is None else self.tensor(rows[first : first + len(cell)])
            yield self.x[part][None], self.y[part], cell

    def lanes(self, limit: int = 4096) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
        """Every example once, for evaluating one model per client: x [clients, m, ...], y [clients, m], cells (−1 is
        padding). Yields prefixes of the clients, so the order largest first wastes least."""
        lengths = np.diff(self.bounds, axis=1)
        total = lengths.sum(1)
        width = int(max(min(16, limit), limit // max(1, len(self))))
        width = min(width, max(1, int(total.max(initial=0))))  # a single small client is not padded to a whole block
        lane = np.arange(width)
        split = np.repeat(np.tile(np.arange(3), len(self)), lengths.reshape(-1))
        starts = np.concatenate([[0], np.cumsum(total)])[:-1]
        for first in range(0, int(total.max(initial=0)), width):
            active = int(np.flatnonzero(total > first)[-1]) + 1
            left = total[:active] - first
            real = lane < left[:, None]
            at = first + np.clip(lane, 0, np.maximum(left[:, None] - 1, -first))
            rows = self.tensor(np.where(real, self.bounds[:active, 0, None] + at, self.bounds[0, 0]))
            where = np.minimum(starts[:active, None] + at, len(split) - 1)
            cells = np.where(real, 3 * np.arange(active)[:, None] + split[where], -1)
            yield self.take(rows), self.y[rows], cells


class Engine(Protocol):
    """Carries a named step to clients and brings back their replies, a few clients at a time."""

    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]: ...

    def sums(self, ids: np.ndarray, message: Message, round: int, exchange: int, wanted: Summation) -> Summed: ...

    def placed(self, state: State) -> State:
        """The state, with its shared parameters where the engine computes, if the merge can work there, too."""
        ...

    def outputs(self, message: Message, round: int) -> Params:
        """Logits and features on every test example, by view; {} where they stay with the clients."""
        ...

    def close(self) -> None: ...


@dataclass
class Cohort:
    """The clients of one round. All communication goes through `stream` and `sums`, which count every byte."""

    engine: Engine
    ids: np.ndarray
    round: int
    quorum: float = 0.0
    rounds: int = 1  # of the whole run, for schedules
    population: int = 0  # clients that could have been sampled
    lost: frozenset[int] = frozenset()  # clients that will not answer (dropout=, a rehearsal of failures)
    guard: Guard | None = None  # checks what clients answer; None: everything is accepted
    secure: Secure | None = None  # secure aggregation (secure=true): only sums of training replies are seen
    bytes_down: int = 0
    bytes_up: int = 0
    exchange: int = 0
    notes: dict[str, Note] = field(default_factory=dict)  # goes into the round's record
    # what the mechanisms of local rule and merge did, by name (their `effects`), a list over clients each
    effects: dict[str, list[float]] = field(default_factory=dict)

    def stream(self, step: str, message: Message) -> Iterator[Reply]:
        """Replies a few clients at a time, so that memory does not grow with the cohort."""
        if self.secure and step == "train":
            raise FedvlmError("secure=true: this merge asks for the replies of single clients; use merge=mean")
        asked, clients = self._to_ask()
        self.bytes_down += clients * message.nbytes
        replies = self._counted(self.engine.run(step, asked, message, self.round, self.exchange))
        answered = 0
        for reply in self.guard.accepted(replies, step, message, self.round) if self.guard else replies:
            answered += len(reply.ids)
            for name in (k for k in reply.values if k.startswith(EFFECT)):
                self.effects.setdefault(name.removeprefix(EFFECT), []).extend(reply.values[name].tolist())
            yield reply
        self._end_exchange(answered)

    def acted(self, **effects: float) -> None:
        """What a merge did in this round, by the names of its `effects`."""
        self.effects |= {name: [value] for name, value in effects.items()}

    def sums(self, merge: Merge, model: Model, message: Message) -> Params:
        """Has the clients train; the sums over them of the merge's `summands`, and nothing of single clients."""
        if self.secure is None:
            raise ValueError("sums are asked for with secure=true only")
        asked, clients = self._to_ask()
        wanted = self.secure.summation(merge, model, message.shared, clients)
        self._check_threshold(len(asked), clients, wanted)
        down, up = wanted.traffic()
        self.bytes_down += clients * (message.nbytes + down)
        found = self.engine.sums(asked, message, self.round, self.exchange, wanted)
        self.bytes_up += len(found.ids) * up
        self._end_exchange(len(found.ids))
        self._check_threshold(len(found.ids), clients, wanted)
        sums = wanted.plan.decode(found.total, len(found.ids))
        self.notes |= {"in_sum": found.ids.tolist(), "fixed_point_step": wanted.plan.step}
        self.notes |= {"clipped_values": int(sums["clipped"]), "bound": "does not act: replies are masked"}
        return sums

    def _to_ask(self) -> tuple[np.ndarray, int]:
        """The clients to ask, and how many that are with those that will not answer (dropout=)."""
        alive = self.ids[~np.isin(self.ids, list(self.lost))] if self.lost else self.ids
        last = self.round == self.rounds
        asked = self.guard.to_ask(alive, self._need, self.round, last) if self.guard else alive
        return asked, len(self.ids) - len(alive) + len(asked)

    @property
    def _need(self) -> int:
        return max(1, int(np.ceil(self.quorum * len(self.ids))))

    def _end_exchange(self, answered: int) -> None:
        self.exchange += 1
        self.notes["answered"] = answered
        if answered < self._need:
            raise NoQuorum(
                f"round {self.round}: {answered} of {len(self.ids)} clients answered and quorum={self.quorum:g} needs "
                f"{self._need}; bring clients back and `fedvlm resume` the run, or lower quorum="
            )

    def _check_threshold(self, present: int, clients: int, wanted: Summation) -> None:
        if present < wanted.threshold:
            raise NoQuorum(
                f"round {self.round}: {present} of {clients} clients can be in a sum, and secure=true needs "
                f"{wanted.threshold} (threshold=); bring clients back and `fedvlm resume` the run"
            )

    def _counted(self, replies: Iterator[Reply]) -> Iterator[Reply]:
        for reply in replies:
            self.bytes_up += reply.nbytes
            yield reply

    def ask(self, step: str, message: Message) -> Reply:
        """All replies at once, ordered by client id; a client that failed is absent."""
        replies = list(self.stream(step, message))
        ids = np.concatenate([r.ids for r in replies]) if replies else np.empty(0, np.int64)
        order = np.argsort(ids)
        at = torch.from_numpy(order)

        def joined(parts: list[Params]) -> Params:
            return {k: torch.cat([p[k] for p in parts])[at] for k in (parts[0] if parts else {})}

        return Reply(ids[order], joined([r.values for r in replies]), joined([r.shared for r in replies]))

    def ask_some(self, ids: np.ndarray, step: str, message: Message) -> Reply:
        """As `ask`, for these clients only; the bytes count for this cohort."""
        part = replace(self, ids=ids, notes={})
        try:
            return part.ask(step, message)
        finally:
            self.bytes_down, self.bytes_up = part.bytes_down, part.bytes_up


def stretches(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers start … start + length − 1 of each stretch, one after the other."""
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()))


def is_running_statistic(name: str) -> bool:
    """Whether a parameter is a running statistic (batch norm): it is averaged like any other, but follows the batches
    instead of the loss; excluded from proximal terms, control variates and meta-steps."""
    return name.rpartition(".")[2].startswith("running_")


def nbytes(params: Params) -> int:
    return sum(v.numel() * v.element_size() for v in params.values())


def select(params: Params, names: Iterable[str]) -> Params:
    return {k: params[k] for k in names}


def on_device(params: Params, device: torch.device) -> Params:
    return {k: v.to(device) for k, v in params.items()}


def copy_per_client(params: Params, clients: int) -> Params:
    """A separate copy for each client, [clients, ...]."""
    return {k: v.expand(clients, *v.shape).clone(memory_format=torch.contiguous_format) for k, v in params.items()}


def with_client_axis(params: Params) -> Params:
    """A client axis of length one, which broadcasts: the same parameters for every client, without a copy."""
    return {k: v[None] for k, v in params.items()}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weightᵀ + bias for each client. Written weight-first, so that the gradient of the (large) weight has the memory
    layout of the weight: 1.5 times as fast on a CPU (benchmarks/steps.py)."""
    out = (torch.bmm(weight, x.mT) if len(weight) == len(x) else weight @ x.mT).mT
    return out if bias is None else out + bias[:, None]
