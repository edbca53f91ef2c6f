"""A method is an adapter (what is trained), a local rule (how a client trains) and a merge (what the server does)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlm.adapters.base import Adapter, Task
from fedvlm.core import Cohort, Data, FedvlmError, Params, State, lift
from fedvlm.local.model import Model
from fedvlm.local.sgd import Sgd
from fedvlm.merge.mean import Mean

STEPS = ("train", "score", "diagnose")  # what a server may ask of a client; nothing else crosses the wire


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
        missing = [n for n in merge.needs if n not in local.sends]
        if missing:
            raise FedvlmError(
                f"merge={name_of(merge)} needs uploads named {', '.join(missing)}, and local={name_of(local)} sends "
                f"{', '.join(local.sends) or 'none'}; use merge=mean, or a local rule that sends them"
            )
        params = adapter.init(task, seed)
        unknown = [n for n in adapter.private if n not in params]
        if unknown:
            raise FedvlmError(
                f"private={','.join(unknown)}: adapter={name_of(adapter)} has no such parameter; "
                f"it has {', '.join(params) or 'none'}"
            )
        shared = {k: v for k, v in params.items() if k not in adapter.private}
        newcomer = {k: v for k, v in params.items() if k in adapter.private} | local.rows(shared)
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

    def init(self, clients: int) -> State:
        return State(dict(self.initial), dict(self.newcomer), self.merge.init(clients))

    def round(self, state: State, cohort: Cohort) -> State:
        return self.merge.round(state, cohort)

    def play(self, step: str, own: Params, down: Params, data: Data) -> tuple[Params, Params]:
        """A client step by name: (own rows, message, data) → (own rows, reply), for a few clients side by side."""
        if step == "train":
            return self.local.train(self.model, own, down, data)
        if step == "score":
            return own, self.score(own, down, data)
        if step == "diagnose":
            told = self.adapter.diagnose(self.task, self.local.personal(own, lift(down)))
            return own, {k: v.expand(len(data)) for k, v in told.items()}  # of a shared map there is one for all
        raise FedvlmError(f"unknown step '{step}'; a client answers {', '.join(STEPS)}")

    @torch.no_grad()
    def score(self, own: Params, down: Params, data: Data) -> Params:
        """Sums over each split of each client: [clients, 3] of how many, correct and loss, for the shared view (the
        newcomer's row) and, where a client has something of its own, the personal view."""
        cells = 3 * len(data)
        count = np.diff(data.bounds, axis=1)
        up = {"count": torch.from_numpy(count).to(data.x.dtype)}
        if self.generalises:
            shared = self.local.personal(lift(self.newcomer), lift(down))
            up |= tally("shared", cells, ((*self._each(shared, x, y[None]), c[None]) for x, y, c in data.blocks()))
        if self.newcomer:
            mine = self.local.personal(own, lift(down))
            lanes = ((*self._each({k: v[: len(y)] for k, v in mine.items()}, x, y), c) for x, y, c in data.lanes())
            up |= tally("personal", cells, lanes)
        return up

    def _each(self, params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(params, x)
        _, guess = logits.max(-1)  # not argmax: ten times slower on a CPU in the layout `linear` leaves
        loss = logits.logsumexp(-1) - logits.gather(-1, y[..., None])[..., 0]
        return (guess == y).flatten(), loss.flatten()


def tally(view: str, cells: int, parts: Any) -> Params:
    """Sums of correct and loss by cell; cell −1 is padding."""
    sums = np.zeros((2, cells + 1))
    for correct, loss, cell in parts:
        where = cell.reshape(-1) + 1
        sums[0] += np.bincount(where, correct.numpy(), cells + 1)
        sums[1] += np.bincount(where, loss.double().numpy(), cells + 1)
    correct, loss = torch.from_numpy(sums[:, 1:]).view(2, -1, 3).to(torch.get_default_dtype())
    return {f"{view}.correct": correct, f"{view}.loss": loss}


def name_of(part: object) -> str:
    return type(part).__module__.rsplit(".", 1)[-1]
