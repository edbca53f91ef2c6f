"""Ditto (Li et al., 2021): beside the shared model a private copy v, tied to it.  loss(v) + λ/2 ‖v − w_g‖².

The copy covers the shared names; an adapter's own private names are trained with the shared model and held for v.
Until a client has trained, its copy is the shared model itself: so is a newcomer's.
"""

from dataclasses import dataclass

import torch

from fedvlm.core import Data, Params, lift, only
from fedvlm.local.descent import descend, tied
from fedvlm.local.model import Model
from fedvlm.local.sgd import Sgd

COPY = "personal."
STARTED = COPY + "started"


@dataclass(frozen=True)
class Ditto(Sgd):
    strength: float = 0.1  # λ, the tie between the private copy and the shared model

    def rows(self, shared: Params) -> Params:
        copy = {COPY + k: torch.zeros_like(v) for k, v in shared.items()}
        return copy | {STARTED: torch.zeros(())} if copy else {}

    def train(self, model: Model, own: Params, down: Params, data: Data) -> tuple[Params, Params]:
        kept, up = super().train(model, adapters(own), down, data)
        if not down:
            return kept, up
        anchor = lift(down)
        copy = only(self.personal(own, anchor), down)
        descend(self, copy, data, tied(model.slopes(self.objective, held=kept), anchor, self.strength))
        return kept | {COPY + k: v for k, v in copy.items()} | {STARTED: torch.ones_like(own[STARTED])}, up

    def personal(self, own: Params, down: Params) -> Params:
        if not down:
            return own
        started = own[STARTED] > 0
        copy = {k: torch.where(started.view(-1, *[1] * (v.dim() - 1)), own[COPY + k], v) for k, v in down.items()}
        return adapters(own) | copy


def adapters(own: Params) -> Params:
    """The adapter's private names among a client's own."""
    return {k: v for k, v in own.items() if not k.startswith(COPY)}
