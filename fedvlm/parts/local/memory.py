"""Fills the client's private memory with its own training examples (Tip-Adapter, kNN-Per); see parts/adapters/memory.py.

The shared classifier is trained as FedAvg does, or stays as it is (train_head=false, Tip-Adapter). With more examples than
the memory holds, as many of each class as fit, drawn at random. α and β are the candidates with the best accuracy on the
client's validation examples; of equally good ones the one that uses the memory least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter
from fedvlm.core.data import Data
from fedvlm.core.descent import optimise
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative, Positive
from fedvlm.core.seeds import keys, shuffled
from fedvlm.core.state import Message, Params

DRAW = 41  # the purpose of the draw among examples


@dataclass(frozen=True)
class Memorise(Local):
    train_head: bool = True  # false: the shared classifier stays as it was at the start
    amounts: tuple[NotNegative, ...] = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0)  # α, weight of the memory: candidates
    sharpnesses: tuple[Positive, ...] = (1.0, 3.0, 10.0, 30.0)  # β, how fast similarity falls off: candidates

    effects: ClassVar[Mapping[str, str]] = {"remembers": "1 where α > 0 was the best on validation: the memory is used"}

    def incompatible(self, adapter: Adapter) -> str:
        return "" if "keys" in adapter.private else "fills a private memory; use adapter=memory"

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        private = {k: params.pop(k) for k in model.adapter.private}
        found = {"loss": torch.zeros(len(data), dtype=data.dtype, device=data.x.device)}
        if self.train_head:
            empty = {k: torch.zeros_like(v) for k, v in private.items()}
            found = {"loss": optimise(self, params, data, model.gradients(self.objective, empty))}
        for i in range(len(data)):
            rows = self.remembered(data, i, private["keys"].shape[1], len(model.task.classes))
            memory = {k: v[i] for k, v in private.items()}
            memory["keys"].zero_()[: len(rows)] = data.x[rows]
            memory["values"].zero_()[: len(rows)] = F.one_hot(data.y[rows], len(model.task.classes)).to(data.dtype)
            self.choose(model, {k: v[i : i + 1] for k, v in (params | private).items()}, data, i)
        params |= private
        return found | {"remembers": (private["amount"][:, 0] > 0).to(data.dtype)}

    def remembered(self, data: Data, at: int, most: int, classes: int) -> Tensor:
        """Rows of the pool: by turns one of each class, until the memory is full."""
        low, high = int(data.bounds[at, 0]), int(data.bounds[at, 1])
        order = shuffled(keys(data.seed, DRAW, clients=data.ids[at : at + 1]), np.array([high - low])) + low
        labels = data.y[data.tensor(order)].cpu().numpy()
        turn = np.zeros(len(order), np.int64)
        for c in range(classes):
            turn[labels == c] = np.arange((labels == c).sum())
        return data.tensor(order[np.argsort(turn, kind="stable")[:most]])

    @torch.no_grad()
    def choose(self, model: Model, one: Params, data: Data, at: int) -> None:
        """Sets α and β of one client in place."""
        low, high = int(data.bounds[at, 1]), int(data.bounds[at, 2])
        one = model.adapter.prepare(model.task, one, {})  # prompts are encoded once for all candidates
        x, y, best, most = data.part(low, high)[None], data.y[low:high], (self.amounts[0], self.sharpnesses[0]), -1.0
        for amount in self.amounts if high > low else ():
            for sharpness in self.sharpnesses:
                tried = one | {"amount": one["amount"] * 0 + amount, "sharpness": one["sharpness"] * 0 + sharpness}
                reached = float((model.logits(tried, x)[0].argmax(-1) == y).double().mean())
                if reached > most:
                    best, most = (amount, sharpness), reached
        one["amount"].fill_(best[0])
        one["sharpness"].fill_(best[1])
