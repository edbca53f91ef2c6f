"""benchmarks/reference.py, which computes five methods independently, and benchmarks/defaults.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedvlm.config.config import resolve
from fedvlm.data.pool import Pools
from fedvlm.training import train
from fedvlm.training.planned_run import PlannedRun

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GIVEN = {
    "data": "emoji",
    "unseen": ["noto"],
    "domains": 4,
    "batch": 100_000,
    "rounds": 3,
    "lr": 0.03,
    "evaluate_every": 3,
}


@pytest.mark.parametrize("method", ["fedavg", "fedot", "fedlt"])
def test_both_reach_the_same_parameters_where_nothing_is_drawn(method, monkeypatch, tmp_path):
    """Batches of all images, and initial values that are the same by definition."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import reference  # benchmarks/reference.py

    setup, pools = resolve(method, GIVEN), Pools()
    run = train.train(PlannedRun(setup, pools.load(setup), tmp_path / "run"))
    problem = reference.problem_of(setup, pools)
    found = reference.trained(method, problem, reference.settings_of(run), 50)
    state, _ = run.load()
    moved = (found.shared["head"] - problem.names).abs().max()
    assert moved > 1e-3
    torch.testing.assert_close(found.shared["head"], state.shared["head"].float(), atol=float(moved) / 1000, rtol=0)
    scores = run.record.finished.last["clients"]
    assert reference.accuracy(found.model, found.shared, problem.unseen) / 100 == pytest.approx(
        scores["noto"]["shared"]["test"], abs=1.01 / len(problem.unseen.test.y)
    )
    for client, weights in zip(problem.clients, found.personal, strict=True):
        ours = scores[client.name]["personal"]["test"]
        theirs = reference.accuracy(found.model, weights, client) / 100
        assert theirs == pytest.approx(ours, abs=1.01 / len(client.test.y))


def test_the_mask_is_the_same_function(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import reference

    setup, pools = resolve("fedclip", GIVEN), Pools()
    problem, task = reference.problem_of(setup, pools), pools.load(setup).task
    params = setup.adapter.init(task, 1)
    model = reference.Masked(problem)
    names = {"attention.0.weight": "w1", "attention.0.bias": "b1", "attention.2.weight": "w2", "attention.2.bias": "b2"}
    model.load_state_dict({theirs: params[ours] for theirs, ours in names.items()})
    x = problem.unseen.test.x
    ours = setup.adapter.logits(task, {k: v[None] for k, v in params.items()}, x[None])[0]
    torch.testing.assert_close(model(x).detach(), ours, atol=1e-4, rtol=0)


def test_the_grid_is_two_steps_to_either_side(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import defaults  # benchmarks/defaults.py

    assert defaults.grid(0.03) == (0.003, 0.01, 0.03, 0.1, 0.3)
    assert defaults.grid(0.2) == (0.03, 0.1, 0.2, 0.3, 1.0) and defaults.grid(0.08) == (0.01, 0.03, 0.08, 0.1, 0.3)
    assert defaults.grid(1e-3) == (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


def test_the_advised_lr_loses_least_where_it_loses_most(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import defaults

    def found(low, shipped, high):
        values = [
            {0.001: 0.0, 0.003: a, 0.01: b, 0.03: c, 0.1: 0.0} for a, b, c in zip(low, shipped, high, strict=True)
        ]
        return defaults.Found("fedot", 0.01, dict(zip("xy", values, strict=True)))

    near = found(low=(50, 80), shipped=(59, 79), high=(60, 70))
    far = found(low=(57, 80), shipped=(50, 79), high=(60, 70))
    assert (near.worst(0.01), near.advised) == (1, 0.01)
    assert (far.worst(0.01), far.worst(0.003), far.advised) == (10, 3, 0.003)
    first = ["fedot", "0.01, advised 0.003", "50.00 (60.00 at 0.03)", "79.00 (80.00 at 0.003)", "10.00"]
    assert list(defaults.rows([far], ["x", "y"])) == [first]
    assert defaults.cell(found(low=(1, 1), shipped=(59, 79), high=(2, 2)), "x") == "59.00"
