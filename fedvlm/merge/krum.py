"""Krum and multi-Krum (Blanchard et al., 2017): only replies with many near neighbours count.

A reply's score is the sum of squared distances to its n − f − 2 nearest others; the `best` ones are averaged (1 is Krum).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fedvlm.core import Cohort, State
from fedvlm.merge.mean import Mean, combine


@dataclass(frozen=True)
class Krum(Mean):
    weights: Literal["uniform"] = "uniform"  # a liar would give any size
    byzantine: int = 1  # f, how many may lie
    best: int = 1  # how many are averaged

    def round(self, state: State, cohort: Cohort) -> State:
        ids, up = cohort.ask("train", state.shared)
        gaps = self.watch(state, cohort, ids, up)
        flat = torch.cat([up["n"][:, None][:, :0], *(up[k].flatten(1) for k in sorted(state.shared))], dim=1).double()
        apart = torch.cdist(flat, flat).square()
        near = max(1, min(len(ids) - self.byzantine - 2, len(ids) - 1))
        score = apart.sort(1).values[:, 1 : near + 1].sum(1)  # the nearest is itself
        best = score.argsort(stable=True)[: max(1, min(self.best, len(ids)))]
        weight = torch.zeros(len(ids), dtype=torch.float64)
        weight[best] = 1 / len(best)
        cohort.notes |= {
            "weights": dict(zip(ids.tolist(), weight.tolist(), strict=True)),
            "loss": float(up["loss"].median()),
        }
        shared = combine(up, state.shared, weight)
        return state._replace(shared=shared, server=state.server | gaps.kept)
