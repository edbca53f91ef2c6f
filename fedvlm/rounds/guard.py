"""What the server accepts from clients: replies that fit their step's schema, updates of a bounded length, and nothing more
from a client that offended in three rounds. Every engine's replies pass through here (core.Cohort)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.data import SPLITS, Extra
from fedvlm.core.records import RoundRecord
from fedvlm.core.schema import Field, Schema
from fedvlm.core.state import Message, Params, Reply
from fedvlm.rounds import steps
from fedvlm.system.names import printable

if TYPE_CHECKING:
    from fedvlm.rounds.method import Method

OFFENCES = 3  # rounds with an offence after which a client is no longer asked
LONGEST_REST = 8  # rounds
FAR = 300  # an update of more than so many medians is refused; the longest honest one had 79 (docs/robustness.md)
HELD_BYTES, HELD_CLIENTS = 256 << 20, 8  # replies that are held back until the median length of updates is known
SLACK = 1e-4  # of a limit, for sums in float32
NEARLY = 0.99  # of the bound: from there on, lengths are measured in float64
TEXT = 300  # characters of a reason that came from a client


class Offence(NamedTuple):
    client: int
    reason: str


class Measured(NamedTuple):
    reply: Reply
    lengths: Tensor  # of updates, [clients, 2], summed in float32


class Guard:
    def __init__(
        self,
        method: Method,
        names: tuple[str, ...],
        declared: np.ndarray,
        extras: Mapping[str, Extra],
        bound: float = 0.0,
        log: Callable[[str], None] = print,
    ):
        """`declared` [clients, 3]: how many train, val and test examples each client said it has when it joined."""
        self.method, self.names, self.declared, self.extras = method, names, declared, extras
        self.bound, self.log = bound, log
        self.offences: dict[int, int] = {}  # rounds with an offence, by client
        self.reasons: dict[int, str] = {}  # of this round
        self.last = ""  # why a client was left out in this round, the last of them
        self.late: set[int] = set()  # in this round
        self.lateness: dict[int, int] = {}  # rounds in a row, by client
        self.rests_until: dict[int, int] = {}
        self.bounded: dict[int, float] = {}  # of this round: an update's length, as a multiple of the median

    @property
    def quarantined(self) -> list[int]:
        return sorted(i for i, n in self.offences.items() if n >= OFFENCES)

    def schema(self, step: str) -> Schema:
        return steps.step_of(step).schema(self.method, self.extras)

    def offence(self, client: int, round: int, reason: str) -> None:
        self.reasons[client] = printable(reason, TEXT)
        self.failed(client, round, reason)

    def failed(self, client: int, round: int, reason: str, late: bool = False) -> None:
        """Record a client that did not answer, which is no offence; one that is late is asked less often."""
        self.last = f"client {self.names[client]} is left out: {printable(reason, TEXT)}"
        self.log(f"round {round}: {self.last}")
        if late:
            self.late.add(client)

    def to_ask(self, ids: np.ndarray, need: int, round: int, last: bool) -> np.ndarray:
        """The clients to ask: without those in quarantine, and without those that were late and rest, unless `need`
        clients cannot be reached otherwise or it is the last round."""
        allowed = ids[~np.isin(ids, self.quarantined)]
        resting = [i for i, until in self.rests_until.items() if round <= until]
        rested = allowed[~np.isin(allowed, resting)]
        return rested if len(rested) >= need and not last else allowed

    def end_round(self, round: int) -> RoundRecord:
        """Counts the offences of a round, plans rests, and returns what belongs into the round's record."""
        for i in self.reasons:
            self.offences[i] = self.offences.get(i, 0) + 1
        for i in list(self.lateness):
            if i not in self.late and self.rests_until.get(i, 0) < round:
                del self.lateness[i]
        for i in self.late:
            self.lateness[i] = self.lateness.get(i, 0) + 1
            self.rests_until[i] = round + min(LONGEST_REST, 2 ** (self.lateness[i] - 1))
        name = self.names
        found: RoundRecord = {
            "offences": {name[i]: text for i, text in sorted(self.reasons.items())},
            "quarantined": [name[i] for i in self.quarantined],
            "late": [name[i] for i in sorted(self.late)],
            "bounded": {name[i]: round_to(x) for i, x in sorted(self.bounded.items())},
        }
        self.reasons, self.late, self.bounded, self.last = {}, set(), {}, ""
        return {k: v for k, v in found.items() if v}  # type: ignore[return-value]

    def restore(self, offenders: Iterator[Mapping[str, str]]) -> None:
        """The offences of earlier rounds, from their records."""
        known = [named for named in offenders if named]
        position = {name: i for i, name in enumerate(self.names)} if known else {}
        for named in known:
            for i in (position[name] for name in named if name in position):
                self.offences[i] = self.offences.get(i, 0) + 1

    def inspect(self, step: str, message: Message, round: int) -> Inspection:
        """The inspection of the replies to one message."""
        return Inspection(self, self.schema(step), message.shared, round)

    def violations(self, reply: Reply, schema: Schema, sent: Params) -> list[Offence]:
        """What is wrong with the replies of these clients: names, shapes, dtypes, numbers that are not finite, ranges."""
        return self.examine(reply, schema, sent)[0]

    def examine(self, reply: Reply, schema: Schema, sent: Params) -> tuple[list[Offence], Tensor]:
        """What is wrong, and how long the updates are (see `update_lengths`)."""
        ids: list[int] = reply.ids.tolist()
        everybody, nothing = torch.ones(len(ids), dtype=torch.bool), torch.empty(0)
        expected = {k: (f.shape, torch.get_default_dtype()) for k, f in schema.values.items()}
        trained = {k: (tuple(v.shape), v.dtype) for k, v in sent.items()} if schema.shared else {}
        for params, wanted in ((reply.values, expected), (reply.shared, trained)):
            if reason := misshapen(params, wanted, len(ids)):
                return told(ids, everybody, reason), nothing
        if len({reply.values[k].shape[1] for k in schema.ragged}) > 1:
            return told(ids, everybody, "sent values of different lengths for the same examples"), nothing
        declared = torch.from_numpy(self.declared[reply.ids])
        lengths, found = update_lengths(reply, schema, sent), list[Offence]()
        if not lengths.isfinite().all():
            for name, value in reply.shared.items():
                found += told(ids, ~finite_clients(value), f"sent {name} with numbers that are not finite")
        for name, value in reply.shared.items():
            if name.endswith("running_var"):
                found += told(ids, (value.flatten(1) < 0).any(1), f"sent {name}, a variance, below zero")
        for name, field in schema.values.items():
            value = reply.values[name]
            if name in schema.ragged:
                too_long = declared[:, 0] < value.shape[1]
                found += told(ids, too_long, f"sent more {name} than the examples it declared")
            wrong = out_of_range(value, field, declared)
            if wrong.any():
                found += told(ids, ~finite_clients(value), f"sent {name} with numbers that are not finite")
                found += told(ids, wrong, f"sent {name} out of its range")
        return found, lengths


