"""FedAvg's server (McMahan et al., 2017): the mean of the replies, by number of examples or uniform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvlm.core import Cohort, Params, State, lift, only


@dataclass(frozen=True)
class Mean:
    weights: Literal["size", "uniform"] = "size"
    cosine: bool = False  # also record the mean cosine between clients' updates (FedOT's Table 2)

    needs: ClassVar[tuple[str, ...]] = ("n", "loss")

    def init(self, clients: int) -> Params:
        return {}

    def round(self, state: State, cohort: Cohort) -> State:
        total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in state.shared.items()}
        weights: dict[int, float] = {}
        agreement = Agreement()
        losses = 0.0
        for ids, up in cohort.stream("train", state.shared):
            weight = up["n"] if self.weights == "size" else torch.ones_like(up["n"])
            for k, v in total.items():
                v += torch.tensordot(weight, up[k], dims=1)
            weights |= zip(ids.tolist(), weight.tolist(), strict=True)
            losses += float(weight @ up["loss"])
            if self.cosine and total:
                agreement.add(only(up, total), lift(state.shared))
        scale = sum(weights.values())
        cohort.notes["weights"] = {i: w / scale for i, w in weights.items()}
        cohort.notes["loss"] = losses / scale
        if agreement.clients > 1:
            cohort.notes["cosine"] = agreement.mean()
        return state._replace(shared={k: (v / scale).to(state.shared[k].dtype) for k, v in total.items()})


class Agreement:
    """Mean cosine over all pairs of updates, from the sum of unit vectors alone: (‖Σu‖² − n)/(n(n − 1))."""

    def __init__(self) -> None:
        self.sum: Tensor | float = 0.0
        self.clients = 0

    def add(self, rows: Params, anchor: Params) -> None:
        updates = torch.cat([(rows[k] - anchor[k]).flatten(1).double() for k in sorted(rows)], dim=1)
        lengths = updates.norm(dim=1, keepdim=True)
        self.sum = self.sum + (updates / lengths.clamp(min=1e-300)).sum(0)
        self.clients += int((lengths > 0).sum())

    def mean(self) -> float:
        n = self.clients
        return float((torch.as_tensor(self.sum).square().sum() - n) / (n * (n - 1)))
