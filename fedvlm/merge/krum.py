"""Krum and multi-Krum (Blanchard et al., 2017): only replies with many near neighbours count.

A reply's score is the sum of squared distances to its n − f − 2 nearest others; the `keep` best are averaged (1 is Krum).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedvlm.core import Cohort, State
from fedvlm.merge.mean import Mean, combine


@dataclass(frozen=True)
class Krum(Mean):
    byzantine: int = 1  # f, how many may lie
    keep: int = 1  # how many are averaged

    def round(self, state: State, cohort: Cohort) -> State:
        ids, up = cohort.ask("train", state.shared)
        flat = torch.cat([up["n"][:, None][:, :0], *(up[k].flatten(1) for k in sorted(state.shared))], dim=1).double()
        apart = torch.cdist(flat, flat).square()
        near = max(1, min(len(ids) - self.byzantine - 2, len(ids) - 1))
        score = apart.sort(1).values[:, 1 : near + 1].sum(1)  # the nearest is itself
        best = score.argsort(stable=True)[: max(1, min(self.keep, len(ids)))]
        weight = torch.zeros(len(ids), dtype=torch.float64)
        weight[best] = 1 / len(best)
        cohort.notes |= {
            "weights": dict(zip(ids.tolist(), weight.tolist(), strict=True)),
            "loss": float(up["loss"].median()),
        }
        return state._replace(shared=combine(up, state.shared, weight))
