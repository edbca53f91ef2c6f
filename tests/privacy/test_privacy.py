"""Differential privacy: what is spent agrees with two libraries, noise and clipping are what the accounting assumes, and
what is not covered is refused."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import (
    ABLE,
    RAGGED,
    RULES,
    example,
    play,
    random_data,
    random_task,
    same,
    scores,
    small_adapter,
    small_parts,
    small_setup,
    state_of,
    train_small,
)
from helpers import close as equal

from fedvlm import api
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Batch
from fedvlm.core.state import Reply, copy_per_client
from fedvlm.data.clients import Federation
from fedvlm.data.pool import Pools
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.privacy import accounting, mechanism
from fedvlm.privacy.accounting import Account, poisson_epsilon, smallest_noise
from fedvlm.privacy.descent import PrivateDescent
from fedvlm.privacy.mechanism import Privacy, norms
from fedvlm.privacy.noise import normal, uniform
from fedvlm.rounds.method import Method
from fedvlm.training import train
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.privacy_plan import check_method, planned, recorded

dp_accounting = pytest.importorskip("dp_accounting")

PRIVATE = {"dp": "client", "noise_multiplier": 1.0, "partition": "iid", "clients": 6, "unseen": ""}


def private_method(privacy: Privacy, adapter: str = "linear", local: str = "sgd", merge: str = "mean", **rules):
    chosen = small_parts(adapter, local, merge, **rules)
    task, data = example(chosen[0])
    return Method.build(*chosen, task, seed=5, privacy=privacy), data


def wide_method(privacy: Privacy, sizes=RAGGED, **rules):
    """A linear layer of 10,000 numbers: the deviation of noise in it is known within 3 %."""
    task = random_task(20, 500)
    rules = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "epochs": 1} | rules
    return Method.build(*small_parts("linear", "sgd", "mean", **rules), task, 5, privacy=privacy), random_data(
        task, sizes
    )


def of_clients(**changes) -> Privacy:
    return replace(Privacy("client", 1.0, 0.1, 5.0, secret=b"a"), **changes)


def federation_of(data, task) -> Federation:
    names = tuple(f"client {i}" for i in range(len(data)))
    return Federation(names, names, data, task)


@pytest.fixture
def coarse(monkeypatch):
    """Accounting in larger steps, for tests that ask for it every round."""

    def forget():
        accounting.composed_epsilon.cache_clear()
        accounting._loss_distribution.cache_clear()

    forget()
    monkeypatch.setattr(accounting, "STEP", 0.02)
    yield
    forget()


# What is spent


@pytest.mark.parametrize("rate, noise, count", [(0.1, 1.0, 50), (1.0, 5.0, 30)])
def test_poisson_cohorts_are_accounted_as_dp_accounting_does(rate, noise, count):
    from dp_accounting import pld

    accountant = pld.PLDAccountant()
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    expected = accountant.compose(event, count).get_epsilon(1e-5)
    assert poisson_epsilon(noise, rate, count, 1e-5) == pytest.approx(expected, rel=5e-4)
    assert poisson_epsilon(noise, rate, count, 1e-5) > expected - 1e-9  # never too small
    account = Account("client", noise, 1e-5, 100, 100 * rate, "poisson" if rate < 1 else "all")
    assert account.spent(count).epsilon == pytest.approx(expected, rel=5e-4)


def test_fixed_cohorts_are_accounted_as_dp_accounting_does():
    from dp_accounting import rdp

    event = dp_accounting.SampledWithoutReplacementDpEvent(100, 10, dp_accounting.GaussianDpEvent(1.5 / 2))
    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    expected = accountant.compose(event, 40).get_epsilon(1e-5)
    # a replaced client moves a sum of clipped updates by twice the norm
    assert Account("client", 1.5, 1e-5, 100, 10, "fixed").spent(40).epsilon == pytest.approx(expected, rel=1e-9)


def test_opacus_agrees():
    rate, noise, count = 0.1, 1.0, 50
    accountants = pytest.importorskip("opacus.accountants")
    found = poisson_epsilon(noise, rate, count, 1e-5)
    for kind, tolerance in ((accountants.PRVAccountant, 0.03), (accountants.RDPAccountant, 0.15)):
        accountant = kind()
        accountant.history = [(noise, rate, count)]
        theirs = accountant.get_epsilon(delta=1e-5)
        assert found == pytest.approx(theirs, rel=tolerance) and theirs > found - 0.02  # theirs are upper bounds, too


@pytest.mark.parametrize("target", [0.5, 8.0])
def test_a_target_is_reached_from_below(target):
    noise = smallest_noise(target, lambda z: poisson_epsilon(z, 0.2, 30, 1e-4))
    assert target - 0.01 < poisson_epsilon(noise, 0.2, 30, 1e-4) <= target


def test_local_noise_has_two_epsilons():
    asked = np.array([[0, 0], [1, 0], [1, 1], [2, 1]])
    account = Account("client", 3.0, 1e-5, 2, 2.0, "all", noisy_uploads=2, asked=asked)
    spent = account.spent(3)
    assert spent.local_epsilon == pytest.approx(poisson_epsilon(1.5, 1.0, 2, 1e-5))  # twice asked, and replaced
    assert spent.epsilon == pytest.approx(poisson_epsilon(3.0 * math.sqrt(2) / 2, 1.0, 3, 1e-5))
    assert account.spent(0) == (0.0, 0.0)


def test_every_client_is_accounted_by_its_own_rate(images, coarse):
    setup = small_setup(images, "fedavg", dp="example", noise_multiplier=1.0, rounds=4, batch=4, epochs=2)
    pool = Pools().load(setup)
    planned = PlannedRun(setup, pool)
    method, federation = planned.method, planned.federation
    account, sizes = method.privacy.account, federation.data.counts("train")[federation.seen]
    each = [poisson_epsilon(1.0, 4 / n, 4 * 2 * -(-int(n) // 4), account.delta) for n in sizes]
    assert account.spent(4).epsilon == pytest.approx(max(each))
    assert account.delta == pytest.approx(1 / sizes.min() ** 1.1)


# Noise and clipping


def test_noise_is_normal_and_depends_on_all_of_its_key():
    drawn = normal(b"secret", "server", 3, count=200_001)
    assert len(drawn) == 200_001 and abs(drawn.mean()) < 0.01 and drawn.std() == pytest.approx(1, abs=0.01)
    assert (drawn**4).mean() == pytest.approx(3, abs=0.1) and abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.01
    others = [normal(b"other", "server", 3, count=1000), normal(b"secret", "client", 3, count=1000)]
    others += [normal(b"secret", "server", 3, 0, count=1000), normal(b"secret", "server", 31, count=1000)]
    assert all(abs(np.corrcoef(drawn[:1000], other)[0, 1]) < 0.15 for other in others)
    flat = uniform(b"secret", "batch", 1, count=100_000)
    assert flat.min() > 0 and flat.max() < 1 and flat.mean() == pytest.approx(0.5, abs=0.01)


def test_updates_are_clipped_jointly(double):
    method, data = private_method(of_clients(clip=0.05), adapter="lora")
    engine, state = Stacked(method, data, 1), method.init(len(data))
    assert len(state.shared) > 1
    reply = Cohort(engine, ABLE, 1).ask("train", state.message())
    lengths = norms({k: v - state.shared[k] for k, v in reply.shared.items()})
    assert lengths.max() <= 0.05 + 1e-12 and (lengths > 0.05 - 1e-9).sum() >= 3
    assert (reply.values["n"] == 1).all() and (reply.values["loss"] == 0).all()  # nothing else of the client leaves


def test_the_sum_is_right_and_the_noise_has_its_size(double):
    method, data = wide_method(of_clients(clip=1e6))
    state, engine = method.init(len(data)), Stacked(method, data, 1)
    plain = Cohort(engine, ABLE, 1).ask("train", state.message()).shared
    found = method.round(state, Cohort(engine, ABLE, 1)).shared
    name = next(iter(found))
    noise = (found[name] - state.shared[name]) * 5 - (plain[name] - state.shared[name]).sum(0)
    assert noise.std() == pytest.approx(1e6, rel=0.03) and noise.numel() == 10_000
    silent = replace(method, privacy=of_clients(noise=1e-12, clip=1e6))
    without = silent.round(state, Cohort(Stacked(silent, data, 1), ABLE, 1)).shared
    equal(without, {k: v.mean(0) for k, v in plain.items()}, 1e-5)


def test_the_noise_of_many_rounds_has_the_right_deviation():
    privacy = of_clients(noise=0.7, clip=3.0, cohort=4.0)
    method, data = private_method(privacy)
    method = replace(method, privacy=privacy)
    state, nobody = method.init(len(data)), np.empty(0, np.int64)
    moved = [method.round(state, Cohort(Stacked(method, data, 1), nobody, t)).shared for t in range(1, 200)]
    steps = torch.cat([(m[k] - state.shared[k]).flatten() for m in moved for k in m])
    assert steps.std() == pytest.approx(0.7 * 3.0 / 4.0, rel=0.02) and abs(steps.mean()) < 0.01


def test_the_denominator_does_not_depend_on_who_answers(double):
    method, data = private_method(of_clients(noise=1e-12, clip=1e6))
    state, engine = method.init(len(data)), Stacked(method, data, 1)
    every = Cohort(engine, ABLE, 1).ask("train", state.message())
    found = method.round(state, Cohort(engine, ABLE, 1, lost=frozenset({0, 2}))).shared
    for k, v in found.items():
        left = every.shared[k][torch.from_numpy(~np.isin(every.ids, [0, 2]))]
        torch.testing.assert_close(v, state.shared[k] + (left - state.shared[k]).sum(0) / 5, rtol=0, atol=1e-5)


def test_a_client_that_does_not_clip_is_clipped_by_the_server(double):
    method, data = private_method(of_clients(noise=1e-12, clip=0.01, cohort=1.0))

    class Loud(Stacked):
        def run(self, *asked):
            for reply in super().run(*asked):
                yield Reply(reply.ids, reply.values, {k: v + 100 for k, v in reply.shared.items()})

    state = method.init(len(data))
    moved = method.round(state, Cohort(Loud(method, data, 1), np.array([0]), 1)).shared
    assert norms({k: (v - state.shared[k])[None] for k, v in moved.items()}) == pytest.approx(0.01)


def test_one_client_changes_the_sum_by_the_clipping_norm_at_most(images, tmp_path):
    """With bound= the median length would depend on the client, and with it how others are shortened."""
    seen = []
    setup = small_setup(images, "fedavg", **PRIVATE, bound=1.0, rounds=1)
    original = train.Guard

    def spy(*given):
        seen.append(given[4])
        return original(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "Guard", spy)
        train.train(PlannedRun(setup, Pools().load(setup), tmp_path / "run"))
    assert seen == [0.0]


def sent_by(method: Method, data, ids: np.ndarray) -> torch.Tensor:
    """The updates of these clients in the first round, [clients, numbers]."""
    engine, state = Stacked(method, data, 1), method.init(len(data))
    sent = Cohort(engine, ids, 1).ask("train", state.message()).shared
    return torch.cat([(v - state.shared[k]).flatten(1) for k, v in sent.items()], 1)


def correlations(rows: torch.Tensor) -> np.ndarray:
    """Between any two of the rows."""
    return np.corrcoef(rows.double().numpy())[np.triu_indices(len(rows), 1)]


def test_local_noise_is_added_by_each_client(double):
    method, data = wide_method(of_clients(noise_at="client", noise=2.0, clip=0.5))
    steps = sent_by(method, data, ABLE)
    assert steps.std(1).numpy() == pytest.approx(np.ones(5), rel=0.03)
    assert abs(correlations(steps)).max() < 0.05  # not the same for two clients
    state, engine = method.init(len(data)), Stacked(method, data, 1)
    sent = Cohort(engine, ABLE, 1).ask("train", state.message()).shared
    found = method.round(state, Cohort(engine, ABLE, 1)).shared
    equal(found, {k: v.mean(0) for k, v in sent.items()})  # the server adds nothing


def test_the_noise_of_models_is_that_of_a_quorum(images):
    """Of six clients three may answer: the models' ε is that of three noisy uploads, here by dp_accounting."""
    from dp_accounting import pld

    keys = PRIVATE | {"noise_at": "client", "noise_multiplier": 4.0, "quorum": 0.5}
    setup = small_setup(images, "fedavg", **keys)
    privacy = PlannedRun(setup, Pools().load(setup)).method.privacy
    accountant = pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(4.0 * math.sqrt(3) / 2), 3)  # a replaced client: twice the norm
    assert recorded(privacy, 3).epsilon == pytest.approx(accountant.get_epsilon(privacy.account.delta), rel=1e-3)


