"""Gradient descent for a few clients side by side: the loop every local rule shares, and the optimisers in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedvlm.core import Batch, Data, Params, tracked

Loss = Callable[[Params, Batch], Tensor]  # one number a client
FOLLOW = 0.1  # of the way from a running statistic to a batch's, each step: batch norm's usual momentum

Slopes = Callable[[Params, Batch], tuple[Tensor, Sequence[Tensor]]]  # that, and its gradient in each parameter


@dataclass(frozen=True)
class Pace:
    """How a client walks downhill. Optimiser state lives for one round and belongs to one client."""

    lr: float = 0.01
    epochs: int = 1
    batch: int = 32
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.0  # sgd only
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)  # adam, adamw
    eps: float = 1e-8  # adam, adamw
    schedule: Literal["constant", "cosine"] = "constant"  # over rounds

    def rate(self, data: Data) -> float:
        if self.schedule == "constant":
            return self.lr
        return float(self.lr * 0.5 * (1 + np.cos(np.pi * (data.round - 1) / data.rounds)))


@torch.no_grad()
def descend(pace: Pace, params: Params, data: Data, slopes: Slopes, updates: int = 1) -> Tensor:
    """Trains `params` [clients, ...] in place for the round's epochs, so many updates a batch; the mean training loss of
    each client."""
    total = torch.zeros(len(data), dtype=data.kind, device=data.x.device)
    steps = np.ceil(data.counts("train") / pace.batch) * pace.epochs
    if not params:
        return total
    walk, rate = Walk(pace, params), pace.rate(data)
    active = 0
    for batch in data.batches(pace.batch, pace.epochs):
        if len(batch.y) != active:
            active = len(batch.y)
            now = {k: v[:active] for k, v in params.items()}
        for _ in range(updates):
            each, found = slopes(now, batch)
            walk.step(active, found, rate)
            total[:active] += each / updates
    return total / data.here(np.maximum(steps, 1)).to(total.dtype)


def by_autograd(loss: Loss) -> Slopes:
    """The slopes of any loss. Clients do not meet in it, so one backward pass serves them all."""

    @torch.enable_grad()
    def slopes(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        leaves = {k: v.detach().requires_grad_() for k, v in now.items()}
        each = loss(leaves, batch)
        return each.detach(), torch.autograd.grad(each, list(leaves.values()), torch.ones_like(each))

    return slopes


def tied(slopes: Slopes, anchor: Params, pull: float) -> Slopes:
    """The same loss with + pull/2 ‖w − anchor‖², over the anchor's names."""

    def more(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        each, found = slopes(now, batch)
        if pull == 0 or not anchor:
            return each, found
        away = {k: v - anchor[k] for k, v in now.items() if k in anchor and not tracked(k)}
        extra = torch.stack([a.square().flatten(1).sum(1) for a in away.values()]).sum(0)
        pulled = [f + pull * away[k] if k in away else f for k, f in zip(now, found, strict=True)]
        return each + pull / 2 * extra, pulled

    return more


def ahead(now: Params, found: Sequence[Tensor], rate: float) -> Params:
    """One plain step from here, elsewhere: what is trained stays where it is."""
    return {k: v if tracked(k) else v - rate * f for (k, v), f in zip(now.items(), found, strict=True)}


class Walk:
    """SGD, Adam, AdamW as torch.optim defines them, in place, on the first `active` clients."""

    def __init__(self, pace: Pace, params: Params):
        self.pace, self.steps = pace, 0
        self.follow = [(i, v) for i, (k, v) in enumerate(params.items()) if tracked(k)]
        self.which = [i for i, k in enumerate(params) if not tracked(k)]
        self.values = [v for k, v in params.items() if not tracked(k)]
        if not all(v.is_contiguous() for v in self.values):
            raise ValueError("parameters must be contiguous: the fused kernels would read them wrongly, and silently")
        slots = {"sgd": 1 if pace.momentum else 0, "adam": 2, "adamw": 2}[pace.optimiser]
        self.slots = [[torch.zeros_like(v) for v in self.values] for _ in range(slots)]

    def step(self, active: int, slopes: Sequence[Tensor], rate: float) -> None:
        self.steps += 1
        for i, v in self.follow:
            v[:active].sub_(slopes[i], alpha=FOLLOW)
        if self.follow:
            slopes = [slopes[i] for i in self.which]
        values = [v[:active] for v in self.values]
        slots = [[s[:active] for s in slot] for slot in self.slots]
        if self.pace.optimiser == "sgd":
            self._sgd(values, slopes, slots, rate)
        else:
            self._adam(values, slopes, slots, rate)

    def _sgd(self, values: list[Tensor], slopes: Sequence[Tensor], slots: list[list[Tensor]], rate: float) -> None:
        for i, (value, slope) in enumerate(zip(values, slopes, strict=True)):
            if self.pace.weight_decay:
                slope = slope + self.pace.weight_decay * value
            if self.pace.momentum:
                slope = slots[0][i].mul_(self.pace.momentum).add_(slope)
            value.sub_(slope, alpha=rate)

    def _adam(self, values: list[Tensor], slopes: Sequence[Tensor], slots: list[list[Tensor]], rate: float) -> None:
        # torch's own fused kernel: a third of the time of separate passes (benchmarks/steps.py)
        kernel = torch._fused_adam_ if self.pace.optimiser == "adam" else torch._fused_adamw_
        steps = [torch.tensor(float(self.steps), device=values[0].device)] * len(values) if values else []
        beta1, beta2 = self.pace.betas
        kernel(
            values,
            [s.contiguous() for s in slopes],
            slots[0],
            slots[1],
            [],
            steps,
            lr=rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=self.pace.weight_decay,
            eps=self.pace.eps,
            amsgrad=False,
            maximize=False,
        )
