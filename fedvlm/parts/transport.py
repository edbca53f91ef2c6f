"""Two kinds of optimal transport: between classes and outsider prompts (FOCoOp's server; outsiders are
out-of-distribution images or names), and between image patches and prompts (FedOTP's clients).

**Semi-unbalanced** (FOCoOp 2025, Eq. 8): min ⟨C, π⟩ + τ KL(πᵀ1 ‖ a) subject to π1 = b: every class sends out all its
mass, and a column near many classes receives more than its share a. KL(m ‖ a) = Σ m log(m/a) − m + a. As printed,
Eqs. 33–36 fix the columns instead, which gives every column the same mass; we follow Eq. 8. The paper's Frank–Wolfe (a
vertex per row, step 2/(i+2)) is still 0.02 to 9 % from the optimum after 200 steps where τ is at most a tenth of the
costs, and farther above that. So each row in turn is set to its exact optimum (fully corrective, block-coordinate
Frank–Wolfe; Lacoste-Julien et al. 2013): π_cj = max(0, a_j exp((λ_c − C_cj)/τ) − the mass of the other rows in j). A
large τ makes these steps short. Therefore, where τ exceeds a twentieth of the range of the costs, rows are updated with
that smaller τ, and multipliers (prices) on the columns correct the difference. Stops once a dual bound proves the
objective to be within a relative 1e-4 of the optimum, or after a number of sweeps.

**Unbalanced** (FedOTP, CVPR 2024): min ⟨C, T⟩ − ε H(T) between N patches and M prompts with T1 ≤ 1/N and Tᵀ1 = γ/M: the
prompts take γ = 0.8 of the image, and patches that fit no prompt are left out. Scaling as in Benamou et al. (2015): u =
min(1, (1/N)/Kv), v = (γ/M)/Kᵀu. Each problem of a batch stops on its own, so its plan does not depend on the others.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvlm.errors import FedvlmError

TOLERANCE = 1e-4  # relative distance of a semi-unbalanced objective from the optimum that must be proved
SOFT = 0.05  # largest τ for row updates, as a share of the costs' range; 0.03 to 0.1 need about as many sweeps
STEEP = 0.9  # largest cost difference over ε, as a share of the largest x for which exp(x) is finite

Array = NDArray[np.float64]


def semi_unbalanced(cost: Tensor, rows: Tensor, columns: Tensor, strength: float, steps: int = 300) -> Tensor:
    """The plan π [C, N] for costs [C, N], row masses b [C], desired column masses a [N] and τ = strength, after at most
    `steps` sweeps over the rows. Row masses are always met exactly; a column with a = 0 receives nothing."""
    costs, b, a = (v.detach().double().cpu().numpy() for v in (cost, rows, columns))
    if costs.shape != (len(b), len(a)):
        raise FedvlmError(
            f"costs are {costs.shape}, for {len(b)} row and {len(a)} column masses; one of each is needed"
        )
    if not (strength > 0 and all(np.isfinite(v).all() for v in (strength, costs, b, a))):
        raise FedvlmError(f"transport needs finite costs and masses and a finite strength above 0, not {strength}")
    if (b < 0).any() or (a < 0).any() or (b.any() and not a.any()):
        raise FedvlmError("masses must not be negative, and some column must have a positive one where a row has")
    plan = np.zeros_like(costs)
    some = np.ix_(b > 0, a > 0)
    if plan[some].size:
        plan[some] = _solve(costs[some], b[b > 0], a[a > 0], strength, steps)
    return torch.from_numpy(plan).to(cost)


def _solve(costs: Array, b: Array, a: Array, strength: float, steps: int) -> Array:
    """semi_unbalanced where all masses are positive."""
    spread = float(np.ptp(costs))
    strength = max(strength, 1e-9 * spread)  # a smaller one gives the same plan, and its exponents would overflow
    soft = min(strength, SOFT * spread) or strength
    plan = np.outer(b, a / a.sum())
    price = np.zeros(len(a))  # the columns' multipliers, at the optimum τ log(mass/a)
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
        if least - bound <= TOLERANCE * abs(least) + 1e-12 * soft * b.sum():
            break
    return best


def _sweep(plan: Array, pull: Array, b: Array) -> Array:
    """Sets each row to its optimum for fixed other rows: π_cj = max(0, z exp(pull_cj) − rest_j) with Σ_j π_cj = b_c.

    Columns receive mass in the order of rest/exp(pull). Solving for z over the first k of them gives an upper bound for
    every k, which is attained for the right k; so z is the minimum over k."""
    mass = plan.sum(0)
    weights = np.exp(pull)
    # log 0: no other row uses the column; a level of ∞: all weights so far are 0
    with np.errstate(divide="ignore", over="ignore"):
        for c, row in enumerate(plan):
            rest = np.maximum(mass - row, 0)
            order = np.argsort(np.log(rest) - pull[c])
            level = ((b[c] + rest[order].cumsum()) / weights[c, order].cumsum()).min()
            row[:] = np.maximum(level * weights[c] - rest, 0)
            if not row.any():  # its mass is lost to rounding beside the other rows'
                row[order[0]] = b[c]
            row *= b[c] / row.sum()
            mass = rest + row
    return plan


@torch.no_grad()
def unbalanced(
    cost: Tensor, epsilon: float = 0.1, mass: float = 0.8, iterations: int = 100, tolerance: float = 1e-3
) -> Tensor:
    """The plan T [..., N, M] for costs [..., N, M], without gradient. Column masses are met; a row may exceed 1/N by a
    relative `tolerance`. A problem stops once no column's scaling changes by more than that (in the public code the
    whole batch stops, once its mean change is small)."""
    patches, prompts = cost.shape[-2:]
    if not (0 < mass <= 1 and epsilon > 0):
        raise FedvlmError(
            f"mass={mass} must be in (0, 1] and epsilon={epsilon} above 0: the total mass of the patches is 1"
        )
    if not cost.numel():
        return torch.zeros_like(cost)
    work = cost.to(torch.promote_types(cost.dtype, torch.float32))
    steep = (work - work.amin(-2, keepdim=True)) / epsilon  # a constant per column changes only v
    most, limit = float(steep.max()), STEEP * math.log(torch.finfo(work.dtype).max)
    if not most <= limit:
        raise FedvlmError(
            f"costs that differ by {most * epsilon:.3g} are too far apart for epsilon={epsilon}; "
            f"at least {1.01 * most * epsilon / limit:.3g} is needed"
        )
    kernel = (-steep).exp()
    transposed = kernel.mT.contiguous()
    u = torch.ones_like(kernel[..., :1])
    v = mass / prompts / (transposed @ u)
    active = torch.ones_like(v[..., :1, :], dtype=torch.bool)  # a problem that has stopped no longer changes
    for _ in range(iterations):
        u = torch.where(active, (1 / patches / (kernel @ v)).clamp(max=1), u)
        updated = torch.where(active, mass / prompts / (transposed @ u), v)
        active = ((updated / v - 1).abs() >= tolerance).any(-2, keepdim=True)
        v = updated
        if not active.any():
            break
    return (u * kernel * v.mT).to(cost.dtype)
