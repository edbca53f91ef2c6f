"""GRACE's client (Zhang et al., MICCAI 2023): a meta-gradient with a term that keeps features near the sent model's.

w′ = w − α ∇L(w; first half of the batch);  w ← w − η ∇[L + λ·CORAL](w′; second half), first order: as PerFedAvg, with
an alignment term in the gradient at w′. (FFT-GP's BGP continues from w′ instead.) The public code contains the server's
part only, so the alignment (CORAL, one of those the paper offers), λ = 1 and the inner step are our reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedvlm.core.data import Data
from fedvlm.core.descent import Gradients, by_autograd, optimise
from fedvlm.core.local import Local, anchor_of
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative
from fedvlm.core.state import Message, Params
from fedvlm.parts.local.bgp import aligned_loss
from fedvlm.parts.local.perfedavg import META_EFFECTS, for_every_client, meta_gradients


@dataclass(frozen=True)
class Grace(Local):
    keep: bool = True  # true: a client's personal model is the one it trained last; false: the shared model
    align: NotNegative = 1.0  # λ, weight of the alignment (CORAL) in the loss; 0: none
    inner: NotNegative = 0.0  # α, learning rate of the inner step; 0: that of lr=

    effects: ClassVar[Mapping[str, str]] = META_EFFECTS

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        acted: Params = {}
        loss = optimise(self, params, data, self.meta_gradients(model, message, data, acted))
        return {"loss": loss} | for_every_client(acted, data)

    def meta_gradients(self, model: Model, message: Message, data: Data, acted: Params) -> Gradients:
        anchor = anchor_of(message)
        outer = by_autograd(lambda now, batch: aligned_loss(model, self.objective, now, anchor, batch, self.align))
        return meta_gradients(model.gradients(self.objective), outer, self.inner or self.rate(data), acted)
