"""GOC, FOCoOp's server (Liao et al., ICML 2025, §3.3): moves class contexts towards class-like outsiders.

The classes' mean contexts and all K·U outsider contexts of the K clients are matched by semi-unbalanced transport
(fedvlm/transport.py), cost = squared distance over its maximum: every class sends out its mass, and an outsider context
near classes receives much. The share `class_like` of them with the most mass is class-like:
t^g ← α t^g + (1 − α) · their barycentre, with the rows of the plan normalised (taken literally, Eq. 10 shrinks contexts
to a few percent). The U with the least mass are the next outsider contexts (Eq. 11 lacks the minus sign), by default,
as in the paper, among all K·U; keep_nouns=true chooses for each noun among its K versions. α, τ and how many are
class-like are not in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm import transport
from fedvlm.core import Cohort, FedvlmError, Params
from fedvlm.keys import Positive, Share
from fedvlm.merge.base import Replies
from fedvlm.merge.classwise import Classwise


@dataclass(frozen=True)
class Transport(Classwise):
    retain: Share = 0.9  # α, weight of a class's mean context against the class-like outsiders; 1: no change
    relaxation: Positive = 0.1  # τ, penalty on unequal masses of outsiders, as a share of the largest cost
    class_like: Share = 0.1  # share of all outsider contexts that count as class-like; 0: none
    keep_nouns: bool = False  # true: keep the least class-like version of each noun; false: the least class-like of all

    requires_parameters: ClassVar[tuple[str, ...]] = ("context", "outsiders")

    def __post_init__(self) -> None:
        if not (0 <= self.retain <= 1 and 0 <= self.class_like <= 1 and self.relaxation > 0):
            raise FedvlmError(
                f"retain={self.retain:g} and class_like={self.class_like:g} must be between 0 and 1, "
                f"relaxation={self.relaxation:g} above 0"
            )

    def calibrated(self, shared: Params, replies: Replies, cohort: Cohort) -> Params:
        classes, sets = shared["context"], replies.shared["outsiders"]
        count, flat = sets.shape[1], sets.flatten(0, 1)
        plan = transport_plan(classes, flat, self.relaxation)
        mass = plan.sum(0)
        number = max(1, round(self.class_like * len(flat))) if self.class_like else 0
        class_like = mass.sort(descending=True, stable=True).indices[:number]
        context = drawn_to_barycentre(classes, flat, plan, class_like, self.retain)
        least = mass.sort(stable=True).indices[:count].sort().values
        kept = least_per_noun(mass.view(-1, count)) if self.keep_nouns else least
        cohort.notes |= {"class_like_mass": float(mass.sort().values[len(flat) - number :].sum())}
        return shared | {"context": context, "outsiders": flat[kept]}


def transport_plan(classes: Tensor, outsiders: Tensor, relaxation: float) -> Tensor:
    """The plan [classes, outsiders], every row's mass 1/C."""
    one, other = (v.flatten(1).double() for v in (classes, outsiders))
    cost = torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist").square()
    cost = cost / cost.max().clamp(min=torch.finfo(cost.dtype).tiny)
    rows, columns = (cost.new_full((n,), 1 / n) for n in cost.shape)
    return transport.semi_unbalanced(cost, rows, columns, relaxation)


def drawn_to_barycentre(classes: Tensor, outsiders: Tensor, plan: Tensor, class_like: Tensor, steady: float) -> Tensor:
    """Each class context moved towards the mean of the class-like outsider contexts it is matched with, weighted by the
    plan; a class matched with none stays. `class_like` are indices of outsiders."""
    part = plan[:, class_like]
    total = part.sum(1, keepdim=True)
    barycentre = torch.einsum("cj,j...->c...", part / total.clamp(min=1e-300), outsiders[class_like].double())
    moved = steady * classes.double() + (1 - steady) * barycentre
    return torch.where((total > 0).view(-1, *[1] * (classes.dim() - 1)), moved, classes.double()).to(classes.dtype)


def least_per_noun(mass: Tensor) -> Tensor:
    """For each noun the client version with the least mass, as indices into the K·U contexts; mass is [K, U]."""
    return mass.argmin(0) * mass.shape[1] + torch.arange(mass.shape[1], device=mass.device)
