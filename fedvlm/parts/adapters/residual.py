"""LoRA whose frozen weights the server can change: what FedEx-LoRA and FLoRA need (merge=exact).

A projection W becomes W + scale · (M + B A): A and B are trained as in adapter=lora, and M [width, width] = 0 at the start
is what the server has added to the frozen weight. Clients never change M, whatever the local rule: like a running
statistic it has no gradient, no weight decay and no proximal term. Parameters, all shared: `….A`, `….B` and
`….running_residual` (M) of each projection.

M is dense and travels with the others, down and back up: width² numbers a projection beside 2 · rank · width of A and B.
In the papers clients send A and B alone, and receive the residual or the stacked factors of rank (clients × rank).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.state import Params
from fedvlm.parts.adapters.lora import Lora

RESIDUAL = ".running_residual"


@dataclass(frozen=True)
class Residual(Lora):
    def init(self, task: Task, seed: int) -> Params:
        residuals = {c.name + RESIDUAL: torch.zeros(c.width, c.width) for c in self.changed(task)}
        return super().init(task, seed) | residuals

    def factors(self, task: Task, params: Params) -> Params:
        """M as a product of full rank: B A + I M = [B I] [A; M]."""
        found: Params = {}
        for name, width, _ in self.changed(task):
            down, up = params[f"{name}.A"], params[f"{name}.B"]
            unit = torch.eye(width, dtype=up.dtype, device=up.device).expand(len(up), -1, -1)
            found[f"{name}.A"] = torch.cat([down, without_gradient(params[name + RESIDUAL])], 1)
            found[f"{name}.B"] = torch.cat([up, unit], 2)
        return found


def without_gradient(value: Tensor) -> Tensor:
    """The value; its gradient is 0, which autograd still has to return."""
    return value.detach() + 0 * value.sum((-2, -1), keepdim=True)
