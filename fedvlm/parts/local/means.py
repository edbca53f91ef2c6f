"""Means over the steps of a round, one number per client: for what a local rule tells of its mechanism (Local.effects)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedvlm.core.data import Data
from fedvlm.core.state import Params, is_running_statistic


class Means:
    """Sums and counts of steps, by name."""

    def __init__(self, data: Data):
        self.data = data
        self.sums: Params = {}
        self.steps: Params = {}

    def add(self, **values: Tensor) -> None:
        """Add the parameters of one step; clients that still train are a prefix of all."""
        for name, value in values.items():
            if name not in self.sums:
                for kept in (self.sums, self.steps):
                    kept[name] = torch.zeros(len(self.data), dtype=self.data.dtype, device=self.data.x.device)
            self.sums[name][: len(value)] += value.detach()
            self.steps[name][: len(value)] += 1

    def found(self, *names: str) -> Params:
        """0 for a client that took no step."""
        zero = torch.zeros(len(self.data), dtype=self.data.dtype, device=self.data.x.device)
        return {k: self.sums[k] / self.steps[k].clamp(min=1) if k in self.sums else zero for k in names}


def relative_to_plain(names: Iterable[str], changed: Sequence[Tensor], plain: Sequence[Tensor]) -> Tensor:
    """‖changed − plain‖ / ‖plain‖ of gradients, one number per client; running statistics do not count."""
    pairs = [(c, p) for k, c, p in zip(names, changed, plain, strict=True) if not is_running_statistic(k)]
    difference = sum((c - p).flatten(1).double().square().sum(1) for c, p in pairs)
    total = sum(p.flatten(1).double().square().sum(1) for _, p in pairs)
    return torch.as_tensor(difference / torch.as_tensor(total).clamp(min=1e-300)).sqrt()
