"""Plain local training, FedAvg's client (McMahan et al., 2017): down comes the shared model, up goes the trained one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedvlm.adapters.base import Adapter, Task
from fedvlm.core import Data, Params, lift, only, spread, told
from fedvlm.local import copies
from fedvlm.local.descent import Pace, Slopes, descend
from fedvlm.local.model import Model
from fedvlm.tasks import Objective


@dataclass(frozen=True)
class Sgd(Pace):
    objective: Objective = "cross-entropy"
    keep: bool = False  # a client keeps the model it trained last as its own (else its own is the shared one)

    adapts: ClassVar[bool] = False  # whether `adapt` does more than `personal`
    partner: ClassVar[str] = ""  # the one merge it works with, where it is only one

    def refuses(self, adapter: Adapter) -> str:
        """Why it does not go with this adapter; "" where it does."""
        return ""

    def sends(self, task: Task) -> dict[str, tuple[int, ...]]:
        """What goes up beside the shared parameters, by name: its shape, () for one number and −1 for any length."""
        return {"n": (), "loss": ()}

    def rows(self, shared: Params) -> Params:
        """What this rule keeps on a client beside the adapter's private names: the newcomer's row."""
        return copies.empty(shared) if self.keep else {}

    def slopes(self, model: Model, anchor: Params, own: Params) -> Slopes:
        """What is descended; `anchor` is what was sent, `own` the clients' rows. The place for a rule of your own to
        differ."""
        return model.slopes(self.objective)

    def walk(self, model: Model, params: Params, down: Params, own: Params, data: Data) -> Params:
        """Trains `params`, the shared and the private ones, in place; each client's mean loss, and what else it tells."""
        return {"loss": descend(self, params, data, self.slopes(model, lift(down), own))}

    def trained(self, down: Params) -> Params:
        """Which of what was sent is trained and goes up again."""
        return {k: v for k, v in down.items() if not told(k)}

    def own_copy(self, model: Model, own: Params, down: Params, trained: Params, data: Data) -> Params:
        """What is kept: the model as trained."""
        return only(trained, down)

    def train(self, model: Model, own: Params, down: Params, data: Data) -> tuple[Params, Params]:
        private, shared = copies.adapters(own), self.trained(down)
        params = spread(shared, len(data)) | private
        found = self.walk(model, params, down, own, data)
        kept = copies.keep(self.own_copy(model, own, shared, params, data)) if self.keep else {}
        return only(params, private) | kept, only(params, shared) | {"n": data.sizes(), **found}

    def personal(self, own: Params, down: Params) -> Params:
        """The model a client uses for itself."""
        return copies.adapters(own) | (copies.recall(own, down) if self.keep else down)

    def adapt(self, model: Model, own: Params, down: Params, data: Data) -> Params:
        """The same at test time, for rules that first look at the client's training data."""
        return self.personal(own, down)
