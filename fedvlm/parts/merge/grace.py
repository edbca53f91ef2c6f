"""GRACE's server (Zhang et al., MICCAI 2023): replies that agree with the others count more.

a_i ∝ n_i · c_i, with c_i the mean cosine between client i's update and each other's; where one is not positive all are
shifted so that the smallest is 1e-3, as in the public code. Running statistics are averaged but not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Merge, by_client
from fedvlm.core.model import Model
from fedvlm.core.ranges import default
from fedvlm.core.state import Params, State, is_running_statistic, with_client_axis
from fedvlm.parts.merge.ga import normalised, total_variation

SMALLEST = 1e-3  # the least c_i after the shift


@dataclass(frozen=True)
class Grace(Merge):
    weights: Literal["size", "uniform"] = default("size", "effort")  # by training examples, or the same for all clients

    effects: ClassVar[Mapping[str, str]] = {
        "from_sizes": "total variation distance of the clients' weights from those that weights= says; 0: the plain mean",
    }

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        replies = self.gather(state, cohort)
        size = replies.sizes(self.weights)
        cosine = consistency(replies.shared, state.shared, len(size))
        weight = normalised(size * cosine)
        cohort.acted(from_sizes=total_variation(weight, normalised(size)))
        cohort.notes["consistency"] = by_client(replies.ids, cosine)
        loss = float(np.average(replies.values["loss"].numpy(), weights=size.numpy()))
        return self.finish(state, cohort, replies, replies.sum(weight), weight, loss)


def consistency(trained: Params, shared: Params, clients: int) -> Tensor:
    """Each client's mean cosine to the others' updates, shifted where one is not positive; ones where there is nothing to
    compare."""
    names = sorted(k for k in shared if not is_running_statistic(k))
    if clients < 2 or not names:
        return torch.ones(clients, dtype=torch.float64)
    sent = with_client_axis(shared)
    unit = torch.cat([(trained[k] - sent[k]).flatten(1).double() for k in names], dim=1)
    unit = unit / unit.norm(dim=1, keepdim=True).clamp(min=1e-300)
    cosines = unit @ unit.T
    mean: Tensor = (cosines.sum(1) - cosines.diagonal()) / (len(unit) - 1)
    return mean - mean.min() + SMALLEST if mean.min() <= 0 else mean
