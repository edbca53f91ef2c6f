"""GRACE's client (Zhang et al., MICCAI 2023): a meta-gradient, corrected so that features stay near the broadcast model's.

w′ = w − α ∇L(w; first half of the batch);  w ← w − η ∇[L + λ·CORAL](w′; second half), first order: as PerFedAvg, and the
gradient taken ahead also pulls the features back. (FFT-GP's BGP goes on from w′ instead.) The public code holds the
server's half only, so the alignment (CORAL, of those the paper offers), λ = 1 and the inner step are our reading.
"""

from dataclasses import dataclass

from fedvlm.core import Params
from fedvlm.local.bgp import aligned
from fedvlm.local.descent import Slopes, by_autograd
from fedvlm.local.model import Model
from fedvlm.local.perfedavg import taken_ahead
from fedvlm.local.sgd import Sgd


@dataclass(frozen=True)
class Grace(Sgd):
    keep: bool = True  # its personal models are the locally trained ones
    align: float = 1.0  # λ, the weight of the alignment
    inner: float = 0.01  # α, the inner step

    def slopes(self, model: Model, anchor: Params, own: Params) -> Slopes:
        near = by_autograd(lambda now, batch: aligned(model, self.objective, now, anchor, batch, self.align))
        return taken_ahead(super().slopes(model, anchor, own), near, self.inner)
