"""GA, FAA, AFL, q-FFL and the robust merges against closed forms, brute force and Byzantine clients; BGP, PerFedAvg,
FedRep and SCAFFOLD by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import ABLE, build, close, example, play, random_data, random_task, small_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fedvlm.config.config import resolve
from fedvlm.core.cohort import Cohort
from fedvlm.core.state import Message, Reply, State, copy_per_client
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.parts.local.bgp import Bgp, coral
from fedvlm.parts.local.means import Means
from fedvlm.parts.local.sgd import Sgd
from fedvlm.parts.merge.afl import project_to_simplex
from fedvlm.parts.merge.faa import equal_gaps, slopes
from fedvlm.parts.merge.ga import Ga
from fedvlm.rounds.method import Method

pytestmark = pytest.mark.usefixtures("double")


def problem(clients: int, seed: int):
    draw = torch.Generator().manual_seed(seed)
    weight = torch.rand(clients, generator=draw, dtype=torch.float64) + 0.01
    slope = torch.rand(clients, generator=draw, dtype=torch.float64) * 2 + 0.05
    gap = torch.randn(clients, generator=draw, dtype=torch.float64)
    return weight / weight.sum(), slope, gap


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10**6))
def test_faa_is_equation_10_where_feasible_and_the_smallest_largest_gap_elsewhere(clients, seed):
    weight, slope, gap = problem(clients, seed)
    level = (slope * gap).sum() / slope.sum()
    plain = weight + slope * (gap - level)
    found = equal_gaps(weight, slope, gap)
    assert found.min() >= 0 and float(found.sum()) == pytest.approx(1, abs=1e-12)
    if plain.min() >= 0:
        assert (found - plain).abs().max() < 1e-9
    worst = (gap - (found - weight) / slope).max()
    assert float(worst) == pytest.approx(float(smallest_worst(weight, slope, gap)), abs=1e-9)


def smallest_worst(weight, slope, gap):
    """The minimum over the simplex of the largest gap in the linear model, by bisection: a level g is reachable where the
    weight that brings every gap down to g, Σ max(0, a + K(G − g)), is at most 1."""
    low, high = float((gap - 100).min()), float(gap.max() + 100)
    for _ in range(200):
        middle = (low + high) / 2
        need = (weight + slope * (gap - middle)).clamp(min=0).sum()
        low, high = (low, middle) if need <= 1 else (middle, high)
    return high


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), st.integers(0, 10**5))
def test_no_point_of_the_simplex_has_a_smaller_largest_gap(clients, seed):
    weight, slope, gap = problem(clients, seed)
    found = equal_gaps(weight, slope, gap)
    largest = (gap - (found - weight) / slope).max()
    others = torch.distributions.Dirichlet(torch.ones(clients, dtype=torch.float64)).sample((4000,))
    assert largest <= (gap - (others - weight) / slope).amax(-1).min() + 1e-12


def test_weights_outside_the_simplex_are_brought_back():
    weight, slope, gap = (torch.tensor(v) for v in ([0.2, 0.3, 0.5], [0.8, 1.5, 0.6], [0.9, 0.05, 0.3]))
    level = (slope * gap).sum() / slope.sum()
    assert torch.allclose(weight + slope * (gap - level), torch.tensor([0.651, -0.129, 0.478]), atol=1e-3)
    found = equal_gaps(weight, slope, gap)
    assert found[1] == 0 and found.sum() == pytest.approx(1)


def test_unusable_slopes_are_replaced_by_the_median():
    weight, moved = torch.tensor([0.25] * 4), torch.tensor([0.30, 0.20, 0.26, 0.24])
    gap = torch.tensor([1.0, 0.5, 0.7, 0.6])
    moved_gap = torch.tensor([0.9, 0.5, 0.8, 0.65])  # usable, did not move, wrong sign, usable
    found, usable = slopes(weight, moved, gap, moved_gap)
    assert usable == 0.5 and torch.allclose(found, torch.tensor([0.5, 0.2, 0.2, 0.2])) and (found > 0).all()
    assert slopes(weight, weight, gap, gap) == (None, 0.0)
    assert slopes(torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(1)) == (None, 0.0)


def test_ga_raises_weights_of_large_gaps_and_keeps_weights_without_gaps():
    weight = torch.tensor([0.25] * 4)
    assert torch.equal(Ga().adjusted(weight, torch.zeros(4), 1, 10), weight)
    moved = Ga().adjusted(weight, torch.tensor([1.0, 0.0, -0.5, 0.0]), 1, 10)
    raw = torch.tensor([0.25 + 0.05, 0.25, 0.25 - 0.025, 0.25])
    torch.testing.assert_close(moved, raw / raw.sum())
    later = Ga().adjusted(weight, torch.tensor([1.0, 0.0, -0.5, 0.0]), 10, 10)
    assert later[0] < moved[0]


@pytest.mark.parametrize("merge", ["ga", "faa", "afl", "qffl"])
def test_weights_stay_on_the_simplex_when_clients_are_lost(merge):
    method, data = build("head", "sgd", merge), random_data(random_task())
    engine, state = Stacked(method, data, 6), method.init(6)
    for round, lost in enumerate([(), (1, 2), (), (0, 1, 2, 3), (4,)], start=1):
        cohort = Cohort(engine, ABLE, round, rounds=5, lost=frozenset(lost))
        state = method.round(state, cohort)
        weights = cohort.notes["weights"]
        assert set(weights) == set(ABLE.tolist()) - set(lost)
        assert min(weights.values()) >= 0 and sum(weights.values()) == pytest.approx(1)
        assert state.shared["head"].isfinite().all()


class Heard:
    """An engine that keeps what is asked and answered, by step."""

    def __init__(self, engine):
        self.engine, self.sent, self.replies = engine, {}, {}

    def run(self, step, ids, message, round, exchange):
        self.sent.setdefault(step, []).append(message.shared["head"])
        for reply in self.engine.run(step, ids, message, round, exchange):
            self.replies.setdefault(step, []).append(reply)
            yield reply


def losses_by_hand(task, data, heads, clients=ABLE):
    """The mean loss of these heads on each client's validation images; on those for training where it has none."""
    found = []
    for i, head in zip(clients, heads, strict=True):
        low, mid, high, _ = data.bounds[i]
        rows = slice(mid, high) if high > mid else slice(low, mid)
        found.append(F.cross_entropy(task.scale * data.x[rows] @ head.T, data.y[rows]))
    return torch.stack(found)


