"""FOCoOp's mechanisms act: its ascent finds the worst case, its server loses no noun, its parts tell what they do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers import ABLE, RULES, example, random_task
from torch.nn import functional as F

from fedvlm.config.config import resolve
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Batch
from fedvlm.core.merge import Replies
from fedvlm.core.model import Model
from fedvlm.engines.stacked import Stacked
from fedvlm.parts.adapters.outsiders import Outsiders
from fedvlm.parts.local.bdro import Bdro, noise
from fedvlm.parts.merge.transport import Transport
from fedvlm.rounds.method import Method

PROMPTS = Outsiders(context=2, count=3)
FLAT = Outsiders(count=1)  # two classes and one outsider in the plane


def plane():
    """Encoded prompts and six images in the plane, for one client."""
    draw = torch.Generator().manual_seed(4)
    points = {
        k: F.normalize(torch.randn(1, n, 2, generator=draw), dim=-1) for k, n in (("context", 2), ("outsiders", 1))
    }
    batch = Batch(
        F.normalize(torch.randn(1, 6, 2, generator=draw), dim=-1),
        torch.tensor([[0, 1, 0, 1, 1, 0]]),
        torch.full((1, 6), 1 / 6),
    )
    return points, batch, random_task(2, 2)._replace(scale=4.0)


def worst_case(rule: Bdro, points, batch, task):
    start = {k: torch.full_like(v, rule.sigma) for k, v in points.items()}
    return rule.worst_case(lambda p: FLAT.losses(FLAT.logits_of(task, p, batch), batch.y), points, start, batch)


def objective(rule: Bdro, points, batch, task, name: str, shifts: torch.Tensor) -> torch.Tensor:
    """L(t + ε) − τ‖ε‖² − γ‖ε‖₁ of many ε [n, prompts, 2] of one kind of prompts."""
    many = {k: (v + shifts if k == name else v.expand(len(shifts), -1, -1)) for k, v in points.items()}
    text = torch.cat([many["context"], many["outsiders"]], 1)
    logits = task.scale * torch.einsum("nd,kcd->knc", batch.x[0], text)
    inside = logits[..., :2].logsumexp(-1)
    loss = 2 * logits.logsumexp(-1) - inside - logits.gather(-1, batch.y[0].expand(len(shifts), -1)[..., None])[..., 0]
    hold = rule.penalty if name == "context" else rule.outsider_penalty
    return loss.mean(-1) - hold * shifts.flatten(1).square().sum(1) - rule.l1 * shifts.flatten(1).abs().sum(1)


def fine_search(rule: Bdro, points, batch, task, name: str, reach: float = 1.5) -> float:
    """The largest objective on a grid over all directions, which is then refined around its best point."""
    shape = points[name].shape[1:]
    centre, best = torch.zeros(shape.numel()), -np.inf
    for _ in range(8):
        axis = torch.linspace(-reach, reach, 13)
        grid = torch.cartesian_prod(*[axis] * shape.numel()) + centre
        values = objective(rule, points, batch, task, name, grid.view(-1, *shape))
        best, centre = max(best, float(values.max())), grid[values.argmax()]
        reach /= 3
    return best


@pytest.mark.parametrize("hold, l1", [(3.0, 0.0), (8.0, 0.0), (8.0, 0.05)])
def test_the_ascent_finds_the_supremum(double, hold, l1):
    """Of the classes' prompts, then of the outsider's with the classes' perturbed, as a fine search finds it."""
    points, batch, task = plane()
    rule = Bdro(ascent_steps=30, penalty=hold, outsider_penalty=hold, l1=l1)
    shift = worst_case(rule, points, batch, task)
    for name in ("context", "outsiders"):
        nothing = float(objective(rule, points, batch, task, name, torch.zeros_like(shift[name])))
        found = float(objective(rule, points, batch, task, name, shift[name]))
        best = fine_search(rule, points, batch, task, name)
        assert best - nothing > 1e-3, "there is something to be found"
        assert found == pytest.approx(best, abs=1e-3 * (best - nothing))
        points[name] = points[name] + shift[name]


