"""Optimal transport against independent solvers: row masses, objectives, planted outsiders, extreme inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fedvlm.errors import FedvlmError
from fedvlm.parts.transport import semi_unbalanced, unbalanced


def problem(classes: int, columns: int, seed: int, kind: str = "points"):
    """Squared distances between random points in 32 dimensions, which are similar to each other, or uniform random costs."""
    draw = np.random.default_rng(seed)
    if kind == "points":
        cost = ((draw.normal(size=(classes, 1, 32)) - draw.normal(size=(1, columns, 32))) ** 2).sum(-1)
    else:
        cost = draw.random((classes, columns))
    return cost / cost.max(), draw.dirichlet(np.full(classes, 3.0)), draw.dirichlet(np.full(columns, 3.0))


def solve(cost, rows, columns, strength, steps=300):
    return semi_unbalanced(*(torch.from_numpy(v) for v in (cost, rows, columns)), strength, steps).numpy()


def objective(cost, plan, columns, strength):
    mass = plan.sum(0)
    logs = np.log(np.where(mass > 0, mass / columns, 1))
    return (cost * plan).sum() + strength * (mass * logs - mass + columns).sum()


def lower_bound(cost, plan, rows, columns, strength):
    """The dual objective, a lower bound for every plan, at two choices of the rows' multipliers derived from this plan."""
    prices = strength * np.log(np.maximum(plan.sum(0), 1e-300) / columns)
    least, paid = (cost + prices).min(1), (plan * (cost + prices)).sum(1) / rows
    return max(
        (rows * multipliers).sum()
        - strength * (columns * np.expm1((multipliers[:, None] - cost).max(0) / strength)).sum()
        for multipliers in (least, paid)
    )


@pytest.mark.parametrize("kind", ["points", "any"])
@pytest.mark.parametrize("strength", [0.001, 0.01, 0.1, 0.3])
@pytest.mark.parametrize("shape", [(1, 30), (3, 7), (12, 90), (30, 10)])
def test_semi_unbalanced_is_optimal(shape, strength, kind):
    cost, rows, columns = problem(*shape, seed=1, kind=kind)
    plan = solve(cost, rows, columns, strength)
    value = objective(cost, plan, columns, strength)
    assert plan.min() >= 0
    assert np.abs(plan.sum(1) - rows).max() < 1e-12
    assert value - lower_bound(cost, plan, rows, columns, strength) < 1e-3 * value


@pytest.mark.parametrize("strength", [0.01, 0.1, 1.0, 10.0])
def test_semi_unbalanced_agrees_with_a_general_solver(strength):
    optimize = pytest.importorskip("scipy.optimize")
    cost, rows, columns = problem(4, 6, seed=2, kind="any")

    def value_and_gradient(x):
        mass = x.reshape(cost.shape).sum(0)
        gradient = cost + strength * np.log(np.maximum(mass, 1e-12) / columns)
        return objective(cost, x.reshape(cost.shape), columns, strength), gradient.reshape(-1)

    met = {"type": "eq", "fun": lambda x: x.reshape(cost.shape).sum(1) - rows}
    start = np.outer(rows, columns).reshape(-1)
    found = optimize.minimize(
        value_and_gradient,
        start,
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * 24,
        constraints=[met],
        options={"maxiter": 500},
    )
    assert found.success
    ours = objective(cost, solve(cost, rows, columns, strength), columns, strength)
    assert found.fun * (1 - 1e-3) < ours < found.fun * (1 + 1e-4)


@pytest.mark.parametrize("kind", ["points", "any"])
@pytest.mark.parametrize("shape", [(6, 25), (20, 120)])
def test_a_large_strength_gives_balanced_transport(shape, kind):
    ot = pytest.importorskip("ot")
    cost, rows, columns = problem(*shape, seed=3, kind=kind)
    value = objective(cost, solve(cost, rows, columns, 1e4), columns, 1e4)
    assert value == pytest.approx(ot.emd2(rows, columns, cost), rel=1e-3)


@pytest.mark.parametrize(
    "kind, strength", [("points", 0.05), ("any", 0.05), ("points", 0.5), ("any", 0.5), ("any", 5.0)]
)
def test_semi_unbalanced_agrees_with_pot(kind, strength):
    """POT's plan is entropic: its objective is slightly above the optimum, its dual slightly below."""
    ot = pytest.importorskip("ot")
    cost, rows, columns = problem(10, 40, seed=4, kind=kind)
    plan = solve(cost, rows, columns, strength)
    theirs = ot.unbalanced.sinkhorn_unbalanced(
        rows, columns, cost, 1.5e-3, (np.inf, strength), numItermax=50_000, stopThr=1e-10
    )
    value, other = (objective(cost, p, columns, strength) for p in (plan, theirs))
    assert lower_bound(cost, theirs, rows, columns, strength) * (1 - 1e-3) < value <= other * (1 + 1e-6)
    assert value == pytest.approx(other, rel=1e-3)
    mass = plan.sum(0)  # and for these column masses no plan is cheaper
    assert (cost * plan).sum() == pytest.approx(ot.emd2(rows, mass * (rows.sum() / mass.sum()), cost), rel=1e-3)