class Inspection:
    """Lets through the replies of one exchange that fit the schema, with updates of a bounded length.

    Replies are held back until the median is known: that of the whole round or, where this takes more memory than
    HELD_BYTES, of the clients that fit in there."""

    def __init__(self, guard: Guard, schema: Schema, sent: Params, round: int):
        self.guard, self.schema, self.sent, self.round = guard, schema, sent, round
        self.bounds = schema.shared and bool(guard.bound)
        self.held: list[Measured] = []
        self.clients = self.size = 0
        self.median: Tensor | None = None

    def passed(self, reply: Reply) -> Iterator[Reply]:
        """What may go on now that this reply came: it, without clients that offended, or replies that were held back."""
        one = self.fitting(reply)
        if one is None:
            return
        if not self.bounds:
            yield one.reply
            return
        self.held.append(one)
        self.clients, self.size = self.clients + len(one.reply.ids), self.size + one.reply.nbytes
        if self.median is None and self.clients >= HELD_CLIENTS and self.size > HELD_BYTES:
            self.median = medians([exact(early, self.schema, self.sent) for early in self.held])
        if self.median is not None:
            yield from self.released(self.median)

    def rest(self) -> Iterator[Reply]:
        """The replies that are still held back when all have come."""
        if not self.held:
            return
        median = medians(self.held)
        if any((excess(one, median) > NEARLY * self.guard.bound).any() for one in self.held):
            self.held = [exact(one, self.schema, self.sent) for one in self.held]
            median = medians(self.held)
        yield from self.released(median)

    def fitting(self, reply: Reply) -> Measured | None:
        """The reply without clients whose answers do not fit; None where nobody is left."""
        offences, lengths = self.guard.examine(reply, self.schema, self.sent)
        found = dict(reversed(offences))  # the first of each client is told
        for i, reason in found.items():
            self.guard.offence(i, self.round, reason)
        keep = ~np.isin(reply.ids, list(found))
        if keep.all():
            return Measured(reply, lengths)
        return only(Measured(reply, lengths), torch.from_numpy(np.flatnonzero(keep))) if keep.any() else None

    def released(self, median: Tensor) -> Iterator[Reply]:
        """The replies held back, without updates that are far too long, and with those shortened that are too long."""
        held, self.held = self.held, []
        for one in held:
            if (excess(one, median) <= NEARLY * self.guard.bound).all():
                yield one.reply
                continue
            one = exact(one, self.schema, self.sent)
            times = excess(one, median)
            far = one.lengths[:, 0] > FAR * median[0]  # of the model itself: control variates may differ more
            for at in far.nonzero()[:, 0].tolist():
                reason = f"sent an update of {one.lengths[at, 0] / median[0]:.3g} times the round's median length"
                self.guard.offence(int(one.reply.ids[at]), self.round, reason)
            near = (~far).nonzero()[:, 0]
            if len(near):
                for at in ((times > self.guard.bound) & ~far).nonzero()[:, 0].tolist():
                    self.guard.bounded[int(one.reply.ids[at])] = float(times[at])
                yield self.shortened(*only(one, near), median)

    def shortened(self, reply: Reply, lengths: Tensor, median: Tensor) -> Reply:
        factor = (self.guard.bound * median / lengths).nan_to_num(1.0).clamp(max=1.0)  # [clients, 2]

        def scaled(value: Tensor, origin: Tensor, by: Tensor) -> Tensor:
            by = by.to(value.device).view(-1, *[1] * (value.dim() - 1))
            moved = origin + by * (value.double() - origin)
            return torch.where(by < 1, moved.to(value.dtype), value)

        zero, fields = torch.zeros((), dtype=torch.float64), self.schema.values
        shared = {k: scaled(v, self.sent[k].double(), factor[:, 0]) for k, v in reply.shared.items()}
        moves = {k: scaled(v, zero, factor[:, 1]) for k, v in reply.values.items() if fields[k].update}
        return Reply(reply.ids, reply.values | moves, shared)