@pytest.mark.parametrize("merge", ["ga", "faa", "qffl"])
def test_the_losses_that_weights_come_from_are_on_validation_images(merge):
    """`before` and `validate` of the model that was sent, `after` of the one that a client trained."""
    method, data = build("head", "sgd", merge), random_data(random_task())
    engine, message = Stacked(method, data, 6), method.init(6).message()
    trained = Cohort(engine, ABLE, 1).ask("train", message)
    validated = Cohort(engine, ABLE, 1).ask("validate", message)
    sent = losses_by_hand(method.task, data, [message.shared["head"]] * 5)
    torch.testing.assert_close(trained.values["before"], sent)
    torch.testing.assert_close(validated.values["val"], sent)
    torch.testing.assert_close(trained.values["after"], losses_by_hand(method.task, data, trained.shared["head"]))


def test_the_weights_of_a_cohort_keep_their_share():
    """Three rounds of GA with two clients each, of which one is in all: its weight by hand."""
    method, data = build("head", "sgd", "ga"), random_data(random_task())
    engine, state, kept = Heard(Stacked(method, data, 6)), method.init(6), 1.0
    for round, other in enumerate((1, 2, 3), start=1):
        cohort = Cohort(engine, np.array([0, other]), round, rounds=4)
        state = method.round(state, cohort)
        weight = np.array([kept, 1.0]) / (kept + 1)
        if round > 1:  # the gap of client 0 is known, and the other has none yet
            trained = engine.replies["train"][round - 2]
            own = trained.shared["head"][trained.ids.tolist().index(0)]
            after, before = losses_by_hand(method.task, data, [own, engine.sent["train"][-1]], [0, 0])
            step = 0.2 / 2 * (1 - (round - 2) / 4)
            weight += step * np.array([torch.sign(before - after), 0.0])
            weight /= weight.sum()
        assert [cohort.notes["weights"][i] for i in (0, other)] == pytest.approx(weight.tolist())
        kept = weight[0] * (kept + 1)  # the two have as much together as before