@pytest.mark.parametrize("hold", [0.1, 0.3, 1.0, 2.0, 5.0, 10.0])
def test_the_ascent_finds_the_supremum_over_the_whole_of_figure_7(double, hold):
    """Small penalties leave several maxima: none of 25 starts of L-BFGS ends much higher than the ascent's best."""
    draw = torch.Generator().manual_seed(int(10 * hold))
    for name in ("context", "outsiders"):
        for _ in range(3):
            size = (1, 3, 4) if name == "context" else (1, 2, 4)
            points = {
                "context": torch.randn(1, 3, 4, generator=draw),
                "outsiders": torch.randn(1, 2, 4, generator=draw),
            }
            points = {k: F.normalize(v, dim=-1) for k, v in points.items()}
            x = F.normalize(torch.randn(1, 8, 4, generator=draw) + 0.5, dim=-1)
            batch = Batch(x, torch.randint(3, (1, 8), generator=draw), torch.full((1, 8), 1 / 8))
            task, adapter = random_task(3, 4)._replace(scale=10.0), Outsiders(count=2)
            rule = Bdro(penalty=hold, outsider_penalty=hold, starts=3, ascent_steps=20)

            def loss(part, points=points, batch=batch, task=task, adapter=adapter):
                moved = {k: v + part[k] if k in part else v for k, v in points.items()}
                return batch.mean(adapter.losses(adapter.logits_of(task, moved, batch), batch.y))

            start = {name: torch.full(size, rule.sigma)}
            found = max(float(rule.ascend(loss, one)[0]) for one in (start, *rule.far_starts(start, batch)))
            best = max(highest_by_lbfgs(rule, loss, name, size, draw) for _ in range(25))
            assert found > 0.94 * best, (hold, name)  # 0.6 of it from the noise alone


def highest_by_lbfgs(rule, loss, name, size, draw) -> float:
    shift = (torch.randn(size, generator=draw) * 10 ** (3 * float(torch.rand(1, generator=draw)) - 1)).requires_grad_()
    solver = torch.optim.LBFGS([shift], max_iter=200, line_search_fn="strong_wolfe")

    def lost():
        solver.zero_grad()
        value = -(loss({name: shift}) - rule.price(name, shift)).sum()
        value.backward()
        return value

    solver.step(lost)
    return -float(lost().detach())


@pytest.mark.parametrize("hold", [20.0, Bdro.penalty])
def test_the_default_ascent_is_near_the_supremum_and_rises(double, hold):
    points, batch, task = plane()

    def found(steps: int) -> float:
        rule = Bdro(ascent_steps=steps, penalty=hold)
        return float(objective(rule, points, batch, task, "context", worst_case(rule, points, batch, task)["context"]))

    values = [found(n) for n in range(Bdro.ascent_steps + 1)]
    assert values[0] < values[1] and all(a <= b for a, b in itertools.pairwise(values))
    best = fine_search(Bdro(penalty=hold), points, batch, task, "context")
    assert best - values[-1] < 0.02 * (best - values[0])


def test_a_robust_round_tells_that_it_acts(double):
    """The perturbation is not the noise that it starts from: that is far smaller, and another draw changes little."""
    task, data = example("outsiders")
    method = Method.build(PROMPTS, Bdro(**RULES), Transport(), task, seed=5)
    cohort = Cohort(Stacked(method, data), ABLE, 1)
    method.round(method.init(len(data)), cohort)
    told = cohort.effects
    assert told.keys() == Bdro.effects.keys() | Transport.effects.keys()
    assert min(told["loss_gained"]) > 1e-3 and min(told["class_perturbation"]) > 1e-3
    drawn = noise({"all": torch.zeros(len(data), 8, task.dim)}, data, Bdro.sigma)["all"]
    assert float(drawn.flatten(1).norm(dim=1).max()) < 0.1 * min(told["perturbation"])
    assert told["kept_nouns"] == [3.0] and 0 < told["calibration"][0] < 1


