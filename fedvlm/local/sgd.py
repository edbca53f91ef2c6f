"""Plain local training, FedAvg's client (McMahan et al., 2017): down comes the shared model, up goes the trained one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedvlm.core import Data, Params, lift, only, spread
from fedvlm.local.descent import Pace, Slopes, descend
from fedvlm.local.model import Model, Objective


@dataclass(frozen=True)
class Sgd(Pace):
    objective: Objective = "cross-entropy"

    sends: ClassVar[tuple[str, ...]] = ("n", "loss")  # what goes up beside the shared parameters: one number each

    def rows(self, shared: Params) -> Params:
        """What this rule keeps on a client beside the adapter's private names: the newcomer's row."""
        return {}

    def slopes(self, model: Model, anchor: Params) -> Slopes:
        """What is descended; `anchor` is what was sent. The place for a rule of your own to differ."""
        return model.slopes(self.objective)

    def train(self, model: Model, own: Params, down: Params, data: Data) -> tuple[Params, Params]:
        params = spread(down, len(data)) | own
        loss = descend(self, params, data, self.slopes(model, lift(down)))
        return only(params, own), only(params, down) | {"n": data.sizes(), "loss": loss}

    def personal(self, own: Params, down: Params) -> Params:
        """The model a client uses for itself."""
        return down | own
