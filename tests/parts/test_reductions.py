"""Where one method must become another, or plain training with torch's own tools."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import ABLE, build, close, example, play, random_data, random_task
from torch.nn import functional as F

from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data
from fedvlm.core.state import Message
from fedvlm.engines.stacked import Stacked
from fedvlm.parts.adapters.head import Head
from fedvlm.parts.adapters.portfolio import Portfolio
from fedvlm.parts.adapters.prompt import Prompt
from fedvlm.parts.adapters.rotation import Rotation
from fedvlm.parts.local.apfl import Apfl
from fedvlm.parts.local.ditto import Ditto
from fedvlm.parts.local.prox import Prox
from fedvlm.parts.local.sgd import Sgd
from fedvlm.parts.merge.mean import Mean
from fedvlm.rounds.method import Method

pytestmark = pytest.mark.usefixtures("double")


def make(adapter=None, local=None, merge=None):
    return Method.build(adapter or Head(), local or Sgd(lr=0.1, batch=4), merge or Mean(), random_task(), seed=5)


@pytest.mark.parametrize("adapter", ["head", "attention", "rotation", "linear", "mlp"])
def test_prox_with_mu_0_is_sgd(adapter):
    data = random_data(random_task())
    close(
        play(build(adapter, "prox", "mean", mu=0.0), data, 6).state.shared,
        play(build(adapter, "sgd", "mean"), data, 6).state.shared,
    )


@pytest.mark.parametrize("adapter", ["head", "attention", "rotation"])
def test_ditto_shares_what_sgd_shares(adapter):
    data = random_data(random_task())
    close(
        play(build(adapter, "ditto", "mean"), data, 6).state.shared,
        play(build(adapter, "sgd", "mean"), data, 6).state.shared,
    )


def test_ditto_without_its_penalty_is_training_alone():
    data = random_data(random_task())
    rows = play(make(local=Ditto(lr=0.1, batch=4, strength=0.0)), data, 6).rows
    alone = play(make(Head(private=("head",))), data, 6).rows
    close({"head": rows["personal.head"][:5]}, {"head": alone["head"][:5]})


def test_apfl_shares_what_sgd_shares_and_mixes_in_a_model_of_its_own():
    """α = 1: a model trained alone; 0: the shared model; between: v moves by α times the loss's gradient at the mixture."""
    data = random_data(random_task())
    plain = play(make(), data, 6)
    rows, personal = {}, {}
    for mixture in (0.0, 0.4, 1.0):
        method = make(local=Apfl(lr=0.1, batch=4, mixture=mixture))
        played = play(method, data, 6)
        close(played.state.shared, plain.state.shared)
        rows[mixture] = played.rows
        shared = {k: v[None] for k, v in played.state.shared.items()}
        personal[mixture] = method.local.personal(played.rows, shared)["head"][:5]
    alone = play(make(Head(private=("head",))), data, 6).rows["head"][:5]
    close({"head": personal[1.0]}, {"head": alone})
    close({"head": personal[0.0]}, {"head": plain.state.shared["head"].expand(5, -1, -1)})
    mixed = 0.4 * rows[0.4]["personal.head"][:5] + 0.6 * plain.state.shared["head"]
    close({"head": personal[0.4]}, {"head": mixed})
    assert not torch.allclose(rows[0.4]["personal.head"][:5], alone, atol=1e-3)


def test_apfls_own_model_steps_along_the_gradient_at_the_mixture():
    task = random_task()
    data = random_data(task, [(4, 0, 0)] * 6)
    rows = play(make(local=Apfl(lr=0.1, batch=4, mixture=0.3)), data, 6, rounds=1).rows
    start, x, y = task.names(), data.x[:4], data.y[:4]

    def step(at: torch.Tensor, head: torch.Tensor, rate: float) -> torch.Tensor:
        at = at.clone().requires_grad_()
        (found,) = torch.autograd.grad(F.cross_entropy(task.scale * x @ at.T, y), at)
        return head - rate * found

    trained = step(start, start, 0.1)
    expected = step(0.3 * start + 0.7 * trained, start, 0.1 * 0.3)
    close({"head": rows["personal.head"][0]}, {"head": expected})


def test_ditto_with_a_large_penalty_stays_near_the_shared_model():
    data = random_data(random_task())
    strong = play(make(local=Ditto(lr=0.01, batch=4, strength=90.0, epochs=3)), data, 6, rounds=1).rows
    none = play(make(local=Ditto(lr=0.01, batch=4, strength=0.0, epochs=3)), data, 6, rounds=1).rows
    start = random_task().names()
    assert (strong["personal.head"][:5] - start).norm() < 0.2 * (none["personal.head"][:5] - start).norm()


def test_rotation_blocks_are_a_block_diagonal_dense_rotation():
    data = random_data(random_task())
    dense, blocked = Rotation(), Rotation(blocks=4)
    state, rows, *_ = play(make(blocked), data, 6)
    full = torch.stack([torch.block_diag(*r) for r in rows["skew"]])[:, None]
    x = data.x[None, :10].expand(6, -1, -1)
    head = state.shared["head"][None]
    a = blocked.logits(random_task(), {"head": head, "skew": rows["skew"]}, x)
    b = dense.logits(random_task(), {"head": head, "skew": full}, x)
    torch.testing.assert_close(a, b)


def test_with_equal_sizes_weights_size_and_uniform_agree():
    data = random_data(random_task(), sizes=((12, 2, 2),) * 4)
    ids = np.arange(4)
    close(
        play(make(), data, 4, ids=ids).state.shared,
        play(make(merge=Mean(weights="uniform")), data, 4, ids=ids).state.shared,
    )