def test_faa_perturbs_by_gas_step_of_this_round():
    """What is sent second, in round 4 of 5: the mean by weights that moved by step/M · (1 − 3/5) · G/max|G|."""
    method, data = build("head", "sgd", "faa"), random_data(random_task())
    engine = Heard(Stacked(method, data, 6))
    method.round(method.init(6), Cohort(engine, ABLE, 4, rounds=5))
    (trained,), (first, second) = engine.replies["train"], engine.sent["validate"]
    heads = trained.shared["head"]
    torch.testing.assert_close(first, heads.mean(0))
    after, mixed = (losses_by_hand(method.task, data, h, trained.ids) for h in (heads, [first] * 5))
    gap = mixed - after
    moved = 0.2 + 0.2 / 5 * (1 - 3 / 5) * gap / gap.abs().max()
    torch.testing.assert_close(second, torch.einsum("k,kcd->cd", moved / moved.sum(), heads))


def test_three_merges_of_the_same_replies_are_compared():
    """Figure 6 of FFT-GP: the variance of the gaps with uniform weights, GA's and FAA's; and how linear a gap is."""
    method, data = build("head", "sgd", "faa"), random_data(random_task())
    compared = Method.build(method.adapter, method.local, replace(method.merge, compare=True), method.task, 5)
    engine, plain = Heard(Stacked(compared, data, 6)), method.init(6)
    cohort = Cohort(engine, ABLE, 1, rounds=5)
    after = compared.round(compared.init(6), cohort)
    close(after.shared, method.round(plain, Cohort(Stacked(method, data, 6), ABLE, 1, rounds=5)).shared)
    (trained,), sent = engine.replies["train"], engine.sent["validate"]
    heads, found = trained.shared["head"], {k: v[0] for k, v in cohort.effects.items()}
    at_once = losses_by_hand(method.task, data, heads, trained.ids)
    gaps = [losses_by_hand(method.task, data, [head] * 5, trained.ids) - at_once for head in sent]
    assert len(gaps) == 5
    torch.testing.assert_close(sent[2], heads.mean(0))
    torch.testing.assert_close(sent[3], after.shared["head"])
    for name, gap in zip(("ga_spread", "mean_spread", "faa_spread"), gaps[1:4], strict=True):
        assert found[name] == pytest.approx(float(gap.var(correction=0)), rel=1e-4)
    bend = (gaps[4] - (gaps[0] + gaps[1]) / 2).norm() / (gaps[1] - gaps[0]).norm()
    assert found["curvature"] == pytest.approx(float(bend), rel=1e-3) and found["curvature"] < 0.2


def test_a_client_without_an_answer_counts_as_the_mean_gap():
    method, data = build("head", "sgd", "faa"), random_data(random_task())
    cohort, state = Cohort(Stacked(method, data, 6), ABLE, 1), method.init(6)
    replies = method.merge.gather(state, cohort)
    weight = torch.tensor([0.1, 0.3, 0.2, 0.2, 0.2])
    mixed = torch.einsum("k,kcd->cd", weight, replies.shared["head"])
    expected = losses_by_hand(method.task, data, [mixed] * 5) - replies.values["after"]
    expected[2] = expected[[0, 1, 3, 4]].mean()
    found = method.merge.gap(state, replace(cohort, lost=frozenset({2})), replies, weight)
    torch.testing.assert_close(found, expected)


def test_the_gap_of_a_round_is_known_one_round_later():
    """before(t + 1) − after(t), against the gap measured directly after round t."""
    method, data = build("head", "sgd", "ga"), random_data(random_task())
    engine = Stacked(method, data, 6)
    first = method.round(method.init(6), Cohort(engine, ABLE, 1, rounds=3))
    measured = losses_by_hand(method.task, data, [first.shared["head"]] * 5)
    direct = measured - first.server["after"][:5]
    cohort = Cohort(engine, ABLE, 2, rounds=3)
    method.round(first, cohort)
    torch.testing.assert_close(torch.tensor(list(cohort.notes["gaps"].values())), direct)


