"""Ditto (Li et al., 2021): beside the shared model a private copy v, tied to it.  loss(v) + λ/2 ‖v − w_g‖².

The copy covers the shared names; an adapter's own private names are trained with the shared model and held for v.
"""

from dataclasses import dataclass

from fedvlm.core import Data, FedvlmError, Params, lift
from fedvlm.local import copies
from fedvlm.local.descent import descend, tied
from fedvlm.local.model import Model
from fedvlm.local.sgd import Sgd


@dataclass(frozen=True)
class Ditto(Sgd):
    keep: bool = True  # always: the copy is the method
    strength: float = 0.1  # λ, the tie between the private copy and the shared model

    def __post_init__(self) -> None:
        if not self.keep:
            raise FedvlmError("keep=false: Ditto is its private copy; leave keep out, or use local=sgd")

    def own_copy(self, model: Model, own: Params, down: Params, trained: Params, data: Data) -> Params:
        anchor = lift(down)
        copy = copies.recall(own, anchor)
        held = {k: v for k, v in trained.items() if k not in down}
        descend(self, copy, data, tied(model.slopes(self.objective, held), anchor, self.strength))
        return copy
