"""A method is an adapter (what is trained), a local rule (how a client trains) and a merge (what the server does)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedvlm.adapters.base import READ, Adapter, Task
from fedvlm.core import TASK, Cohort, Data, FedvlmError, Params, State, lift, only
from fedvlm.evaluate.detection import MEASURES, SCORES
from fedvlm.local.copies import COPY, adapters
from fedvlm.local.model import Model
from fedvlm.local.sgd import Sgd
from fedvlm.merge.mean import Mean

# what a server may ask; nothing else crosses the wire
STEPS = ("train", "gauge", "score", "open.shared", "open.personal", "diagnose")


GAUGES = ("before", "after")  # validation loss of what was sent and of what was trained, where a merge needs them
MET = COPY + "met"  # in a client's row: whether it ever trained, where that matters

Parts = Iterator[tuple[Tensor, Tensor, np.ndarray]]  # score, loss and cell of some examples


@dataclass(frozen=True)
class Method:
    adapter: Adapter
    local: Sgd
    merge: Mean
    task: Task
    seed: int = 0
    newcomer: Params = field(default_factory=dict, compare=False)  # the row of a client nobody has seen
    initial: Params = field(default_factory=dict, compare=False)  # the shared parameters at the start

    @classmethod
    def build(cls, adapter: Adapter, local: Sgd, merge: Mean, task: Task, seed: int = 0) -> Method:
        sends = local.sends(task)
        missing = [n for n in merge.needs if n not in (*sends, *GAUGES, *merge.collects(task))]
        if missing:
            raise FedvlmError(
                f"merge={name_of(merge)} needs uploads named {', '.join(missing)}, and local={name_of(local)} sends "
                f"{', '.join(sends) or 'none'}; use merge=mean, or a local rule that sends them"
            )
        if local.partner not in ("", name_of(merge)) or merge.partner not in ("", name_of(local)):
            one, other = ("local", local.partner) if local.partner else ("merge", merge.partner)
            raise FedvlmError(
                f"{one}={other} works only together with {'merge' if one == 'local' else 'local'}={other}: they exchange "
                "what no other part knows; give both"
            )
        for axis, part in (("local", local), ("merge", merge)):
            if why := part.refuses(adapter):
                raise FedvlmError(f"{axis}={name_of(part)} does not go with adapter={name_of(adapter)}: it {why}")
        if local.objective not in adapter.learns.losses:
            raise FedvlmError(
                f"objective={local.objective}: adapter={name_of(adapter)} learns {adapter.learns.what}, and its loss is "
                f"{', '.join(adapter.learns.losses)}"
            )
        params = adapter.init(task, seed)
        unknown = [n for n in adapter.private if n not in params]
        if unknown:
            raise FedvlmError(
                f"private={','.join(unknown)}: adapter={name_of(adapter)} has no such parameter; "
                f"it has {', '.join(params) or 'none'}"
            )
        shared = {k: v for k, v in params.items() if k not in adapter.private}
        if lacking := [n for n in merge.wants if n not in shared]:
            raise FedvlmError(
                f"merge={name_of(merge)} works on shared parameters named {', '.join(merge.wants)}, and adapter="
                f"{name_of(adapter)} has no {', '.join(lacking)}; use merge=mean, or an adapter that has them"
            )
        newcomer = {k: v for k, v in params.items() if k in adapter.private} | local.rows(shared)
        newcomer |= {MET: torch.zeros(())} if adapter.pairs and adapter.private else {}
        return cls(adapter, local, merge, task, seed, newcomer, shared)

    @property
    def model(self) -> Model:
        return Model(self.adapter, self.task)

    @property
    def trains(self) -> bool:
        return bool(self.initial or self.newcomer)

    @property
    def generalises(self) -> bool:
        """Whether there is a shared model at all: not where everything trained is private."""
        return bool(self.initial) or not self.newcomer

    @property
    def personalises(self) -> bool:
        """Whether a client's own model differs from the shared one."""
        return bool(self.newcomer) or self.local.adapts

    @property
    def sends(self) -> dict[str, tuple[int, ...]]:
        """What goes up in training beside the shared parameters: the local rule's own and what the merge gauges."""
        gauges: dict[str, tuple[int, ...]] = {n: () for n in GAUGES if n in self.merge.needs}
        return self.local.sends(self.task) | self.merge.collects(self.task) | gauges

    @property
    def extra(self) -> int:
        """The bytes of that, for one client; what has no fixed length is left out."""
        return 4 * sum(math.prod(shape) for shape in self.sends.values() if -1 not in shape)

    def shared(self, down: Params) -> Params:
        """The shared model, as a newcomer gets it."""
        return self.met(lift(self.newcomer), self.local.personal(lift(self.newcomer), lift(down)))

    def personal(self, own: Params, down: Params, data: Data) -> Params:
        """Each client's own model."""
        return self.met(own, self.local.adapt(self.model, own, lift(down), data))

    def met(self, own: Params, params: Params) -> Params:
        """These models, and the shared one in place of those whose client never trained."""
        if not self.pairs:
            return params
        met, public = own[MET] > 0, self.adapter.public(params)
        other = {k: v for k, v in public.items() if v is not params[k]}  # what is shared stands once, and is read once
        return params | {k: torch.where(met.view(-1, *[1] * (v.dim() - 1)), params[k], v) for k, v in other.items()}

    @property
    def pairs(self) -> bool:
        """Whether a client's private part stands beside a shared twin, which is a newcomer's."""
        return self.adapter.pairs and bool(self.adapter.private)

    def init(self, clients: int) -> State:
        down, kept = self.merge.begin(self.model, self.seed)
        return State(self.initial | down, dict(self.newcomer), self.merge.init(clients) | kept)

    def told(self, down: Params) -> tuple[Method, Params]:
        """Itself on the task as a message describes it (class embeddings a server has trained), and the message without."""
        text, novel = down.get(TASK + "text"), down.get(TASK + "novel")
        if text is None:
            return self, down
        task = self.task._replace(text=text)
        if novel is not None and task.novel is not None:
            task = task._replace(novel=task.novel._replace(text=novel))
        return replace(self, task=task), {k: v for k, v in down.items() if not k.startswith(TASK)}

    def round(self, state: State, cohort: Cohort) -> State:
        return self.merge.serve(self.model, state, cohort)

    def play(self, step: str, own: Params, down: Params, data: Data) -> tuple[Params, Params]:
        """A client step by name: (own rows, message, data) → (own rows, reply), for a few clients side by side."""
        if TASK + "text" in down:
            method, rest = self.told(down)
            return method.play(step, own, rest, data)
        if step == "train":
            before = self.gauge(own, lift(down), data) if "before" in self.sends else {}
            own, up = self.local.train(self.model, own, down, data)
            own |= {MET: torch.ones(len(data), dtype=data.kind, device=data.x.device)} if self.pairs else {}
            trained = only(up, self.local.trained(down))
            after = self.gauge(own, trained, data) if "after" in self.sends else {}
            found = self.merge.collect(self.model, trained | adapters(own), data)
            return own, up | found | {name: v["val"] for name, v in (("before", before), ("after", after)) if v}
        if step == "gauge":
            return own, self.gauge(own, lift(down), data)
        if step == "score":
            return own, self.score(own, down, data)
        if step in ("open.shared", "open.personal"):
            return own, self.open(step.rpartition(".")[2], own, down, data)
        if step == "diagnose":
            told = self.adapter.diagnose(self.task, self.local.personal(own, lift(down)))
            return own, {k: v.expand(len(data)) for k, v in told.items()}  # of a shared map there is one for all
        raise FedvlmError(f"unknown step '{step}'; a client answers {', '.join(STEPS)}")

    @torch.no_grad()
    def ahead(self, step: str, down: Params) -> Params:
        """The message, and what clients in one process need not each work out of it: the words of the shared model."""
        if step != "score" or not self.generalises:
            return down
        method, rest = self.told(down)
        return down | words(method.adapter.read(method.task, method.shared(rest), {}))

    @torch.no_grad()
    def score(self, own: Params, down: Params, data: Data) -> Params:
        """Sums over each split of each client: [clients, 3] of how many, score and loss, for the shared view (the
        newcomer's row) and, where a client has something of its own, the personal view."""
        cells = 3 * len(data)
        count = np.diff(data.bounds, axis=1)
        up = {"count": torch.from_numpy(count).to(data.kind)}
        read, down = words(down), {k: v for k, v in down.items() if k != READ}
        models = {"shared": (self._together, self.shared(down) | read)} if self.generalises else {}
        if self.personalises:
            models["personal"] = (self._apart, self.personal(own, down, data))
        params: Params = {}
        for view, (parts, raw) in models.items():
            params = raw if READ in raw else self.adapter.read(self.task, raw, params)
            up |= tally(view, cells, parts(params, data))
            if data.outside is not None:
                up |= self.detect(view, params, data)
            if data.corrupted is not None:  # of the test examples, over all their versions
                sums = tally(view, cells, parts(params, data.bent()))[f"{view}.score"][:, 2]
                up[f"{view}.corrupted"] = sums / data.corrupted.shape[1]
        return up

    @property
    def views(self) -> tuple[str, ...]:
        return ("shared",) * self.generalises + ("personal",) * self.personalises

    @property
    def detects(self) -> list[str]:
        """The names of what `detect` tells."""
        return [f"{v}.{score}.{measure}" for v in self.views for score in SCORES for measure in MEASURES]

    def detect(self, view: str, params: Params, data: Data) -> Params:
        """How well each client's test examples are told from those outside, by score and measure; −1 where it has none."""
        assert data.outside is not None
        found: dict[str, list[float]] = {name: [] for name in self.detects if name.startswith(f"{view}.")}
        there = self._inside(params, data.outside) if view == "shared" else {}  # one model for all: looked at once
        for i in range(len(data)):
            mine = one_of(params, i)
            here = self._inside(mine, data.x[int(data.bounds[i, 2]) : int(data.bounds[i, 3])])
            away = there or self._inside(mine, data.outside)
            for score in SCORES:
                for name, measure in MEASURES.items():
                    value = measure(here[score], away[score])
                    found[f"{view}.{score}.{name}"].append(-1.0 if value is None else value)
        return {k: torch.tensor(v, dtype=torch.get_default_dtype()) for k, v in found.items()}

    def _inside(self, params: Params, x: Tensor) -> dict[str, Tensor]:
        parts = [self.adapter.inside(self.task, params, part[None]) for part in torch.split(x, self.adapter.block)]
        return {k: torch.cat([p[k][0] for p in parts]) if parts else x.new_empty(0) for k in SCORES}

    @property
    def halves(self) -> dict[str, Task]:
        """What can be asked of these models beside a client's own examples: the classes trained on and, where the adapter
        can speak of them, those nobody trained on."""
        if self.task.novel is None:
            return {}
        return {"base": self.task} | ({"novel": self.task.novel} if self.adapter.opens else {})

    @torch.no_grad()
    def open(self, view: str, own: Params, down: Params, data: Data) -> Params:
        """Of all base and all novel test examples, how many of each class are told, [clients, classes], by the shared
        model or by each client's own."""
        mine = self.shared(down) if view == "shared" else self.personal(own, down, data)
        up: Params = {}
        for half, task in self.halves.items():
            rows = []
            read = self.adapter.read(task, mine, {})
            for i in range(len(data)):
                rows.append(self._told(task, one_of(read, i), *data.halves[half]))
            up[half] = torch.stack(rows)
        return up

    def _told(self, task: Task, params: Params, x: Tensor, y: Tensor) -> Tensor:
        right = []
        for part, label in zip(*(torch.split(v, self.adapter.block) for v in (x, y)), strict=True):
            right.append(self.adapter.learns.score(self.adapter.logits(task, params, part[None]), label[None])[0][0])
        told = torch.bincount(y[torch.cat(right)].cpu(), minlength=len(task.classes))
        return told.to(torch.get_default_dtype())

    @torch.no_grad()
    def gauge(self, own: Params, shared: Params, data: Data) -> Params:
        """The mean validation loss of these shared parameters with each client's private ones (an adapter's, not a
        rule's copy); on training data where a client has no validation data."""
        low, mid, high = data.bounds[:, 0], data.bounds[:, 1], data.bounds[:, 2]
        some = high > mid
        first, last = np.where(some, mid, low), np.where(some, high, mid)
        held_out = replace(data, bounds=np.stack([first, last, last, last], axis=1))
        params = self.adapter.read(self.task, shared | only(own, self.adapter.private), {})
        one_for_all = all(len(v) == 1 for v in params.values())
        parts = (self._together if one_for_all else self._apart)(params, held_out)
        loss = tally("v", 3 * len(data), parts)["v.loss"][:, 0]
        return {"val": loss / torch.from_numpy(np.maximum(last - first, 1)).to(loss.dtype)}

    def _together(self, params: Params, data: Data) -> Parts:
        """All examples through one model."""
        for x, y, cells in data.blocks(self.adapter.block):
            yield *self._each(params, x, y[None]), cells

    def _apart(self, params: Params, data: Data) -> Parts:
        """Each client's examples through its own."""
        for x, y, cells in data.lanes(2 * self.adapter.block):
            yield *self._each({k: v[: len(y)] for k, v in params.items()}, x, y), cells

    def _each(self, params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        score, loss = self.adapter.learns.score(self.model.logits(params, x), y)
        return score.flatten(), loss.flatten()


def words(params: Params) -> Params:
    """What was read beforehand, if anything."""
    return {k: v for k, v in params.items() if k == READ}


def one_of(params: Params, i: int) -> Params:
    """One client's model of a few side by side; what is shared is there once for all."""
    return {k: v[i % len(v)][None] for k, v in params.items()}


def tally(view: str, cells: int, parts: Parts) -> Params:
    """Sums of score and loss by cell; cell −1 is padding."""
    sums = np.zeros((2, cells + 1))
    for score, loss, cell in parts:
        where = cell.reshape(-1) + 1
        sums[0] += np.bincount(where, score.cpu().numpy(), cells + 1)
        sums[1] += np.bincount(where, loss.double().cpu().numpy(), cells + 1)
    score, loss = torch.from_numpy(sums[:, 1:]).view(2, -1, 3).to(torch.get_default_dtype())
    return {f"{view}.score": score, f"{view}.loss": loss}


def name_of(part: object) -> str:
    return type(part).__module__.rsplit(".", 1)[-1]
