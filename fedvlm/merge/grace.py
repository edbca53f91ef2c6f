"""GRACE's server (Zhang et al., MICCAI 2023): replies that agree with the others count more.

a_i ∝ n_i · c_i, with c_i the mean cosine between client i's update and each other's; where one is negative all are
shifted so that the least is 1e-3, as the public code does. Running statistics are averaged but have no say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedvlm.core import Cohort, Params, State, lift, tracked
from fedvlm.merge.ga import share
from fedvlm.merge.mean import Mean, combine

LEAST = 1e-3


@dataclass(frozen=True)
class Grace(Mean):
    def round(self, state: State, cohort: Cohort) -> State:
        ids, up = cohort.ask("train", state.shared)
        gaps = self.watch(state, cohort, ids, up)
        size = up["n"].double() if self.weights == "size" else torch.ones(len(ids), dtype=torch.float64)
        cosine = consistency(up, state.shared)
        weight = share(size * cosine)
        told = {"weights": weight, "consistency": cosine}
        cohort.notes |= {k: dict(zip(ids.tolist(), v.tolist(), strict=True)) for k, v in told.items()}
        cohort.notes["loss"] = float(np.average(up["loss"].numpy(), weights=size.numpy()))
        return state._replace(shared=combine(up, state.shared, weight), server=state.server | gaps.kept)


def consistency(up: Params, shared: Params) -> Tensor:
    """Each client's mean cosine to the others' updates, made positive; all alike where there is nothing to compare."""
    names = sorted(k for k in shared if not tracked(k))
    if len(next(iter(up.values()))) < 2 or not names:
        return torch.ones(len(next(iter(up.values()))), dtype=torch.float64)
    unit = torch.cat([(up[k] - lift(shared)[k]).flatten(1).double() for k in names], dim=1)
    unit = unit / unit.norm(dim=1, keepdim=True).clamp(min=1e-300)
    pairs = unit @ unit.T
    mean = (pairs.sum(1) - pairs.diagonal()) / (len(unit) - 1)
    return mean - mean.min() + LEAST if mean.min() <= 0 else mean