def test_faa_has_two_more_exchanges_in_each_kth_round_only():
    method, data = build("head", "sgd", "faa"), random_data(random_task())
    rare = Method.build(method.adapter, method.local, replace(method.merge, every=3), method.task, 5)
    for chosen, counts in ((method, [3, 3, 3]), (rare, [1, 1, 3])):
        state, engine = chosen.init(6), Stacked(chosen, data, 6)
        for round, count in enumerate(counts, start=1):
            cohort = Cohort(engine, ABLE, round, rounds=3)
            state = chosen.round(state, cohort)
            assert cohort.exchange == count
            assert cohort.bytes_down == count * 5 * 8 * state.shared["head"].numel()


def test_the_projection_is_the_nearest_point_of_the_simplex():
    for seed in range(20):
        point = torch.randn(6, generator=torch.Generator().manual_seed(seed))
        found = project_to_simplex(point)
        assert found.min() >= 0 and float(found.sum()) == pytest.approx(1)
        others = torch.distributions.Dirichlet(torch.full((6,), 0.5)).sample((3000,))
        assert (found - point).norm() <= (others - point).norm(dim=1).min() + 1e-12


def test_q_zero_is_the_uniform_mean():
    data = random_data(random_task())
    qffl = build("head", "sgd", "qffl")
    qffl = Method.build(qffl.adapter, qffl.local, replace(qffl.merge, q=0.0), qffl.task, 5)
    mean = build("head", "sgd", "mean")
    mean = Method.build(mean.adapter, mean.local, replace(mean.merge, weights="uniform"), mean.task, 5)
    close(play(qffl, data, 6).state.shared, play(mean, data, 6).state.shared)


class WithByzantine:
    """An engine in which some clients send huge parameters."""

    def __init__(self, engine, byzantine):
        self.engine, self.byzantine = engine, byzantine

    def run(self, *args):
        for reply in self.engine.run(*args):
            reply.shared["head"][torch.from_numpy(np.isin(reply.ids, self.byzantine))] = 1e6
            yield reply


@pytest.mark.parametrize("merge", ["median", "trimmed", "krum"])
def test_one_byzantine_client_does_not_move_a_robust_merge(merge):
    data = random_data(random_task(), sizes=((20, 3, 3),) * 7)
    ids = np.arange(7)
    for name, moved in ((merge, False), ("mean", True)):
        method = build("head", "sgd", name)
        honest = method.round(method.init(7), Cohort(Stacked(method, data, 7), ids, 1)).shared["head"]
        engine = WithByzantine(Stacked(method, data, 7), [3])
        found = method.round(method.init(7), Cohort(engine, ids, 1)).shared["head"]
        assert (found.abs().max() > 1e4) == moved
        if not moved:
            assert (found - honest).norm() < 2 * (honest - method.initial["head"]).norm()


def test_coral_by_hand():
    x, y = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    weight = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).double()
    got = coral(x, y, weight / weight.sum(-1, keepdim=True))
    for k, n in enumerate((5, 3)):
        a, b = x[k, :n], y[k, :n]
        expected = (a.mean(0) - b.mean(0)).square().mean() + (torch.cov(a.T) - torch.cov(b.T)).square().mean()
        torch.testing.assert_close(got[k], expected)
    assert coral(x[:, :1], y[:, :1], torch.ones(2, 1)).isfinite().all()
    assert coral(x, x, weight / weight.sum(-1, keepdim=True)).abs().max() == 0


def test_bgp_without_alignment_is_sgd_and_with_it_is_not():
    data, task = random_data(random_task()), random_task()
    rules = {"lr": 0.05, "batch": 4, "epochs": 2}
    adapter = build("attention", "sgd", "mean").adapter
    merge = build("attention", "sgd", "mean").merge

    def trained(local):
        return play(Method.build(adapter, local, merge, task, 5), data, 6, rounds=1).state.shared

    plain = trained(Sgd(**rules))
    close(trained(Bgp(**rules, align=0.0, budget="same")), plain)
    close(trained(Bgp(**rules, align=0.0)), trained(Sgd(**rules | {"epochs": 4})))
    start = adapter.init(task, 5)
    far = sum((plain[k] - start[k]).square().sum() for k in start)
    near = trained(Bgp(**rules, align=1e6, phases="aligned"))
    assert near["w1"].isfinite().all() and far > 0
    assert not torch.equal(trained(Bgp(**rules, align=100.0))["w1"], plain["w1"])