def test_one_row_has_a_closed_form():
    """π_j ∝ a_j exp(−C_j/τ); a column's mass is a softmax."""
    cost, rows, columns = problem(1, 9, seed=5)
    weight = columns * np.exp(-cost[0] / 0.2)
    np.testing.assert_allclose(solve(cost, rows, columns, 0.2)[0], weight / weight.sum(), atol=1e-12)


def test_with_a_small_strength_every_row_takes_its_cheapest_column():
    cost, rows, columns = problem(8, 20, seed=6, kind="any")
    plan = solve(cost, rows, columns, 1e-6)
    np.testing.assert_allclose(plan[np.arange(8), cost.argmin(1)], rows, rtol=1e-6)


def test_identical_costs_give_the_desired_column_masses():
    _, rows, columns = problem(5, 11, seed=7)
    for level in (0.0, 1.0, -3.0):
        np.testing.assert_allclose(solve(np.full((5, 11), level), rows, columns, 0.3).sum(0), columns, atol=1e-12)


def test_one_column_and_columns_and_rows_without_mass():
    cost, rows, columns = problem(5, 1, seed=8)
    np.testing.assert_allclose(solve(cost, rows, columns, 0.1)[:, 0], rows)
    cost, rows, columns = problem(5, 8, seed=8)
    columns[[0, 3]], rows[2] = 0, 0
    cost[:, 3] = 0  # even at no cost
    plan = solve(cost, rows, columns, 0.1)
    assert (plan[:, [0, 3]] == 0).all() and (plan[2] == 0).all()
    assert np.abs(plan.sum(1) - rows).max() < 1e-12


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 10**6), st.data())
def test_every_plan_is_finite_and_meets_its_row_masses(classes, columns, seed, data):
    """Costs and masses over many orders of magnitude, ties, zeros, any strength; Σa need not be Σb."""
    draw = np.random.default_rng(seed)
    magnitude = data.draw(st.sampled_from([1e-200, 1e-6, 1.0, 1e6, 1e200]))
    cost = np.round(draw.normal(size=(classes, columns)), 1) * magnitude
    rows = draw.random(classes) * 10.0 ** draw.integers(-18, 3, classes) * (draw.random(classes) > 0.2)
    wanted = draw.random(columns) * 10.0 ** draw.integers(-18, 3, columns)
    strength = data.draw(st.sampled_from([1e-300, 1e-12, 1e-3, 1.0, 1e3, 1e12]))
    plan = solve(cost, rows, wanted, strength, steps=5)
    assert np.isfinite(plan).all() and plan.min(initial=0) >= 0
    np.testing.assert_allclose(plan.sum(1), rows, rtol=1e-12, atol=0)


def test_more_sweeps_are_never_worse():
    cost, rows, columns = problem(20, 60, seed=9, kind="any")
    values = [objective(cost, solve(cost, rows, columns, 5.0, steps=s), columns, 5.0) for s in (1, 3, 10, 40, 200)]
    assert values == sorted(values, reverse=True) and values[0] > values[-1]


def test_invalid_problems_are_errors():
    cost, rows, columns = problem(3, 4, seed=10)
    with pytest.raises(FedvlmError, match="strength above 0, not 0"):
        solve(cost, rows, columns, 0)
    with pytest.raises(FedvlmError, match="finite"):
        solve(cost * np.nan, rows, columns, 1)
    with pytest.raises(FedvlmError, match="some column"):
        solve(cost, rows, columns * 0, 1)
    with pytest.raises(FedvlmError, match="negative"):
        solve(cost, -rows, columns, 1)
    with pytest.raises(FedvlmError, match="one of each"):
        solve(cost, columns, rows, 1)


def test_the_plan_has_the_dtype_of_the_costs():
    cost, rows, columns = (torch.from_numpy(v).float() for v in problem(3, 4, seed=11))
    assert semi_unbalanced(cost, rows, columns, 0.1).dtype == torch.float32
    assert semi_unbalanced(torch.zeros(0, 4), torch.zeros(0), columns, 0.1).shape == (0, 4)