def test_the_clipping_norm_follows_the_quantile():
    privacy = Privacy("client", 0.5, 10.0, 200.0, quantile=0.7, secret=b"q")
    lengths, clip = np.linspace(0.5, 1.5, 201), 10.0
    for t in range(120):
        below = float(np.sum((lengths <= clip) - 0.5))
        clip = float(privacy.adapted(clip, below, t)[mechanism.CLIP])
    assert clip == pytest.approx(1.2, abs=0.1)
    # both releases together cost what one with z = 0.5 costs
    assert privacy.update_noise**-2 + (2 * privacy.count_noise) ** -2 == pytest.approx(0.5**-2)
    assert Privacy("client", 50.0, 1.0, 10.0, quantile=0.5).update_noise == pytest.approx(50 / math.sqrt(0.75))


# Gradients of examples


@pytest.mark.parametrize(
    "adapter, local", [("rotation", "sgd"), ("linear", "prox"), ("prompt", "sgd"), ("lora", "sgd")]
)
def test_gradients_of_examples_equal_a_loop(double, adapter, local):
    model, rule, _ = small_parts(adapter, local, "mean")
    task, data = example(model)
    method = Method.build(model, rule, small_parts(adapter, local, "mean")[2], task, seed=5)
    one = replace(data, bounds=data.bounds[:1], ids=data.ids[:1])
    own, message = copy_per_client(method.newcomer, 1), method.init(6).message()
    gradients = rule.gradients(method.model, message, own)
    params = {k: v + 0.01 for k, v in copy_per_client(message.shared, 1).items()} | own
    chosen = np.array([0, 3, 4])
    each = []
    for i in chosen:
        rows = torch.tensor([[int(one.bounds[0, 0]) + i]])
        _, found = gradients(params, Batch(one.take(rows), one.y[rows], torch.ones(1, 1, dtype=one.dtype)))
        each.append([g.double() for g in found])
    lengths = [math.sqrt(sum(float(g.square().sum()) for g in found)) for found in each]
    clip = sorted(lengths)[1]  # one is clipped, one just reaches it, one does not
    expected = [
        sum(g * min(1.0, clip / n) for g, n in zip(parts, lengths, strict=True)) for parts in zip(*each, strict=True)
    ]
    for most in (1, 2, 100):
        total = PrivateDescent(1.0, clip, b"", most).clipped_sum(params, gradients, one, chosen)
        for a, b in zip(total, expected, strict=True):
            torch.testing.assert_close(a, b.double(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("level", ["client", "example"])
def test_numbers_that_are_not_finite_count_as_zero_and_fail_nothing(level):
    """A server may send a model with which one image overflows: that it failed would tell whether the image is there."""
    sizes = [(30, 0, 0), (30, 0, 0)]
    method, data = wide_method(Privacy(level, 1.0, 1.0, 2.0, secret=b"n", noise_at="client"), sizes)
    message = method.init(2).message()
    large = {k: 1e37 * (-1.0) ** torch.arange(v.numel()).view(v.shape) for k, v in message.shared.items()}
    message = replace(message, shared=large)
    found = Cohort(Stacked(method, data, 1), np.arange(2), 1).ask("train", message)
    assert found.ids.tolist() == [0, 1] and all(v.isfinite().all() for v in found.shared.values())


def test_training_with_tiny_noise_and_everything_in_the_batch_is_plain_training(double):
    rules = {"batch": 100, "epochs": 3}
    privacy = Privacy("example", 1e-12, 1e6, 5.0, secret=b"e")
    noisy, data = private_method(privacy, "rotation", **rules)
    plain = replace(noisy, privacy=None)
    equal(play(noisy, data, 1).state.shared, play(plain, data, 1).state.shared, 1e-4)


def test_private_parameters_get_noise_too(double):
    adapter = small_adapter("rotation", private=("head",))
    _, rule, merge = small_parts("rotation", "sgd", "mean")
    task, data = example(adapter)
    method = Method.build(adapter, rule, merge, task, privacy=Privacy("example", 1.0, 1e3, 5.0, secret=b"e"))
    assert play(method, data, 1, rounds=1).rows["head"][:5].std() > 10


def test_the_noise_of_a_step_has_its_size():
    """And is another one in each step, of each client."""
    method, data = wide_method(Privacy("example", 3.0, 1.0, 5.0, secret=b"n"), sizes=[(30, 0, 0), (30, 0, 0)], batch=15)
    steps = sent_by(method, data, np.array([0, 1]))  # 30 examples: 2 steps of about 15
    assert steps.std(1).numpy() == pytest.approx(np.full(2, 3.0 / 15 * math.sqrt(2)), rel=0.03)
    assert abs(correlations(steps)).max() < 0.05


def test_the_batches_of_steps_are_independent(monkeypatch):
    """Each of 2,000 examples is in a batch with probability ½, and in two of them with ¼, whichever two these are."""
    method, data = private_method(Privacy("example", 1.0, 1.0, 5.0, secret=b"b"), batch=1000, epochs=1)
    data = random_data(method.task, [(2000, 0, 0), (2000, 0, 0)])
    batches: list[np.ndarray] = []
    inner = PrivateDescent.clipped_sum

    def spy(self, params, gradients, data, chosen, step=0):
        batches.append(np.bincount(chosen, minlength=2000))
        return inner(self, params, gradients, data, chosen[:1], step)

    monkeypatch.setattr(PrivateDescent, "clipped_sum", spy)
    play(method, data, 1, rounds=2, ids=np.array([0, 1]))
    taken = np.stack(batches)
    assert taken.shape == (2 * 2 * 2, 2000) and taken.max() == 1
    together = taken @ taken.T / 2000
    assert together.diagonal() == pytest.approx(np.full(8, 0.5), abs=0.05)
    assert together[np.triu_indices(8, 1)] == pytest.approx(np.full(28, 0.25), abs=0.05)


# Engines, resuming, records


@pytest.mark.parametrize("privacy", [of_clients(), of_clients(noise_at="client"), of_clients(quantile=0.5)], ids=str)
def test_stacked_equals_serial(double, privacy):
    method, data = private_method(privacy, "rotation")
    one, many = play(method, data, 1), play(method, data, 4)
    equal(one.state.shared, many.state.shared)
    equal(one.state.server, many.state.server)


def test_stacked_equals_serial_to_the_bit_for_examples():
    method, data = private_method(Privacy("example", 1.0, 0.5, 5.0, secret=b"s"), "rotation", local="prox")
    one, many = play(method, data, 1, rounds=1), play(method, data, 4, rounds=1)
    same(one.rows, many.rows)
    equal(one.state.shared, many.state.shared, 1e-6)  # the mean adds replies in another order


MODES = {
    "poisson": {"dp": "client", "participation": 0.6, "sampling": "poisson"},
    "adaptive": {"dp": "client", "clip_quantile": 0.5},
    "local": {"dp": "client", "noise_at": "client"},
    "example": {"dp": "example", "batch": 4},
}


@pytest.mark.parametrize("mode", MODES)
def test_loopback_equals_serial_to_the_bit(images, tmp_path, bytes_only, coarse, mode):
    keys = PRIVATE | MODES[mode]
    serial = train_small(images, tmp_path / "serial", "fedot", **keys, engine="serial")
    loopback = train_small(images, tmp_path / "loopback", "fedot", **keys, engine="loopback")
    assert state_of(serial.folder) == state_of(loopback.folder)
    spent = serial.record.result.privacy
    assert spent == loopback.record.result.privacy and spent.epsilon == serial.rounds()[-1]["epsilon"] > 0
    assert serial.rounds()[1]["epsilon"] < spent.epsilon and "loss" not in serial.rounds()[1]


def test_a_resumed_run_is_the_same_and_goes_on_counting(images, tmp_path, coarse):
    keys = PRIVATE | MODES["adaptive"] | {"engine": "serial"}
    whole = train_small(images, tmp_path / "whole", "fedot", **keys)
    setup = small_setup(images, "fedot", **keys)

    def stop(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train(PlannedRun(setup, Pools().load(setup), tmp_path / "parts"), stop)
    again = train.train(PlannedRun(setup, Pools().load(setup), tmp_path / "parts"))
    assert state_of(whole.folder) == state_of(again.folder) and scores(whole) == scores(again)
    assert whole.record.result.privacy == again.record.result.privacy


def test_an_empty_cohort_releases_noise_and_is_not_void(images, tmp_path, coarse):
    keys = PRIVATE | {"participation": 0.01, "sampling": "poisson", "rounds": 5}
    run = train_small(images, tmp_path / "run", "fedavg", **keys)
    empty = [r for r in run.rounds() if r.get("asked") == 0]
    assert empty and not any("void" in r for r in run.rounds())
    state, _ = run.load()
    assert norms({k: v[None] for k, v in state.shared.items()}) > 0.5  # the noise of five rounds


def test_the_table_the_page_and_the_dry_run_say_what_was_spent(images, tmp_path, capsys, coarse):
    from fedvlm.cli import main

    keys = PRIVATE | {"noise_multiplier": 0.0, "epsilon": 3.0, "participation": 0.6, "sampling": "poisson"}
    run = train_small(images, tmp_path / "run", "fedavg", **keys)
    found = api.runs(tmp_path)
    line = "ε = 3, δ = 0.14 (client level, noise at the server, Poisson cohorts, one client added or removed)"
    assert any(line in note for note in found.table().notes)
    assert line in found.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert RunFolder(run.folder).record.result.privacy.epsilon == pytest.approx(3, abs=0.01)
    words = [f"{k}={v}" for k, v in keys.items()]
    main(["run", "fedavg", f"data={images}", "rounds=3", *words, "--dry"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "noise multiplier" in shown and line in shown


def test_secure_sums_get_the_same_noise(images, tmp_path):
    keys = PRIVATE | {"engine": "serial", "clip_norm": 0.5}
    plain = train_small(images, tmp_path / "plain", "fedavg", **keys, rounds=1)
    secure = train_small(images, tmp_path / "secure", "fedavg", **keys, rounds=1, secure=True)
    (one, _), (other, _) = plain.load(), secure.load()
    equal(one.shared, other.shared, 1e-3)


# What is refused


@pytest.mark.parametrize(
    "keys, reason",
    [
        ({"epsilon": 3.0}, "epsilon= has no effect without dp="),
        ({"noise_at": "client"}, "noise_at= has no effect without dp="),
        ({"dp": "client"}, "give either epsilon=.* or noise_multiplier="),
        ({"dp": "client", "epsilon": 3.0, "noise_multiplier": 1.0}, "give either epsilon=.* or noise_multiplier="),
        ({"dp": "example", "noise_multiplier": 1.0, "clip_quantile": 0.5}, "clip_quantile= is for dp=client"),
        ({"dp": "client", "noise_multiplier": 1.0, "noise_at": "client", "sampling": "poisson"}, "use sampling=fixed"),
        ({"dp": "client", "noise_multiplier": 1.0, "clients": 1}, "dp=client hides a client among others"),
        ({"dp": "example", "noise_multiplier": 1.0, "clients": 90}, "delta= has no default"),
        ({"dp": "example", "noise_multiplier": 1.0, "centre": "own"}, "use centre=none"),
        ({"dp": "client", "noise_multiplier": 1.0, "gaps": True}, "give gaps=false"),
        ({"dp": "client", "noise_multiplier": 1.0, "clip_quantile": 0.5, "secure": True}, "give a fixed clip_norm="),
    ],
    ids=str,
)
def test_keys_that_promise_nothing_are_refused(images, keys, reason):
    setup = small_setup(images, "fedavg", **({"partition": "iid", "clients": 4, "unseen": ""} | keys))
    with pytest.raises(FedvlmError, match=reason):
        _ = PlannedRun(setup, Pools().load(setup)).method


REFUSED = {
    ("linear", "sgd", "faa"): "clients also send before, after",
    ("linear", "sgd", "afl"): "clients also send before, after",
    ("linear", "sgd", "classwise"): "clients also send class_counts",
    ("linear", "scaffold", "scaffold"): "clients also send control",
    ("lora", "two_stage", "text_server"): "clients also send .*which no noise covers",
    ("linear", "sgd", "median"): "merge=median reads single updates",
    ("linear", "sgd", "krum"): "merge=krum reads single updates",
    ("resnet", "sgd", "mean"): "is a running statistic",
    ("none", "sgd", "mean"): "no trained parameter is shared",
}


@pytest.mark.parametrize("names", REFUSED, ids="-".join)
def test_client_level_refuses_what_is_not_covered(names):
    method, data = private_method(of_clients(), *names)
    with pytest.raises(FedvlmError, match=f"^dp=client: .*{REFUSED[names]}"):
        check_method(method, federation_of(data, method.task))


@pytest.mark.parametrize("local", ["sgd", "prox", "ditto", "fedrep", "perfedavg", "bgp"])
def test_client_level_covers_every_rule_that_sends_an_update(local):
    """And what the rule sends is clipped, counts once and tells no loss."""
    method, data = private_method(of_clients(clip=0.003), "rotation", local)
    check_method(method, federation_of(data, method.task))
    state = method.init(len(data))
    reply = Cohort(Stacked(method, data, 1), ABLE, 1).ask("train", state.message())
    lengths = norms({k: v.double() - state.shared[k] for k, v in reply.shared.items()})
    assert lengths.numpy() == pytest.approx(np.full(5, 0.003), rel=1e-3)
    assert set(reply.values) == {"n", "loss"} and (reply.values["n"] == 1).all() and (reply.values["loss"] == 0).all()


@pytest.mark.parametrize(
    "names, reason",
    [
        (("linear", "fedrep", "mean"), "local=fedrep trains in its own way"),
        (("linear", "bdro", "mean"), "local=bdro trains in its own way"),
        (("linear", "ditto", "mean"), "local=ditto trains in its own way"),
        (("rotation", "perfedavg", "mean"), "local=perfedavg trains in its own way"),
        (("lora", "bgp", "mean"), "local=bgp trains in its own way"),
        (("linear", "sgd", "faa"), "clients also send before, after"),
        (("resnet", "sgd", "mean"), "is a running statistic"),
    ],
    ids=str,
)
def test_example_level_refuses_what_is_not_covered(double, names, reason):
    method, data = private_method(Privacy("example", 1.0, 1.0, 5.0), *names)
    with pytest.raises(FedvlmError, match=f"^dp=example: .*{reason}"):
        check_method(method, federation_of(data, method.task))


def test_example_level_refuses_contrastive_objectives_and_large_adapters(monkeypatch):
    method, data = private_method(Privacy("example", 1.0, 1.0, 5.0), "rotation", objective="contrastive")
    with pytest.raises(FedvlmError, match=r"mixes the examples of a batch.*objective=cross-entropy"):
        check_method(method, federation_of(data, method.task))
    method, data = private_method(Privacy("example", 1.0, 1.0, 5.0), "rotation")
    check_method(method, federation_of(data, method.task))
    monkeypatch.setattr("fedvlm.training.privacy_plan.LARGEST", 100)
    with pytest.raises(FedvlmError, match=r"the gradient of each example is as large as .* or dp=client"):
        check_method(method, federation_of(data, method.task))


@pytest.mark.parametrize("merge", ["mean", "median", "krum", "trimmed"])
def test_example_level_allows_every_merge_of_updates(merge):
    """And what it merges is noise of that size: with a noise of 500 gradients little else is left."""
    privacy = Privacy("example", 500.0, 1.0, 5.0, secret=b"m")
    method, data = wide_method(privacy, [(30, 0, 0)] * 5, batch=15)
    method = Method.build(
        method.adapter, method.local, registry.find("merge", merge)(), method.task, 5, privacy=privacy
    )
    check_method(method, federation_of(data, method.task))
    state = method.init(len(data))
    found = method.round(state, Cohort(Stacked(method, data, 1), ABLE, 1)).shared
    moved = torch.cat([(v - state.shared[k]).flatten() for k, v in found.items()])
    # the deviation of what five normal numbers become: their mean, their median, the mean of the middle three, one of them
    of_five = {"mean": 5**-0.5, "median": 0.536, "trimmed": 0.477, "krum": 1.0}[merge]
    assert moved.std() == pytest.approx(500 / 15 * math.sqrt(2) * of_five, rel=0.03)


def test_a_missing_library_is_named(images, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    setup = small_setup(images, "fedavg", **PRIVATE)
    with pytest.raises(FedvlmError, match=r"pip install 'fedvlm\[dp\]'"):
        _ = PlannedRun(setup, Pools().load(setup)).method


def test_a_secret_changes_the_noise_and_does_not_travel(images):
    setup = small_setup(images, "fedavg", **PRIVATE)
    federation = PlannedRun(setup, Pools().load(setup)).federation
    simulated, deployed = planned(setup, federation), planned(setup, federation, b"32 random bytes")
    assert simulated.secret != deployed.secret and simulated.seed == setup.config.seed != deployed.seed
    assert "secret" not in deployed.plain() and "account" not in deployed.plain() and "random" not in repr(deployed)
    assert recorded(simulated, 3) == recorded(deployed, 3)
    assert RULES["batch"] == 4  # the tests' clients take several steps