def test_perfedavg_by_hand():
    """One batch of four: an inner step on the even examples, then the gradient there on the odd ones."""
    task = random_task()
    data = random_data(task, sizes=((4, 1, 1),))
    method = build("head", "perfedavg", "mean", batch=4, epochs=1, momentum=0.0, weight_decay=0.0, lr=0.1)
    (batch,) = replace(data, round=1).batches(4)
    w, s = task.names(), task.scale

    def gradient(w, x, y):
        w = w.clone().requires_grad_()
        return torch.autograd.grad(torch.nn.functional.cross_entropy(s * x @ w.T, y), w)[0]

    inner = w - 0.1 * gradient(w, batch.x[0, 0::2], batch.y[0, 0::2])
    expected = w - 0.1 * gradient(inner, batch.x[0, 1::2], batch.y[0, 1::2])
    got = method.round(method.init(1), Cohort(Stacked(method, data, 1), np.array([0]), 1)).shared["head"]
    torch.testing.assert_close(got, expected)


def test_fedrep_without_private_epochs_does_not_train_private_parameters():
    data = random_data(random_task())
    still = build("rotation", "fedrep", "mean", private_epochs=0)
    assert play(still, data, 6).rows["skew"].abs().max() == 0
    assert play(build("rotation", "fedrep", "mean"), data, 6).rows["skew"].abs().max() > 0


def test_the_stored_copy_is_the_model_that_was_sent_up():
    data = random_data(random_task())
    method = build("head", "sgd", "mean", keep=True)
    engine = Stacked(method, data, 6)
    reply = Cohort(engine, ABLE, 1).ask("train", Message(method.initial))
    rows = engine.rows.read(reply.ids, 1)
    assert torch.equal(rows["personal.head"], reply.shared["head"]) and rows["personal.started"].eq(1).all()


def test_scaffolds_first_round_is_fedavg_and_its_control_variate_is_the_mean_drift():
    data = random_data(random_task(), sizes=((12, 2, 2),) * 4)
    ids = np.arange(4)
    plain = {"momentum": 0.0, "weight_decay": 0.0}
    scaffold, fedavg = build("head", "scaffold", "scaffold", **plain), build("head", "sgd", "mean", **plain)
    first, expected = (play(m, data, 4, rounds=1, ids=ids).state.shared for m in (scaffold, fedavg))
    close(first, expected)
    state, rows, *_ = play(scaffold, data, 4, rounds=3, ids=ids)
    torch.testing.assert_close(state.server["control.head"], rows["personal.drift.head"].mean(0))
    other = play(fedavg, data, 4, rounds=3, ids=ids).state.shared["head"]
    assert (state.shared["head"] - other).abs().max() > 1e-6


def test_scaffold_with_one_client_is_fedavg():
    """c = c_i with one client: the correction is 0 in every round."""
    data = random_data(random_task(), sizes=((12, 2, 2),))
    plain = {"momentum": 0.0, "weight_decay": 0.0}
    a, b = build("head", "scaffold", "scaffold", **plain), build("head", "sgd", "mean", **plain)
    close(play(a, data, 1, ids=np.array([0])).state.shared, play(b, data, 1, ids=np.array([0])).state.shared)


@pytest.mark.parametrize(("local", "merge"), [("scaffold", "mean"), ("sgd", "scaffold")])
def test_one_half_of_scaffold_is_refused(local, merge):
    with pytest.raises(FedvlmError, match="works only together with"):
        build("head", local, merge)


def test_perfedavg_takes_the_given_number_of_steps_at_test_time():
    """Full-batch steps with the inner learning rate from the shared model, by hand."""
    task = random_task()
    data = random_data(task, sizes=((6, 1, 1), (3, 1, 1)))
    for steps in (1, 3):
        method = build("head", "perfedavg", "mean", steps=steps, inner=0.3)
        found = method.local.adapt(method.model, {}, {k: v[None] for k, v in method.initial.items()}, data)["head"]
        for k in range(2):
            low, high = data.bounds[k, :2]
            w = task.names().clone()
            for _ in range(steps):
                leaf = w.clone().requires_grad_()
                loss = torch.nn.functional.cross_entropy(task.scale * data.x[low:high] @ leaf.T, data.y[low:high])
                w = w - 0.3 * torch.autograd.grad(loss, leaf)[0]
            torch.testing.assert_close(found[k], w)


