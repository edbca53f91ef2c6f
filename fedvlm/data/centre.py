"""centre=own: each client takes the mean of its own images off their embeddings, h ← (h − m)/‖h − m‖.

m is the mean over the client's training and validation images, without their labels; over its test images where it has no
others (unseen_split=all). It never leaves the client. A domain's style moves all embeddings alike, so the mean holds much of
it; but a newcomer needs unlabelled images of its own, which is another protocol than that without.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.data import Data, Extra
from fedvlm.errors import FedvlmError


def centred(data: Data) -> Data:
    if data.x.dim() != 2 or not data.x.is_floating_point():
        raise FedvlmError("centre=own is for embeddings, and this adapter sees something else; leave centre= out")
    for name, extra in data.extras.items():
        if not extra.aligned:
            raise FedvlmError(
                f"centre=own: the {name} examples belong to no client, so there is no mean to take off; leave one out"
            )
    means = torch.stack([mean_of(data, i) for i in range(len(data))])
    owner = torch.from_numpy(np.repeat(np.arange(len(data)), data.bounds[:, 3] - data.bounds[:, 0]))
    by_row = means[owner]

    def moved(x: Tensor) -> Tensor:
        return F.normalize(x - by_row.view(len(x), *[1] * (x.dim() - 2), -1), dim=-1)

    extras = {k: Extra(moved(e.x), e.y, e.aligned) for k, e in data.extras.items()}
    return replace(data, x=moved(data.x), extras=extras)


def mean_of(data: Data, client: int) -> Tensor:
    first, _, mid, last = (int(b) for b in data.bounds[client])
    rows = data.x[first:mid] if mid > first else data.x[first:last]
    return rows.mean(0) if len(rows) else data.x.new_zeros(data.x.shape[1:])
