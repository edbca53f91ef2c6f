"""GOC, FOCoOp's server (Liao et al., ICML 2025, §3.3): which clients' outsiders look like a class, and what to do with them.

The classes' mean contexts and all K·U outsider contexts are matched by semi-unbalanced transport (fedvlm/transport.py),
cost = squared distance over its maximum: every class sends its mass out, and an outsider near classes receives much.
Those with the most are seemly: t^g ← α t^g + (1 − α) · their barycentre, by rows of the plan (taken literally, Eq. 10
shrinks contexts to a few percent). The U with the least go on as outsiders (Eq. 11 lacks the minus sign), by default as
the paper says among all K·U; keep_nouns=true chooses for each noun among its K versions. α, τ and how many are seemly
are not in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm import transport
from fedvlm.core import Cohort, FedvlmError, Params
from fedvlm.merge.base import Replies
from fedvlm.merge.classwise import Classwise


@dataclass(frozen=True)
class Transport(Classwise):
    steady: float = 0.9  # α, what a class keeps of its mean context
    relax: float = 0.1  # τ, how strongly outsiders want equal mass, in units of the largest cost
    seemly: float = 0.1  # share of all outsiders that are taken for class-like
    keep_nouns: bool = False  # one version of each noun goes on, the least class-like

    requires_parameters: ClassVar[tuple[str, ...]] = ("context", "outsiders")

    def __post_init__(self) -> None:
        if not (0 <= self.steady <= 1 and 0 <= self.seemly <= 1 and self.relax > 0):
            raise FedvlmError(
                f"steady={self.steady:g} and seemly={self.seemly:g} must be between 0 and 1, relax={self.relax:g} above 0"
            )

    def calibrated(self, shared: Params, replies: Replies, cohort: Cohort) -> Params:
        classes, sets = shared["context"], replies.shared["outsiders"]
        count, flat = sets.shape[1], sets.flatten(0, 1)
        plan = match(classes, flat, self.relax)
        mass = plan.sum(0)
        often = max(1, round(self.seemly * len(flat))) if self.seemly else 0
        context = drawn_to_barycentre(
            classes, flat, plan, mass.sort(descending=True, stable=True).indices[:often], self.steady
        )
        keep = least(mass.view(-1, count)) if self.keep_nouns else mass.sort(stable=True).indices[:count].sort().values
        cohort.notes |= {"seemly_mass": float(mass.sort().values[len(flat) - often :].sum())}
        return shared | {"context": context, "outsiders": flat[keep]}


def match(classes: Tensor, outsiders: Tensor, relax: float) -> Tensor:
    """The plan [classes, outsiders], every row's mass 1/C."""
    one, other = (v.flatten(1).double() for v in (classes, outsiders))
    cost = torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist").square()
    cost = cost / cost.max().clamp(min=torch.finfo(cost.dtype).tiny)
    rows, columns = (cost.new_full((n,), 1 / n) for n in cost.shape)
    return transport.semi_unbalanced(cost, rows, columns, relax)


def drawn_to_barycentre(classes: Tensor, outsiders: Tensor, plan: Tensor, seemly: Tensor, steady: float) -> Tensor:
    """Each class drawn to the mean of the seemly outsiders it is matched with; one matched with none stays."""
    part = plan[:, seemly]
    total = part.sum(1, keepdim=True)
    centre = torch.einsum("cj,j...->c...", part / total.clamp(min=1e-300), outsiders[seemly].double())
    drawn = steady * classes.double() + (1 - steady) * centre
    return torch.where((total > 0).view(-1, *[1] * (classes.dim() - 1)), drawn, classes.double()).to(classes.dtype)


def least(mass: Tensor) -> Tensor:
    """For each noun the client version with the least mass; rows of the K·U."""
    return mass.argmin(0) * mass.shape[1] + torch.arange(mass.shape[1], device=mass.device)