def test_bgp_uses_the_objective():
    data, task = random_data(random_task()), random_task()
    model = build("attention", "sgd", "mean").model
    message = Message(model.adapter.init(task, 5))
    order = np.argsort(-data.counts("train"), kind="stable")
    batch = next(iter(Stacked(build("attention", "sgd", "mean"), data, 6).at(order[:2], 1).batches(4)))
    now = copy_per_client(message.shared, 2)
    rule = Bgp(objective="contrastive")
    torch.testing.assert_close(
        rule.gradients(model, message, {})(now, batch)[0], model.gradients("contrastive")(now, batch)[0]
    )


@pytest.mark.parametrize(
    "given", [{"local": "ditto", "keep": "false"}, {"merge": "ga", "gaps": "false"}, {"merge": "qffl", "gaps": "no"}]
)
def test_a_setting_that_a_part_depends_on_cannot_be_switched_off(given):
    setup = resolve("fedavg", given)
    with pytest.raises(FedvlmError, match=r"leave (keep|gaps) out"):
        setup.local, setup.merge  # noqa: B018 - parts are built when they are first used


@pytest.mark.parametrize(
    "merge", [n for n in registry.names("merge") if registry.find("merge", n).partner in ("", "scaffold", "feddyn")]
)
def test_every_merge_uses_the_settings_it_accepts(merge):
    """cosine= and gaps= are recorded by every merge; weights= is refused where sizes are not used."""
    adapter, local = (
        {
            "transport": "outsiders",
            "text_server": "lora",
            "other_text": "lora",
            "exact": "residual",
            "sparsity": "lora",
        }.get(merge, "head"),
        merge if merge in ("scaffold", "feddyn") else "sgd",
    )
    task, data = example(adapter)
    kind = registry.find("merge", merge)(cosine=True, gaps=True)
    chosen = small_adapter(adapter, **({"towers": "image"} if merge in ("text_server", "other_text") else {}))
    method = Method.build(chosen, registry.find("local", local)(batch=4), kind, task, 5)
    state, engine = method.init(6), Stacked(method, data, 6)
    for round in (1, 2):
        cohort = Cohort(engine, np.arange(5), round, rounds=2)
        state = method.round(state, cohort)
    assert -1 <= cohort.notes["cosine"] <= 1 and set(cohort.notes["gaps"]) == set(range(5))
    assert cohort.notes["gap_variance"] >= 0
    if merge in (
        "mean",
        "scaffold",
        "grace",
        "classwise",
        "stages",
        "transport",
        "text_server",
        "other_text",
        "exact",
        "trajectory",
        "adaptive",
        "feddyn",
    ):
        resolve(merge if merge in ("scaffold", "feddyn") else "fedclip", {"merge": merge, "weights": "uniform"})
    else:
        with pytest.raises(FedvlmError, match="weights= is not a key here"):
            resolve("fedclip", {"merge": merge, "weights": "size"})


@pytest.mark.parametrize(("every", "more"), [(1, 1.0), (20, 0.05)])
def test_communication_of_faa_against_ga(every, more):
    """FAA's two further broadcasts double the bytes of a round; in each twentieth round (Table 15) that is +5 %."""
    task = random_task()
    data, spent = random_data(task), []
    for merge in (registry.find("merge", "faa")(every=every), registry.find("merge", "ga")()):
        method = Method.build(
            registry.find("adapter", "attention")(), registry.find("local", "sgd")(batch=16), merge, task, 5
        )
        state, engine, total = method.init(6), Stacked(method, data, 6), 0
        for round in range(1, 21):
            cohort = Cohort(engine, np.arange(5), round, rounds=20)
            state = method.round(state, cohort)
            total += cohort.bytes_up + cohort.bytes_down
        spent.append(total)
    assert spent[0] / spent[1] - 1 == pytest.approx(more, rel=0.02)


