"""Ditto (Li et al., 2021): a private copy v of the shared model, kept near it.  loss(v) + λ/2 ‖v − w_g‖².

The copy covers the shared parameters; an adapter's private parameters are trained with the shared model and stay fixed
while v is trained.
"""

from dataclasses import dataclass

from fedvlm.core import copies
from fedvlm.core.data import Data
from fedvlm.core.descent import optimise, with_proximal_term
from fedvlm.core.local import Local, anchor_of
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative
from fedvlm.core.state import Message, Params
from fedvlm.errors import FedvlmError


@dataclass(frozen=True)
class Ditto(Local):
    keep: bool = True  # always true: the copy is the personal model
    strength: NotNegative = 0.1  # λ, weight of the distance between the copy and the shared model; 0: independent

    def __post_init__(self) -> None:
        if not self.keep:
            raise FedvlmError(
                "keep=false: Ditto's personal model is the private copy; leave keep out, or use local=sgd"
            )

    def personal_copy(self, model: Model, own: Params, message: Message, trained: Params, data: Data) -> Params:
        anchor = anchor_of(message)
        copy = copies.load_copies(own, anchor)
        held = {k: v for k, v in trained.items() if k not in message.shared}
        optimise(self, copy, data, with_proximal_term(model.gradients(self.objective, held), anchor, self.strength))
        return copy
