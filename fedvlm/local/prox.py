"""FedProx (Li et al., 2020): stay near what was sent.  loss + μ/2 ‖w − w_g‖²."""

from dataclasses import dataclass

from torch import Tensor

from fedvlm.core import Batch, Params, distance
from fedvlm.local.sgd import Model, Sgd


@dataclass(frozen=True)
class Prox(Sgd):
    mu: float = 0.01  # strength of the pull

    def loss(self, model: Model, params: Params, batch: Batch, anchor: Params) -> Tensor:
        loss = super().loss(model, params, batch, anchor)
        return loss + self.mu / 2 * distance(params, anchor) if anchor else loss