def test_with_unequal_sizes_weights_size_and_uniform_differ():
    data = random_data(random_task())
    a, b = (play(make(merge=Mean(weights=w)), data, 6).state.shared["head"] for w in ("size", "uniform"))
    assert (a - b).abs().max() > 1e-4


def test_one_full_step_by_size_is_gradient_descent_on_all_data():
    """FedSGD: with one full batch per round, averaging by size is a step on the loss of all examples together."""
    data, task = random_data(random_task()), random_task()
    shared = play(make(local=Sgd(lr=0.5, batch=1000)), data, 6, rounds=1).state.shared["head"]
    rows = torch.cat([torch.arange(*data.bounds[i, :2]) for i in ABLE])
    head = task.names().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(task.scale * data.x[rows] @ head.T, data.y[rows]), head)
    torch.testing.assert_close(shared, (head - 0.5 * gradient).detach())


@pytest.mark.parametrize("optimiser", ["sgd", "adam", "adamw"])
def test_one_client_is_plain_training(optimiser):
    """Against torch.optim on a module, with the same batches, momentum and weight decay, over two rounds."""
    task = random_task()
    data = random_data(task, sizes=((22, 3, 3),))
    rule = Sgd(lr=0.05, batch=5, epochs=2, optimiser=optimiser, momentum=0.9 * (optimiser == "sgd"), weight_decay=0.02)
    method = make(local=rule)
    state = play(method, data, 1, rounds=2, ids=np.array([0])).state
    head = torch.nn.Linear(task.dim, len(task.classes), bias=False)
    head.weight.data.copy_(task.names())
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    for round in (1, 2):
        options = {"momentum": 0.9} if optimiser == "sgd" else {}
        reference = kinds[optimiser](head.parameters(), lr=0.05, weight_decay=0.02, **options)
        now = replace(data, round=round)
        for batch in now.batches(5, 2):
            real = batch.weight[0] > 0
            reference.zero_grad()
            F.cross_entropy(task.scale * head(batch.x[0][real]), batch.y[0][real]).backward()
            reference.step()
    torch.testing.assert_close(state.shared["head"], head.weight.data)


def test_momentum_does_not_leak_between_clients_or_rounds():
    """Two clients with the same data and the same batches end with the same model, whichever trains first."""
    task = random_task()
    one = random_data(task, sizes=((9, 1, 1),))
    twice = Data(one.x, one.y, np.repeat(one.bounds, 2, 0), np.array([0, 0]), one.seed, 0, one.rounds)
    method = make(local=Sgd(lr=0.1, batch=3, momentum=0.9))
    for chunk in (1, 2):
        engine = Stacked(method, twice, chunk)
        trained = Cohort(engine, np.array([0, 1]), 1).ask("train", Message(method.initial)).shared
        assert torch.equal(trained["head"][0], trained["head"][1])


def test_cosine_schedule_reaches_zero():
    task = random_task()
    data = random_data(task)
    rule = Sgd(lr=0.1, schedule="cosine")
    rates = [rule.rate(replace(data, round=r, rounds=10)) for r in range(1, 11)]
    assert rates[0] == pytest.approx(0.1) and all(a > b for a, b in itertools.pairwise(rates)) and rates[-1] < 0.003


def test_local_only_is_each_client_by_itself():
    data = random_data(random_task())
    method = make(Head(private=("head",)))
    rows = play(method, data, 6).rows["head"]
    for i in (0, 3):
        alone = play(method, data, 1, ids=np.array([i])).rows["head"]
        torch.testing.assert_close(rows[i], alone[i])


def test_the_proximal_term_and_its_gradient():
    """μ/2 ‖w − w_g‖², with gradient μ(w − w_g): neither detached nor without its square."""
    task = random_task()
    data = random_data(task, sizes=((4, 1, 1),))
    batch = next(iter(data.batches(4)))
    message = Message({"head": task.names()})
    now = {"head": task.names()[None] + 0.3}
    model = make().model
    loss, (plain,) = Sgd().gradients(model, message, {})(now, batch)
    more, (proximal,) = Prox(mu=0.7).gradients(model, message, {})(now, batch)
    torch.testing.assert_close(proximal - plain, 0.7 * (now["head"] - message.shared["head"]))
    torch.testing.assert_close(more - loss, 0.35 * (now["head"] - message.shared["head"]).square().sum()[None])


def test_a_portfolio_as_in_focoops_code(double):
    """θ = 0.2, contexts from draws of their own, a mean that is not normalised."""
    task, _ = example("portfolio")
    theirs = Portfolio(context=2, share=0.2, apart=True, normalised=False)
    start, ours = theirs.init(task, 3), Portfolio(context=2).init(task, 3)
    assert torch.equal(ours["own"], ours["context"]) and not torch.allclose(start["own"], start["context"])
    one = {k: v[None] for k, v in start.items()}
    shared, own = (Prompt(context=2).class_vectors(task, {"context": one[k]}) for k in ("context", "own"))
    assert torch.allclose(theirs.class_vectors(task, one), 0.8 * shared + 0.2 * own)


def test_a_portfolio_of_one_is_a_prompt(double):
    """Without a private share it is PromptFL; with all of it, the private context alone."""
    task, data = example("portfolio")
    prompt, params = Prompt(context=2), {k: v[None] for k, v in Portfolio(context=2).init(task, 3).items()}
    params["own"] = params["own"] + 0.1
    for share, name in ((0.0, "context"), (1.0, "own")):
        found = Portfolio(context=2, share=share).logits(task, params, data.x[None, :5])
        torch.testing.assert_close(found, prompt.logits(task, {"context": params[name]}, data.x[None, :5]))
