"""HetLoRA's client (Cho et al., EMNLP 2024): each client has a LoRA rank of its own, and lowers it where it can.

A client of rank r takes the first r rows of the shared A and the first r columns of B and trains these; the others are 0
in what it sends (zero-padding), and in its personal model. Ranks go from `min_rank` to the adapter's rank=, by the client's
number. Self-pruning: with t = ⌊decay · r⌋ the loss has + penalty · Σ ‖B[:, t:r]‖ ‖A[t:r]‖ over the projections, and a client
in which that sum is smaller after training than in the model it was sent has rank t from then on. penalty=0: no pruning.
The server's half is merge=sparsity. With min_rank=rank= and penalty=0 it is local=sgd.

The zeros travel here: everybody's messages have the size of the largest rank. Our reading: the values of decay and penalty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter
from fedvlm.core.copies import COPY
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import by_autograd, optimise
from fedvlm.core.local import Local, Trained
from fedvlm.core.model import Model
from fedvlm.core.ranges import Count, NotNegative, Share
from fedvlm.core.state import Message, Params
from fedvlm.parts.adapters.lora import Lora, trains_factors

RANK = COPY + "rank"  # in a private row: the client's rank; 0 before it has trained
EPS = 1e-24  # below a square root, whose slope at 0 is infinite


@dataclass(frozen=True)
class Truncated(Local):
    min_rank: Count = 1  # the smallest rank of a client; rank= or more: all have rank=
    decay: Share = 0.85  # share of its rank that a client keeps when it prunes
    penalty: NotNegative = 0.01  # strength of the term that makes ranks small; 0: no pruning

    effects: ClassVar[Mapping[str, str]] = {
        "rank": "of the client after the round",
        "pruned": "1 where it lowered its rank in the round",
    }

    def incompatible(self, adapter: Adapter) -> str:
        return "" if trains_factors(adapter) else "gives each client a rank of its own; use adapter=lora"

    def private_state(self, shared: Params) -> Params:
        return super().private_state(shared) | {RANK: torch.zeros(())}

    def personal(self, own: Params, shared: Params) -> Params:
        whole = super().personal(own, shared)
        rank = torch.where(own[RANK] > 0, own[RANK], torch.inf)
        return {k: v * first(rank, k, v) if is_factor(k) else v for k, v in whole.items()}

    def train(self, model: Model, own: Params, message: Message, data: Data) -> Trained:
        trained = super().train(model, own, message, data)
        return trained._replace(own=trained.own | {RANK: trained.values["rank"]})

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        assert isinstance(model.adapter, Lora)
        start = torch.where(own[RANK] > 0, own[RANK], self.first_rank(model.adapter.rank, data))
        tail = (self.decay * start).floor().clamp(min=1)
        truncate(params, start)
        before = tail_length(params, tail)

        def loss(now: Params, batch: Batch) -> Tensor:
            plain = model.loss(self.objective, now, batch)
            return plain + self.penalty * tail_length(now, tail[: len(batch.y)]) if self.penalty else plain

        found = optimise(self, params, data, by_autograd(loss) if self.penalty else model.gradients(self.objective))
        pruned = (tail_length(params, tail) < before) & (tail < start) & (self.penalty > 0)
        rank = torch.where(pruned, tail, start)
        truncate(params, rank)
        return {"loss": found, "rank": rank, "pruned": pruned.to(data.dtype)}

    def first_rank(self, largest: int, data: Data) -> Tensor:
        smallest = min(self.min_rank, largest)
        return data.tensor(smallest + data.ids % (largest - smallest + 1)).to(data.dtype)


def is_factor(name: str) -> bool:
    return name.endswith((".A", ".B"))


def first(rank: Tensor, name: str, value: Tensor) -> Tensor:
    """1 for the first `rank` [clients] rows of A or columns of B, 0 for the others."""
    axis = 1 if name.endswith(".A") else 2
    kept = torch.arange(value.shape[axis], device=value.device) < rank[:, None]
    return kept.unsqueeze(3 - axis).to(value.dtype)


def truncate(params: Params, rank: Tensor) -> None:
    for k, v in params.items():
        if is_factor(k):
            v *= first(rank, k, v)


def tail_length(params: Params, tail: Tensor) -> Tensor:
    """Σ ‖B[:, tail:]‖ ‖A[tail:]‖ over the projections, one number per client."""

    def length(name: str) -> Tensor:
        value = params[name]
        squares = (value * (1 - first(tail, name, value))).square().sum((1, 2))
        return (squares + EPS).sqrt()

    return torch.stack([length(k) * length(k[:-1] + "B") for k in params if k.endswith(".A")]).sum(0)