def misshapen(params: Params, expected: dict[str, tuple[tuple[int, ...], torch.dtype]], clients: int) -> str:
    if params.keys() != expected.keys():
        odd = sorted(params.keys() ^ expected.keys())
        return f"sent other names than agreed: {', '.join(odd[:5])}"
    for name, (shape, dtype) in expected.items():
        value, wanted = params[name], (clients, *shape)
        fits = value.dim() == len(wanted) and all(n in (-1, m) for n, m in zip(wanted, value.shape, strict=True))
        if not fits or value.dtype != dtype:
            return f"sent {name} as {tuple(value.shape)} {value.dtype}, not {wanted} {dtype}"
    return ""


def out_of_range(value: Tensor, field: Field, declared: Tensor) -> Tensor:
    """Which clients' values are, or are not finite, [clients]. `declared` [clients, 3]: their examples."""
    flat = value.reshape(len(value), -1)
    limits = [abs(x) for x in (field.low, field.high) if np.isfinite(x)]
    slack = 0.0 if field.whole else SLACK * max([1.0, *limits])
    largest = torch.finfo(value.dtype).max
    low, high = max(field.low - slack, -largest), min(field.high + slack, largest)
    if not field.per:
        fits = (flat >= low) & (flat <= high)  # no comparison holds for NaN
    else:
        if field.per == "split":  # the limits of each split, repeated over the other axes
            counts = declared.repeat_interleave(flat.shape[1] // len(SPLITS), dim=1)
        else:
            counts = declared[:, [SPLITS.index(field.per)]]
        fits = (flat >= (low * counts).clamp(min=-largest)) & (flat <= (high * counts).clamp(max=largest))
    if field.whole:
        fits &= flat == flat.round()
    return ~fits.all(1)


def update_lengths(reply: Reply, schema: Schema, sent: Params, dtype: torch.dtype | None = None) -> Tensor:
    """[clients, 2]: how far the shared parameters moved, and how long the values are that act like them. Summed in the dtype
    of the numbers, an eighth of the time that float64 takes, or in the given one."""

    def length(parts: Iterable[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(p.reshape(len(p), -1), dim=1, dtype=dtype).double().cpu() for p in parts]
        return torch.stack(norms).norm(dim=0) if norms else torch.zeros(len(reply.ids), dtype=torch.float64)

    moved = length(v.to(dtype or v.dtype) - sent[k] for k, v in reply.shared.items())
    lengths = torch.stack([moved, length(reply.values[k] for k, f in schema.values.items() if f.update)], 1)
    if dtype is None and not lengths.isfinite().all():  # differences and squares of large numbers may overflow
        return update_lengths(reply, schema, sent, torch.float64)
    return lengths


def exact(one: Measured, schema: Schema, sent: Params) -> Measured:
    """Measure with lengths that do not depend on how many clients were measured together."""
    return Measured(one.reply, update_lengths(one.reply, schema, sent, torch.float64))


def excess(one: Measured, median: Tensor) -> Tensor:
    """How many medians long the longer of a client's two updates is, [clients]."""
    return (one.lengths / median).nan_to_num(0.0).amax(1)  # 0/0: nobody moved


def finite_clients(value: Tensor) -> Tensor:
    """Mask of clients whose values are all finite, [clients]."""
    return value.reshape(len(value), -1).isfinite().all(1)


def only(one: Measured, at: Tensor) -> Measured:
    reply = one.reply
    return Measured(Reply(reply.ids[at.numpy()], pick(reply.values, at), pick(reply.shared, at)), one.lengths[at])


def medians(held: list[Measured]) -> Tensor:
    """Medians over the clients that moved at all, [2]; of fewer than three clients there is no telling who is far
    out."""
    lengths = torch.cat([one.lengths for one in held])
    found = [np.median(column[column > 0]) if (column > 0).sum() >= 3 else np.inf for column in lengths.T.numpy()]
    return torch.tensor(found, dtype=torch.float64)


def told(ids: list[int], wrong: Tensor, reason: str) -> list[Offence]:
    return [Offence(ids[at], reason) for at in wrong.nonzero()[:, 0].tolist()]


def pick(params: Params, at: Tensor) -> Params:
    return {k: v[at] for k, v in params.items()}


def round_to(value: float) -> float:
    return float(f"{value:.4g}")
