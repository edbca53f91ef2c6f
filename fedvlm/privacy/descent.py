"""DP-SGD (Abadi et al., 2016), the training loop of a client under dp=example.

Each of the ⌈n/B⌉·epochs steps takes every example with probability B/n (possibly none). Its gradient is the one of a client
that has this example only, so that any local rule's `gradients` give it, for many examples at a time. Gradients are clipped
to the norm C over all trained parameters, summed, N(0, z²C²) is added, and the sum is divided by B. Private parameters get
the same treatment: they act on later gradients of the shared ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, Optimiser, OptimiserSettings
from fedvlm.core.marks import Mark
from fedvlm.core.state import Params, nbytes
from fedvlm.privacy.noise import normal, uniform

if TYPE_CHECKING:
    from fedvlm.core.merge import Merge

# on an override of a local rule's train, fit or personal_copy that is safe under dp=example: it reads the data by
# `optimise` alone
covered = Mark("covered")
MEMORY = 128 << 20  # bytes for the gradients of single examples


@runtime_checkable
class ReleasesOnce(Protocol):
    """A local rule that, with dp=example, adds noise once a round to what it sends of all examples, instead of training
    with noise."""

    def uncovered(self, merge: Merge) -> str:
        """Why the noise would not cover all that clients send; "" where it does."""
        ...


@dataclass(frozen=True)
class PrivateDescent:
    noise: float
    clip: float
    secret: bytes
    most: int = 1024  # examples at a time

    def on(self, data: Data) -> PrivateData:
        return PrivateData(**{f.name: getattr(data, f.name) for f in fields(data)}, descent=self)

    @torch.no_grad()
    def optimise(self, settings: OptimiserSettings, params: Params, data: Data, gradients: Gradients) -> Tensor:
        """Train like core.descent.optimise, one client; the loss that it returns is 0."""
        assert len(data) == 1, "gradients of examples are computed for one client at a time"
        n = int(data.counts("train")[0])
        rate, steps = sampling(n, settings.batch, settings.epochs)
        optimiser, lr = Optimiser(settings, params), settings.rate(data)
        client = int(data.ids[0])
        for step in range(steps):
            chosen = np.flatnonzero(uniform(self.secret, "batch", data.round, client, step, count=n) < rate)
            total = self.clipped_sum(params, gradients, data, chosen, step)
            sizes = [v.numel() for v in total]
            drawn = normal(self.secret, "example", data.round, client, step, count=sum(sizes))
            noise = (torch.from_numpy(drawn) * self.noise * self.clip).split(sizes)
            noisy = [(v + e.view(v.shape).to(v.device)) / (rate * n) for v, e in zip(total, noise, strict=True)]
            optimiser.step(1, [g.to(v.dtype) for g, v in zip(noisy, params.values(), strict=True)], lr)
        return torch.zeros(1, dtype=data.dtype, device=data.x.device)

    def clipped_sum(
        self, params: Params, gradients: Gradients, data: Data, chosen: np.ndarray, step: int = 0
    ) -> list[Tensor]:
        """Σ over these examples (positions in the client's training data), [1, …] for each parameter, in float64."""
        total = [torch.zeros_like(v, dtype=torch.float64) for v in params.values()]
        for rows in self.blocks(params, chosen + int(data.bounds[0, 0])):
            at = data.tensor(rows)[:, None]
            weight = torch.ones(len(at), 1, dtype=data.dtype, device=at.device)
            batch = Batch(data.take(at), data.y[at], weight, step, (data.seed, data.round))
            _, each = gradients({k: v.expand(len(at), *v.shape[1:]) for k, v in params.items()}, batch)
            lengths = torch.stack([torch.linalg.vector_norm(g.flatten(1).double(), dim=1) for g in each]).norm(dim=0)
            factor = (
                (self.clip / lengths).clamp(max=1.0).where(lengths.isfinite(), 0)
            )  # else one could be told from all
            for value, gradient in zip(total, each, strict=True):
                value += torch.tensordot(factor, gradient.double().nan_to_num(0, 0, 0), dims=1)
        return total

    def blocks(self, params: Params, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Blocks of as many examples as their gradients have room for."""
        size = max(1, min(self.most, MEMORY // max(1, nbytes(params))))
        for first in range(0, len(rows), size):
            yield rows[first : first + size]


@dataclass(frozen=True)
class PrivateData(Data):
    """A client's data under dp=example: models are trained on it with noise, whatever the local rule."""

    descent: PrivateDescent = field(kw_only=True)

    def optimise(self, settings: OptimiserSettings, params: Params, gradients: Gradients) -> Tensor:
        return self.descent.optimise(settings, params, self, gradients)


def sampling(examples: int, batch: int, epochs: int) -> tuple[float, int]:
    """The rate at which an example is in a batch, and the steps of a round."""
    return min(1.0, batch / max(1, examples)), -(-examples // batch) * epochs
