"""SCAFFOLD's client (Karimireddy et al., 2020): each step corrected by what this client is known to drift.

g − c_i + c in place of g;  after K steps c_i⁺ = c_i − c + (w_g − w_i)/(K η) (option II), and c_i⁺ − c_i goes up.
c_i is private; c comes down beside the shared parameters. K η is the way of plain SGD: keep optimiser=sgd, momentum=0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedvlm.core import Batch, Data, Params, tracked
from fedvlm.local.copies import COPY
from fedvlm.local.descent import Slopes
from fedvlm.local.model import Model
from fedvlm.local.sgd import Sgd

CONTROL = "control."  # c, beside the shared parameters
DRIFT = COPY + "drift."  # c_i, in the client's row


@dataclass(frozen=True)
class Scaffold(Sgd):
    partner: ClassVar[str] = "scaffold"

    def rows(self, shared: Params) -> Params:
        return super().rows(shared) | {DRIFT + k: torch.zeros_like(v) for k, v in shared.items()}

    def trained(self, down: Params) -> Params:
        return {k: v for k, v in super().trained(down).items() if not k.startswith(CONTROL)}

    def slopes(self, model: Model, anchor: Params, own: Params) -> Slopes:
        plain = super().slopes(model, anchor, own)
        ahead = {k: anchor[CONTROL + k] - own[DRIFT + k] for k in self.trained(anchor)}  # c − c_i

        def corrected(now: Params, batch: Batch) -> tuple[Tensor, list[Tensor]]:
            each, found = plain(now, batch)
            n = len(batch.y)
            return each, [f + ahead[k][:n] if k in ahead else f for k, f in zip(now, found, strict=True)]

        return corrected

    def train(self, model: Model, own: Params, down: Params, data: Data) -> tuple[Params, Params]:
        kept, up = super().train(model, own, down, data)
        way = np.maximum(1, -(-data.counts("train") // self.batch) * self.epochs) * self.rate(data)
        per = data.here(way).to(data.kind)
        change = {}
        for k, v in self.trained(down).items():  # a running statistic drifts by right
            slope = (v - up[k]) / per.view(-1, *[1] * v.dim()) - down[CONTROL + k]
            change[k] = torch.zeros_like(slope) if tracked(k) else slope
        drift = {DRIFT + k: own[DRIFT + k] + c for k, c in change.items()}
        return kept | drift, up | {CONTROL + k: c for k, c in change.items()}
