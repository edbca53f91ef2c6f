"""Fixed-point numbers for sums: integers modulo 2³² or 2⁶⁴, on which masks cancel exactly.

q = round(weight · clip(value) / step) on the client; Σ weight · value = step · Σ q on the server, each term within half a
step. A sum wraps around only beyond clients · largest / step, which is computed before anything is sent: 32 bits where
every step is fine enough, else 64, else an error. A value beyond its range is clipped, and how many were is summed, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError, VoidRound
from fedvlm.privacy.secure.messages import Integers
from fedvlm.privacy.secure.sums import FINE, Summand

FINEST = -40  # exponent of the finest step; a finer one gains nothing
CLIPPED = "clipped"  # the sum that says how many values were clipped


Summands = Mapping[str, Summand]


@dataclass(frozen=True)
class SumPlan:
    """How the summands of a round become one vector of integers. Server and clients compute the same one."""

    summands: dict[str, Summand]
    steps: dict[str, float]
    bits: int
    clients: int  # that it leaves room for

    @classmethod
    def of(cls, summands: Summands, clients: int) -> SumPlan:
        values = sum(prod(s.shape) for s in summands.values())
        known = dict(sorted(summands.items())) | {CLIPPED: Summand((), float(max(1, values)), 1.0)}
        for bits in (32, 64):
            steps = {k: finest_step(s, largest(s, known), clients, bits) for k, s in known.items()}
            if all(steps.values()):
                return cls(known, steps, bits, clients)
        name = next(k for k, step in steps.items() if not step)
        raise FedvlmError(
            f"secure=true: {name} of {clients} clients, each up to {largest(known[name], known):g}, can add up to more than "
            f"64 bits hold in steps of {known[name].step:.2g}; give a smaller secure_range=, weights=uniform or a smaller "
            "participation="
        )

    @property
    def dtype(self) -> type[np.uint32] | type[np.uint64]:
        return np.uint32 if self.bits == 32 else np.uint64

    @cached_property
    def length(self) -> int:
        return sum(prod(s.shape) for s in self.summands.values())

    @property
    def nbytes(self) -> int:
        return self.length * self.bits // 8

    @property
    def step(self) -> float:
        """The step of the updates: a mean over clients is within half of it (less, where weights are above 1)."""
        return max((self.steps[k] for k, s in self.summands.items() if s.step == FINE), default=1.0)

    def encode(self, values: Params) -> Integers:
        """The integers of some clients, [clients, length]."""
        clients = len(next(iter(values.values())))
        flat, clipped = [], torch.zeros(clients, 1, dtype=torch.float64)
        limited = {}
        for name, summand in self.summands.items():
            if name == CLIPPED:
                continue
            value = values[name].detach().double().reshape(clients, *summand.shape)
            if not value.isfinite().all():
                raise FedvlmError(f"{name} has numbers that are not finite, which cannot be masked")
            clipped += (value.abs() > summand.high).reshape(clients, -1).sum(1, keepdim=True)
            limited[name] = value.clamp(-summand.high, summand.high)
        for name, value in limited.items():
            weight = self.summands[name].weight
            scaled = value * expand(limited[weight].round(), value) if weight else value
            flat.append((scaled / self.steps[name]).round().reshape(clients, -1))
        whole = torch.cat([*flat, clipped], 1).numpy().astype(np.int64)
        return whole.astype(self.dtype)  # negative numbers as 2^bits − their size

    def decode(self, total: Integers, clients: int) -> Params:
        """The sums in float64, from the integers added up over so many clients."""
        signed = torch.from_numpy(total.view(np.int32 if self.bits == 32 else np.int64).astype(np.int64))
        found: Params = {}
        for (name, summand), part in zip(
            self.summands.items(), signed.split([prod(s.shape) for s in self.summands.values()]), strict=True
        ):
            most = clients * in_steps(largest(summand, self.summands), self.steps[name])
            if part.numel() and int(part.abs().max()) > most:
                raise VoidRound(
                    f"the sum of {name} over {clients} clients is beyond what they can have sent; one of them does not "
                    "keep to the protocol, and the model of the round before stays"
                )
            found[name] = part.double().reshape(summand.shape) * self.steps[name]
        return found


def largest(summand: Summand, among: Summands) -> float:
    """The largest value of a client's contribution."""
    return summand.high * (among[summand.weight].high if summand.weight else 1)


def finest_step(summand: Summand, most: float, clients: int, bits: int) -> float:
    """The finest power of two for which the sum cannot wrap around; 0 where it is too coarse."""
    exponents = [0] if summand.step == 1 else range(FINEST, 1)
    for step in (2.0**e for e in exponents):
        if step <= summand.step and clients * in_steps(most, step) < 2 ** (bits - 1):
            return step
    return 0.0


def in_steps(value: float, step: float) -> int:
    return ceil(value / step)


def expand(weight: Tensor, value: Tensor) -> Tensor:
    return weight.reshape(*weight.shape, *[1] * (value.dim() - weight.dim()))
