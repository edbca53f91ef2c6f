"""FedProx (Li et al., 2020): stay near what was sent.  loss + μ/2 ‖w − w_g‖²."""

from dataclasses import dataclass

from fedvlm.core import Params
from fedvlm.local.descent import Slopes, tied
from fedvlm.local.model import Model
from fedvlm.local.sgd import Sgd


@dataclass(frozen=True)
class Prox(Sgd):
    mu: float = 0.01  # strength of the pull

    def slopes(self, model: Model, anchor: Params, own: Params) -> Slopes:
        return tied(super().slopes(model, anchor, own), anchor, self.mu)
