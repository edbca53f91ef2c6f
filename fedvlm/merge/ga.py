"""GA (Zhang et al., CVPR 2023): weigh up the clients whom averaging has hurt most.

a_i += step_t · G_i / max|G|, clipped to [0, 1] and normalised; step_t = step/M · (1 − (t − 1)/T).  G_i = L_i(w_g) − L_i(w_i)
on validation loss (our reading; the public code takes accuracy). All gaps zero leave the weights as they are.
The gap of a round comes with the next round's reply (see `Gaps`), just when the next weights are needed: one exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedvlm.core import Cohort, Params, State
from fedvlm.merge.mean import Gaps, Mean, combine, refuse_without_gaps


@dataclass(frozen=True)
class Ga(Mean):
    weights: Literal["uniform"] = "uniform"  # the start; sizes have no say
    gaps: bool = True  # always: they are the method
    step: float = 0.2  # of the first round, divided by the number of clients

    def __post_init__(self) -> None:
        refuse_without_gaps(self)

    def init(self, clients: int) -> Params:
        return super().init(clients) | {"weight": torch.ones(clients)}

    def round(self, state: State, cohort: Cohort) -> State:
        ids, up = cohort.ask("train", state.shared)
        gaps = self.watch(state, cohort, ids, up)
        at = torch.from_numpy(ids)
        weight = share(state.server["weight"][at])
        found = torch.tensor([gaps.found.get(i, 0.0) for i in ids.tolist()], dtype=torch.float64)
        weight = self.adjust(weight, found, cohort.round - 1, cohort.rounds)
        return self.finish(state, cohort, ids, up, weight, gaps)

    def adjust(self, weight: Tensor, gap: Tensor, round: int, rounds: int) -> Tensor:
        """One step up for those who were hurt, relative to the one hurt most."""
        largest = gap.abs().max()
        if largest == 0:
            return weight
        pace = self.step / len(weight) * (1 - (max(round, 1) - 1) / max(rounds, 1))
        return share((weight + pace * gap / largest).clamp(0, 1))

    def finish(self, state: State, cohort: Cohort, ids: np.ndarray, up: Params, weight: Tensor, gaps: Gaps) -> State:
        """The weighted sum, with the weights kept for those who answered, their common share of the whole unchanged."""
        at = torch.from_numpy(ids)
        kept = state.server["weight"].clone()
        kept[at] = (weight * kept[at].double().sum()).to(kept.dtype)
        cohort.notes |= {"weights": dict(zip(ids.tolist(), weight.tolist(), strict=True))}
        cohort.notes["loss"] = float(up["loss"].mean())
        shared = combine(up, state.shared, weight)
        return state._replace(shared=shared, server=state.server | gaps.kept | {"weight": kept})


def share(weight: Tensor) -> Tensor:
    """On the simplex, in float64; even where nothing is left."""
    weight = weight.double()
    total = weight.sum()
    return weight / total if total > 0 else torch.full_like(weight, 1 / len(weight))