def test_without_bos_is_plain_cross_entropy_over_classes_and_outsiders(double):
    setup = resolve("focoop-without-bos", {})
    assert type(setup.local).__name__ == "Sgd" and type(setup.merge).__name__ == "Transport"
    logits, y = (
        torch.randn(2, 6, 105, generator=torch.Generator().manual_seed(1)),
        torch.tensor([[0, 1, 2, 3, 4, 0]] * 2),
    )
    expected = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(2, 6)
    torch.testing.assert_close(setup.adapter.losses(logits, y), expected)
    assert (resolve("focoop", {}).adapter.losses(logits, y) > expected).all()


def test_a_kept_context_keeps_its_noun(double):
    """Whatever the masses, the next context of a noun is one of that noun's versions; no noun gets lost."""
    draw = torch.Generator().manual_seed(2)
    shared = {"context": torch.randn(4, 2, 8, generator=draw), "outsiders": torch.zeros(6, 2, 8)}
    base = torch.arange(6.0).view(1, 6, 1, 1) * torch.randn(
        1, 1, 2, 8, generator=draw
    )  # some nouns are far from classes
    sets = base + 0.1 * torch.randn(5, 6, 2, 8, generator=draw)
    cohort = Cohort(None, np.arange(5), 1)  # type: ignore[arg-type]
    after = Transport().calibrated(shared, Replies(np.arange(5), {}, {"outsiders": sets}), cohort)
    for noun, context in enumerate(after["outsiders"]):
        assert any(torch.equal(context, version) for version in sets[:, noun])
    assert cohort.effects["kept_nouns"] == [6.0]


def test_contexts_start_independently():
    """A phrase is the same for all."""
    task, _ = example("outsiders")
    start = torch.cat(list(PROMPTS.init(task, 1).values())).flatten(1)
    apart = torch.cdist(start, start) + torch.eye(len(start))
    assert len(start) == 5 + 5 + 3 and float(apart.min()) > 0.01
    assert not torch.equal(start, torch.cat(list(PROMPTS.init(task, 2).values())).flatten(1))


@pytest.mark.parametrize("fusion", [0.0, 0.2, 0.8, 1.0])
def test_the_share_of_the_global_context(double, fusion):
    task, _ = example("outsiders")
    adapter = Outsiders(context=2, count=3, fusion=fusion)
    one, other = torch.zeros(1, 5, 2, 8), torch.zeros(1, 5, 2, 8)
    one[..., 0, :], other[..., 1, :] = 1.0, 1.0
    share = adapter.diagnose(task, {"own": one, "context": other}, torch.empty(0))["global_share"]
    torch.testing.assert_close(share, torch.tensor([fusion**2 / (fusion**2 + (1 - fusion) ** 2)]))
    torch.testing.assert_close(
        adapter.diagnose(task, {"own": one, "context": one}, torch.empty(0))["global_share"], torch.tensor([fusion])
    )


def test_the_worst_case_of_the_authors_code_moves_every_prompt_by_steps_of_one_length(double):
    """Four steps of length 1 along one direction move a prompt by 4 at most, far more than the penalised worst case, and the
    loss there is cross-entropy + ½ H without −log p(ID)."""
    points, batch, task = plane()
    rule = Bdro(bos="authors", strength=0.5)
    model = Model(FLAT, task)
    losses = rule.losses_at(model, {}, batch, spread=1.0)
    start = {k: torch.full_like(v, rule.sigma) for k, v in points.items()}
    shift = rule.unit_steps(losses, points, start, batch)
    for moved in shift.values():
        assert (moved.norm(dim=-1) <= 0.5 * rule.ascent_steps + 1e-2).all() and (moved.norm(dim=-1) > 0.5).all()
    moved = {k: v + shift[k] for k, v in points.items()}
    logits = FLAT.logits_of(task, moved, batch)
    outsider = logits[..., 2:]
    expected = (
        F.cross_entropy(logits[0], batch.y[0], reduction="none") + 0.5 * (outsider.logsumexp(-1) - outsider.mean(-1))[0]
    )
    assert torch.allclose(rule.losses_at(model, {}, batch)(moved)[0], expected)
