"""Optimal transport, two kinds: which outsiders look like a class (FOCoOp's server), which patches a prompt explains
(FedOTP's clients).

**Semi-unbalanced** (FOCoOp 2025, Eq. 8): min ⟨C, π⟩ + τ KL(πᵀ1 ‖ a) with hard rows π1 = b: every class sends out all
its mass, and a column near many classes receives more than its share a. KL(m ‖ a) = Σ m log(m/a) − m + a. As printed,
Eqs. 33–36 fix the columns instead, which gives every column the same mass; our reading is Eq. 8's. The paper's
Frank–Wolfe (a vertex per row, step 2/(i+2)) is still 0.02 to 9 % off after 200 steps where τ is at most a tenth of the
costs, and far off above. So each row in turn goes to its exact optimum instead of part of the way to a vertex (fully
corrective, block-coordinate Frank–Wolfe; Lacoste-Julien et al. 2013): π_cj = max(0, a_j exp((λ_c − C_cj)/τ) − what
others sent to j). A large τ makes such steps short, so above a twentieth of the costs' spread columns are softened to
that strength and held by multipliers (prices) until they stand where τ wants them. Stops once a dual bound proves the
objective right to 1e-4, or after so many sweeps.

**Unbalanced** (FedOTP, CVPR 2024): min ⟨C, T⟩ − ε H(T) between N patches and M prompts with T1 ≤ 1/N and Tᵀ1 = γ/M: the
prompts take γ = 0.8 of the picture, and a patch that fits neither is left out. Scaling as in Benamou et al. (2015): u =
min(1, (1/N)/Kv), v = (γ/M)/Kᵀu. Each problem of a batch stops on its own, so that its plan does not depend on the rest.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedvlm.core import FedvlmError

CLOSE = 1e-4  # how near the optimum, relative to the objective, a semi-unbalanced plan must be proved to be
SOFT = 0.05  # the strength rows are moved at, as a share of the costs' spread; 0.03 to 0.1 need about as many sweeps
STEEP = 0.9  # largest cost difference, in ε, as a share of the largest exponent that a number can have


def semi_unbalanced(cost: Tensor, rows: Tensor, columns: Tensor, strength: float, steps: int = 300) -> Tensor:
    """The plan π [C, N] for costs [C, N], row masses b [C] and wanted column masses a [N], after at most `steps` sweeps
    over the rows. Rows are always met; a column without mass gets nothing."""
    costs, b, a = (v.detach().double().cpu().numpy() for v in (cost, rows, columns))
    if costs.shape != (len(b), len(a)):
        raise FedvlmError(
            f"costs are {costs.shape}, for {len(b)} row and {len(a)} column masses; one of each is needed"
        )
    if not (strength > 0 and all(np.isfinite(v).all() for v in (strength, costs, b, a))):
        raise FedvlmError(f"transport needs finite costs and masses and a finite strength above 0, not {strength}")
    if (b < 0).any() or (a < 0).any() or (b.any() and not a.any()):
        raise FedvlmError("masses must not be negative, and some column must have one to take the rows'")
    plan = np.zeros_like(costs)
    some = np.ix_(b > 0, a > 0)
    if plan[some].size:
        plan[some] = _solve(costs[some], b[b > 0], a[a > 0], strength, steps)
    return torch.from_numpy(plan).to(cost)


def _solve(costs: np.ndarray, b: np.ndarray, a: np.ndarray, strength: float, steps: int) -> np.ndarray:
    spread = float(np.ptp(costs))
    strength = max(strength, 1e-9 * spread)  # less is the same choice, and its exponents would overflow
    soft = min(strength, SOFT * spread) or strength
    plan = np.outer(b, a / a.sum())
    price = np.zeros(len(a))  # what a column charges for a unit; at the optimum τ log(mass/a)
    above = costs - costs.min(1, keepdims=True)
    best, least, bound = plan, np.inf, -np.inf
    for _ in range(steps):
        pull = np.log(a) + price / strength - (above + price) / soft
        plan = _sweep(plan.copy(), pull - pull.max(1, keepdims=True), b)
        mass = np.maximum(plan.sum(0), np.finfo(float).tiny)
        value = (costs * plan).sum() + strength * (mass * np.log(mass / a) - mass + a).sum()
        price = price + soft * (np.log(mass / a) - price / strength)
        floor = b @ (costs + price).min(1) - strength * (a * np.expm1(price / strength)).sum()
        if value < least:
            best, least = plan, value
        bound = max(bound, floor)
        if least - bound <= CLOSE * abs(least) + 1e-12 * soft * b.sum():
            break
    return best


def _sweep(plan: np.ndarray, pull: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Each row to its optimum while the others stand: π_cj = max(0, z exp(pull_cj) − rest_j) with Σ_j π_cj = b_c.

    Columns fill in the order of rest/exp(pull). Any set of them gives a level z that is too high, or the right one."""
    mass = plan.sum(0)
    weights = np.exp(pull)
    with np.errstate(divide="ignore", over="ignore"):  # log 0: nobody else is there; a level of ∞: no weight yet
        for c, row in enumerate(plan):
            rest = np.maximum(mass - row, 0)
            order = np.argsort(np.log(rest) - pull[c])
            level = ((b[c] + rest[order].cumsum()) / weights[c, order].cumsum()).min()
            row[:] = np.maximum(level * weights[c] - rest, 0)
            if not row.any():  # a mass that rounding loses beside the others'
                row[order[0]] = b[c]
            row *= b[c] / row.sum()
            mass = rest + row
    return plan


@torch.no_grad()
def unbalanced(
    cost: Tensor, epsilon: float = 0.1, mass: float = 0.8, iterations: int = 100, still: float = 1e-3
) -> Tensor:
    """The plan T [..., N, M] for costs [..., N, M], without gradient. Columns are met; a row may exceed 1/N by `still`,
    the relative move of a column's scaling at which its problem stops (public code: the whole batch, by its mean)."""
    patches, prompts = cost.shape[-2:]
    if not (0 < mass <= 1 and epsilon > 0):
        raise FedvlmError(
            f"mass={mass} must be in (0, 1] and epsilon={epsilon} above 0: patches have a mass of 1 in all"
        )
    if not cost.numel():
        return torch.zeros_like(cost)
    work = cost.to(torch.promote_types(cost.dtype, torch.float32))
    steep = (work - work.amin(-2, keepdim=True)) / epsilon  # v takes up what a column's costs have in common
    most, limit = float(steep.max()), STEEP * math.log(torch.finfo(work.dtype).max)
    if not most <= limit:
        raise FedvlmError(
            f"costs that differ by {most * epsilon:.3g} are too far apart for epsilon={epsilon}; "
            f"at least {1.01 * most * epsilon / limit:.3g} is needed"
        )
    kernel = (-steep).exp()
    turned = kernel.mT.contiguous()
    u = torch.ones_like(kernel[..., :1])
    v = mass / prompts / (turned @ u)
    moving = torch.ones_like(v[..., :1, :], dtype=torch.bool)
    for _ in range(iterations):
        u = torch.where(moving, (1 / patches / (kernel @ v)).clamp(max=1), u)
        then = torch.where(moving, mass / prompts / (turned @ u), v)
        moving = ((then / v - 1).abs() >= still).any(-2, keepdim=True)  # once still, a problem stays as it is
        v = then
        if not moving.any():
            break
    return (u * kernel * v.mT).to(cost.dtype)