def test_the_median_of_a_large_layer():
    """torch.quantile refuses more than 16 million numbers; a network can have more."""
    shared = {"w": torch.zeros(4_200_000)}

    class FourClients:
        def run(self, step, ids, message, round, exchange):
            trained = torch.arange(4.0)[:, None] * torch.ones(4_200_000)
            yield Reply(ids, {"n": torch.ones(4), "loss": torch.ones(4)}, {"w": trained})

    method = build("head", "sgd", "median")
    start = method.merge.init(method.model, 4, seed=5)
    state = method.merge.round(method.model, State(shared, {}, start.server), Cohort(FourClients(), np.arange(4), 1))
    assert (state.shared["w"] == 1.5).all()


# The server's step as an optimiser's


def rounds_of(merge: str = "adaptive", count: int = 4, **settings: object):
    """The shared head after each round, and the mean of the clients' heads in each."""
    method = build("head", "sgd", "mean", lr=0.3)
    method = replace(method, merge=registry.find("merge", merge)(**settings))
    data = random_data(method.task)
    engine, state, found = Stacked(method, data, 3), method.init(len(data)), []
    for round in range(1, count + 1):
        mean = method.merge.average(state, Cohort(engine, ABLE, round), state.message()).mean["head"]
        state = method.round(state, Cohort(engine, ABLE, round))
        found.append((mean, state.shared["head"]))
    return method.initial["head"], found


@pytest.mark.parametrize("rule", ["momentum", "adagrad"])
def test_a_servers_step_is_that_of_torchs_optimiser(rule):
    """w_g less the mean model as its gradient."""
    given = {"server_rule": rule, "server_lr": 0.3, "adaptivity": 0.02, "server_momentum": 0.6}
    start, found = rounds_of(**given | ({"server_momentum": 0.0} if rule == "adagrad" else {}))
    w = torch.nn.Parameter(start.clone())
    optimiser = {
        "momentum": lambda: torch.optim.SGD([w], lr=0.3, momentum=0.6),
        "adagrad": lambda: torch.optim.Adagrad([w], lr=0.3, initial_accumulator_value=0.02**2, eps=0.02),
    }[rule]()
    for mean, after in found:
        w.grad = (w - mean).detach()
        optimiser.step()
        torch.testing.assert_close(w.data, after, atol=1e-12, rtol=0)


@pytest.mark.parametrize("rule", ["adagrad", "yogi", "adam"])
def test_fedopt_number_by_number(rule):
    """Algorithm 2 of Reddi et al., written out for single numbers."""
    rate, b1, b2, tau = 0.2, 0.7, 0.8, 0.01
    settings = {"server_rule": rule, "server_lr": rate, "adaptivity": tau}
    start, found = rounds_of(**settings, server_momentum=b1, server_memory=b2)
    for at in ((0, 0), (2, 5), (4, 11)):
        w, m, v = float(start[at]), 0.0, tau**2
        for mean, after in found:
            delta = float(mean[at]) - w
            m = b1 * m + (1 - b1) * delta
            v = {
                "adagrad": v + delta**2,
                "yogi": v - (1 - b2) * delta**2 * np.sign(v - delta**2),
                "adam": b2 * v + (1 - b2) * delta**2,
            }[rule]
            w += rate * m / (v**0.5 + tau)
            assert float(after[at]) == pytest.approx(w, abs=1e-12)


def test_a_server_without_momentum_and_with_rate_1_is_fedavg():
    plain = rounds_of("mean")[1][-1][1]
    same, other = (rounds_of(server_rule="momentum", server_lr=1.0, server_momentum=m)[1][-1][1] for m in (0.0, 0.5))
    torch.testing.assert_close(same, plain, atol=1e-12, rtol=0)
    assert not torch.allclose(other, plain, atol=1e-3)


# FedDyn


def dynamic(local: str, merge: str, rounds: int, **settings: object):
    """Clients whose minima lie apart, each of which trains long enough to be near that of its own loss."""
    method = build("head", local, merge, **settings, lr=0.2, epochs=30, batch=32)
    method = replace(method, merge=replace(method.merge, weights="uniform"))
    data = random_data(method.task)
    engine, state = Stacked(method, data, 3), method.init(len(data))
    for round in range(1, rounds + 1):
        state = method.round(state, Cohort(engine, ABLE, round))
    return method, data, engine, state


