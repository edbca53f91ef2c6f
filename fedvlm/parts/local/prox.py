"""FedProx (Li et al., 2020): a proximal term keeps the model near the one that was sent.  loss + μ/2 ‖w − w_g‖²."""

from dataclasses import dataclass

from fedvlm.core.descent import Gradients, with_proximal_term
from fedvlm.core.local import Local, anchor_of
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative
from fedvlm.core.state import Message, Params


@dataclass(frozen=True)
class Prox(Local):
    mu: NotNegative = 0.01  # μ, weight of the proximal term; 0: FedAvg

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        return with_proximal_term(super().gradients(model, message, own), anchor_of(message), self.mu)
