"""GRACE's client (Zhang et al., MICCAI 2023): a meta-gradient, corrected so that features stay near the broadcast model's.

w′ = w − α ∇L(w; first half of the batch);  w ← w − η ∇[L + λ·CORAL](w′; second half), first order: as PerFedAvg, and the
gradient taken ahead also pulls the features back. (FFT-GP's BGP goes on from w′ instead.) The public code holds the
server's half only, so the alignment (CORAL, of those the paper offers), λ = 1 and the inner step are our reading.
"""

from dataclasses import dataclass

from fedvlm.core import Message, Params
from fedvlm.local.base import Local, anchor_of
from fedvlm.local.bgp import aligned
from fedvlm.local.descent import Gradients, by_autograd
from fedvlm.local.model import Model
from fedvlm.local.perfedavg import meta_gradients


@dataclass(frozen=True)
class Grace(Local):
    keep: bool = True  # its personal models are the locally trained ones
    align: float = 1.0  # λ, the weight of the alignment
    inner: float = 0.01  # α, the inner step

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        anchor = anchor_of(message)
        near = by_autograd(lambda now, batch: aligned(model, self.objective, now, anchor, batch, self.align))
        return meta_gradients(super().gradients(model, message, own), near, self.inner)