def test_class_like_outsiders_receive_the_most_mass():
    """Ten outsiders near ten of the twenty classes, among 190 random ones, in 30 trials."""
    found = 0
    for seed in range(30):
        draw = torch.Generator().manual_seed(seed)

        def points(count, draw=draw):
            return F.normalize(torch.randn(count, 64, generator=draw, dtype=torch.float64), dim=-1)

        classes, outsiders = points(20), points(200)
        planted, twins = (torch.randperm(n, generator=draw)[:10] for n in (200, 20))
        outsiders[planted] = F.normalize(classes[twins] + 0.7 * points(10), dim=-1)
        cost = torch.cdist(classes, outsiders).square()
        rows, columns = (torch.full((n,), 1 / n, dtype=torch.float64) for n in cost.shape)
        mass = semi_unbalanced(cost / cost.max(), rows, columns, 0.1).sum(0)
        found += set(mass.topk(10).indices.tolist()) == set(planted.tolist())
    assert found >= 29


def costs(*shape, seed=0, spread=0.3):
    draw = torch.Generator().manual_seed(seed)
    return (0.75 + spread * torch.randn(*shape, generator=draw, dtype=torch.float64)).clamp(0, 2)


@pytest.mark.parametrize("epsilon, mass", [(0.1, 0.8), (0.1, 0.3), (0.05, 0.8), (1.0, 0.99)])
def test_unbalanced_equals_the_partial_transport_of_pot(epsilon, mass):
    """With column masses that sum to γ and a moved mass of γ, POT's partial transport is the same problem."""
    ot = pytest.importorskip("ot")
    cost = costs(3, 49, 2)
    plan = unbalanced(cost, epsilon, mass, iterations=5000, tolerance=1e-12)
    for ours, c in zip(plan.numpy(), cost.numpy(), strict=True):
        theirs = ot.partial.entropic_partial_wasserstein(
            np.full(49, 1 / 49), np.full(2, mass / 2), c, epsilon, mass, numItermax=20_000, stopThr=1e-13
        )
        np.testing.assert_allclose(ours, theirs, atol=1e-7)


def test_unbalanced_meets_column_masses_and_leaves_patches_out():
    plan = unbalanced(costs(4, 5, 196, 2))
    assert plan.shape == (4, 5, 196, 2)
    torch.testing.assert_close(plan.sum(-2), torch.full((4, 5, 2), 0.4, dtype=torch.float64))
    rows = plan.sum(-1) * 196
    assert 1 < rows.max() < 1.0011
    assert rows.min() < 0.3 and rows.mean().item() == pytest.approx(0.8)


def test_a_patch_that_fits_no_prompt_is_left_out():
    cost = torch.full((10, 2), 0.2, dtype=torch.float64)
    cost[7:9] = 1.8
    rows = unbalanced(cost).sum(-1)
    assert rows[7:9].max() < 1e-6 and rows[0].item() == pytest.approx(0.1, rel=1e-3)


def test_a_plan_does_not_depend_on_its_batch():
    """A problem that needs many iterations must not change one that has converged."""
    cost = torch.cat([costs(3, 20, 2, seed=1, spread=0.5), costs(3, 20, 2, seed=2, spread=0.02)])
    together = unbalanced(cost)
    torch.testing.assert_close(together, torch.stack([unbalanced(c) for c in cost]), rtol=1e-12, atol=0)
    assert not torch.equal(together[3:], unbalanced(cost[3:], tolerance=1e-9))


def test_unbalanced_in_float32_and_half_and_without_gradient():
    cost = costs(2, 30, 2)
    precise = unbalanced(cost)
    single = unbalanced(cost.float().requires_grad_())
    assert single.dtype == torch.float32 and not single.requires_grad
    torch.testing.assert_close(single, precise.float(), rtol=1e-3, atol=1e-6)
    assert unbalanced(cost.half()).dtype == torch.float16
    assert unbalanced(cost[:0]).shape == (0, 30, 2) and unbalanced(cost[:, :0]).shape == (2, 0, 2)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from([0.03, 0.1, 1.0, 100.0]))
def test_unbalanced_is_finite_for_any_cosines(patches, prompts, seed, epsilon):
    draw = torch.Generator().manual_seed(seed)
    cost = 2 * torch.rand(patches, prompts, generator=draw).round(decimals=1)
    plan = unbalanced(cost, epsilon)
    assert plan.isfinite().all() and plan.min() >= 0
    torch.testing.assert_close(plan.sum(0), torch.full((prompts,), 0.8 / prompts), rtol=1e-5, atol=1e-6)


def test_unbalanced_refuses_invalid_problems():
    wide = torch.tensor([[0.0, 0.0], [2.0, 1.0], [1.0, 2.0]])
    with pytest.raises(FedvlmError, match=r"differ by 2 .* at least 0\.0253 is needed"):
        unbalanced(wide, epsilon=0.01)
    assert unbalanced(wide, epsilon=0.0253).isfinite().all()
    assert unbalanced(wide.double(), epsilon=0.01).sum().item() == pytest.approx(0.8)
    with pytest.raises(FedvlmError, match=r"mass=1\.5"):
        unbalanced(torch.zeros(2, 2), mass=1.5)
    with pytest.raises(FedvlmError, match="too far apart"):
        unbalanced(torch.tensor([[0.0], [torch.nan]]))