def steepness(method, data, head: torch.Tensor) -> float:
    """The length of the gradient of the mean of the clients' losses."""
    w = head.clone().requires_grad_()
    losses = []
    for i in ABLE:
        low, mid = (int(b) for b in data.bounds[i, :2])
        losses.append(
            F.cross_entropy(method.model.logits({"head": w[None]}, data.x[None, low:mid])[0], data.y[low:mid])
        )
    return float(torch.autograd.grad(torch.stack(losses).mean(), w)[0].norm())


def test_feddyn_comes_nearer_to_the_minimum_of_the_mean_loss_than_fedavg():
    method, data, _, fedavg = dynamic("sgd", "mean", 40)
    dyn = dynamic("feddyn", "feddyn", 40, mu=0.3)[3]
    assert steepness(method, data, dyn.shared["head"]) < 0.2 * steepness(method, data, fedavg.shared["head"])


def test_feddyns_variables_are_those_of_its_algorithm():
    mu = 0.3
    method, _, engine, first = dynamic("feddyn", "feddyn", 1, mu=mu)
    old = method.initial["head"]
    own = engine.rows.read(ABLE, 1)["personal.gradient.head"]
    clients = old - own / mu  # after one round g_i = −α (w_i − w_g)
    moved = clients.mean(0) - old
    torch.testing.assert_close(first.shared["head"], clients.mean(0) + moved, atol=1e-9, rtol=0)  # h = −(mean − w_g)
    some = method.round(first, Cohort(engine, ABLE[:2], 2, population=len(ABLE)))
    later = engine.rows.read(ABLE, 2)["personal.gradient.head"]
    close({"g": later[2:]}, {"g": own[2:]})  # clients that were not asked keep theirs
    answered = first.shared["head"] - (later[:2] - own[:2]) / mu
    h = -moved - 2 / len(ABLE) * (answered.mean(0) - first.shared["head"])
    torch.testing.assert_close(some.shared["head"], answered.mean(0) - h, atol=1e-9, rtol=0)


# MOON


def test_moons_loss_is_cross_entropy_and_the_contrast_of_features():
    method = build("attention", "moon", "mean", contrast=0.7, temperature=0.4)
    data = random_data(method.task, [(9, 0, 0), (6, 0, 0), (2, 0, 0)])
    draw = torch.Generator().manual_seed(4)
    sent, now, last = (
        {k: v + 0.5 * torch.randn(3, *v.shape, generator=draw) for k, v in method.initial.items()} for _ in range(3)
    )
    message = Message({k: v[0] for k, v in sent.items()})
    batch = next(iter(data.batches(4, 1)))
    own = {"personal.previous." + k: v for k, v in last.items()}
    n = len(batch.y)
    each, _ = method.local.contrasted(method.model, message, own, Means(data))(
        {k: v[:n] for k, v in now.items()}, batch
    )

    def features(params, of, client):
        one = {k: v[of : of + 1] for k, v in params.items()}
        return F.normalize(method.adapter.masked(one, batch.x[client : client + 1])[0], dim=-1)

    for client in range(n):
        z, g, p = (features(m, of, client) for m, of in ((now, client), (sent, 0), (last, client)))
        total = 0.0
        for row in torch.nonzero(batch.weight[client]).flatten():
            near, far = (torch.exp(z[row] @ other[row] / 0.4) for other in (g, p))
            logits = method.task.scale * z[row] @ method.task.names().T
            total += F.cross_entropy(logits, batch.y[client, row]) - 0.7 * torch.log(near / (near + far))
        torch.testing.assert_close(each[client], total / int((batch.weight[client] > 0).sum()), atol=1e-9, rtol=0)


def test_moon_remembers_the_model_it_trained_last():
    method = build("attention", "moon", "mean")
    data = random_data(method.task)
    engine = Stacked(method, data, 3)
    start = engine.rows.read(ABLE, 1)
    close({k: start["personal.previous." + k][0] for k in method.initial}, method.initial)
    reply = next(engine.run("train", ABLE[:2], method.init(6).message(), 1, 0))
    close({k: engine.rows.read(ABLE[:2], 2)["personal.previous." + k] for k in reply.shared}, reply.shared)
