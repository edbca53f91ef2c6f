"""Gradient descent for a few clients side by side: the training loop that all local rules use, and its optimisers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.data import Batch, Data
from fedvlm.core.ranges import Count, NotNegative, Positive, Range, Share, default
from fedvlm.core.state import Params, is_running_statistic

Loss = Callable[[Params, Batch], Tensor]  # one number per client
Gradients = Callable[[Params, Batch], tuple[Tensor, Sequence[Tensor]]]  # the loss, and its gradient in each parameter
Decay = Annotated[float, Range(0, 1, below=True)]

MOMENTUM = 0.1  # how far a running statistic moves towards the batch's in a step, as in torch's batch norm


@dataclass(frozen=True)
class OptimiserSettings:
    """Optimiser settings of a client. Optimiser state is reset every round."""

    lr: Positive = 0.01  # learning rate on the clients
    epochs: Count = default(1, "effort")  # passes over a client's training data per round
    batch: Annotated[int, Range(1, 1_000_000)] = default(32, "effort")  # examples per step
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"  # as in torch.optim
    momentum: Share = 0.0  # sgd only; 0: none
    weight_decay: NotNegative = 0.0  # 0: none
    betas: tuple[Decay, Decay] = (0.9, 0.999)  # adam and adamw only: decay of the running means
    eps: Positive = 1e-8  # adam and adamw only: added to the denominator
    schedule: Literal["constant", "cosine"] = "constant"  # of the learning rate over rounds

    def rate(self, data: Data) -> float:
        """The learning rate of this round."""
        if self.schedule == "constant":
            return self.lr
        return float(self.lr * 0.5 * (1 + np.cos(np.pi * (data.round - 1) / data.rounds)))


@runtime_checkable
class OptimisesItself(Protocol):
    """Data that models are trained on in another way than `optimise_in_turns`, as one with noise is."""

    def optimise(self, settings: OptimiserSettings, params: Params, gradients: Gradients) -> Tensor: ...


def optimise(settings: OptimiserSettings, params: Params, data: Data, gradients: Gradients, updates: int = 1) -> Tensor:
    """Trains `params` [clients, ...] in place for one round, with `updates` steps per batch; returns the mean training
    loss of each client."""
    if isinstance(data, OptimisesItself):
        return data.optimise(settings, params, gradients)
    return optimise_in_turns(settings, [(params, gradients)], data, updates)


@torch.no_grad()
def optimise_in_turns(
    settings: OptimiserSettings, groups: Sequence[tuple[Params, Gradients]], data: Data, updates: int = 1
) -> Tensor:
    """Train like `optimise`, with a group of parameters a batch, one group after the other."""
    total = torch.zeros(len(data), dtype=data.dtype, device=data.x.device)
    steps = np.ceil(data.counts("train") / settings.batch) * settings.epochs
    turns = [(params, gradients, Optimiser(settings, params)) for params, gradients in groups if params]
    if not turns:
        return total
    rate, active = settings.rate(data), 0
    for step, batch in enumerate(data.batches(settings.batch, settings.epochs)):
        if len(batch.y) != active:
            active = len(batch.y)
            now = [{k: v[:active] for k, v in params.items()} for params, _, _ in turns]
        at = step % len(turns)
        _, gradients, optimiser = turns[at]
        for _ in range(updates):
            each, found = gradients(now[at], batch)
            optimiser.step(active, found, rate)
            total[:active] += each / updates
    return total / data.tensor(np.maximum(steps, 1)).to(total.dtype)


def by_autograd(loss: Loss) -> Gradients:
    """Gradients of any loss. The losses of different clients are independent, so one backward pass computes all."""

    @torch.enable_grad()
    def gradients(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        leaves = {k: v.detach().requires_grad_() for k, v in now.items()}
        each = loss(leaves, batch)
        return each.detach(), torch.autograd.grad(each, list(leaves.values()), torch.ones_like(each))

    return gradients


def with_proximal_term(gradients: Gradients, anchor: Params, strength: float) -> Gradients:
    """The loss + strength/2 · ‖w − anchor‖², over the anchor's parameters."""

    def proximal(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        each, found = gradients(now, batch)
        if strength == 0 or not anchor:
            return each, found
        difference = {k: v - anchor[k] for k, v in now.items() if k in anchor and not is_running_statistic(k)}
        distance = torch.stack([d.square().flatten(1).sum(1) for d in difference.values()]).sum(0)
        total = [f + strength * difference[k] if k in difference else f for k, f in zip(now, found, strict=True)]
        return each + strength / 2 * distance, total

    return proximal


def gradient_step(now: Params, found: Sequence[Tensor], rate: float) -> Params:
    """The parameters after one plain gradient step, as new tensors."""
    return {k: v if is_running_statistic(k) else v - rate * f for (k, v), f in zip(now.items(), found, strict=True)}


class Optimiser:
    """SGD, Adam, AdamW as torch.optim defines them, in place, on the first `active` clients."""

    def __init__(self, settings: OptimiserSettings, params: Params):
        self.settings, self.steps = settings, 0
        self.statistics = [(i, v) for i, (k, v) in enumerate(params.items()) if is_running_statistic(k)]
        self.which = [i for i, k in enumerate(params) if not is_running_statistic(k)]
        self.values = [v for k, v in params.items() if not is_running_statistic(k)]
        if not all(v.is_contiguous() for v in self.values):
            raise ValueError("parameters must be contiguous: the fused kernels would silently read them wrongly")
        # optimiser state: the momentum buffer of SGD, the two running means of Adam
        slots = {"sgd": 1 if settings.momentum else 0, "adam": 2, "adamw": 2}[settings.optimiser]
        self.slots = [[torch.zeros_like(v) for v in self.values] for _ in range(slots)]

    def step(self, active: int, gradients: Sequence[Tensor], rate: float) -> None:
        self.steps += 1
        for i, v in self.statistics:
            v[:active].sub_(gradients[i], alpha=MOMENTUM)
        if self.statistics:
            gradients = [gradients[i] for i in self.which]
        values = [v[:active] for v in self.values]
        slots = [[s[:active] for s in slot] for slot in self.slots]
        if self.settings.optimiser == "sgd":
            self._sgd(values, gradients, slots, rate)
        else:
            self._adam(values, gradients, slots, rate)

    def _sgd(self, values: list[Tensor], gradients: Sequence[Tensor], slots: list[list[Tensor]], rate: float) -> None:
        if FUSED_SGD is not None and values and values[0].is_cuda:
            self._sgd_fused(values, gradients, slots, rate)
            return
        for i, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            if self.settings.weight_decay:
                gradient = gradient + self.settings.weight_decay * value
            if self.settings.momentum:
                gradient = slots[0][i].mul_(self.settings.momentum).add_(gradient)
            value.sub_(gradient, alpha=rate)

    def _sgd_fused(
        self, values: list[Tensor], gradients: Sequence[Tensor], slots: list[list[Tensor]], rate: float
    ) -> None:
        """The same in one kernel: a network's hundreds of parameters would take a GPU three launches each."""
        assert FUSED_SGD is not None
        settings, whole = self.settings, [g.contiguous() for g in gradients]
        FUSED_SGD(
            values, whole, slots[0] if settings.momentum else [], lr=rate, weight_decay=settings.weight_decay,
            momentum=settings.momentum, dampening=0.0, nesterov=False, maximize=False, is_first_step=self.steps == 1,
        )  # fmt: skip

    def _adam(self, values: list[Tensor], gradients: Sequence[Tensor], slots: list[list[Tensor]], rate: float) -> None:
        if not values:
            return
        whole = [g.contiguous() for g in gradients]
        if FUSED is None:
            self._adam_by_hand(values, whole, slots, rate)
            return
        settings, (beta1, beta2) = self.settings, self.settings.betas
        kernel = FUSED[0] if settings.optimiser == "adam" else FUSED[1]
        steps = [torch.tensor(float(self.steps), device=values[0].device)] * len(values)
        kernel(
            values, whole, *slots, [], steps, lr=rate, beta1=beta1, beta2=beta2, weight_decay=settings.weight_decay,
            eps=settings.eps, amsgrad=False, maximize=False,
        )  # fmt: skip

    def _adam_by_hand(
        self, values: list[Tensor], gradients: list[Tensor], slots: list[list[Tensor]], rate: float
    ) -> None:
        """The same with public operations, for a torch without the fused kernel."""
        settings, (beta1, beta2) = self.settings, self.settings.betas
        for value, gradient, mean, square in zip(values, gradients, *slots, strict=True):
            if settings.optimiser == "adamw":
                value.mul_(1 - rate * settings.weight_decay)
            elif settings.weight_decay:
                gradient = gradient + settings.weight_decay * value
            mean.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            deviation = (square / (1 - beta2**self.steps)).sqrt_().add_(settings.eps)
            value.addcdiv_(mean, deviation, value=-rate / (1 - beta1**self.steps))


Kernel = Callable[..., None]
_kernels = tuple(k for name in ("_fused_adam_", "_fused_adamw_") if (k := getattr(torch, name, None)) is not None)
# private to torch; takes a third of the time of separate passes (benchmarks/steps.py). None: public operations instead
FUSED: tuple[Kernel, ...] | None = _kernels if len(_kernels) == 2 else None
FUSED_SGD: Kernel | None = getattr(torch, "_fused_sgd_", None)  # also private; used on GPUs, so that a CPU's bits stay
