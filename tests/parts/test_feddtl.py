"""FedDTL: its reinforced loss and its schedule against the paper's equations by hand, its text server, what it sends."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import ABLE, RULES, close, example, play, same, scores, state_of, train_feddtl
from hypothesis import example as always
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fedvlm.cli import main
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Batch, Data, Extra
from fedvlm.core.descent import by_autograd
from fedvlm.core.model import Model
from fedvlm.core.state import Message, Params, Reply, State, copy_per_client, nbytes, with_client_axis
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.parts.adapters.lora import Lora
from fedvlm.parts.local.two_stage import REINFORCED, DrawnActions, TwoStage, random_numbers
from fedvlm.parts.merge.stages import FINAL, Stages
from fedvlm.parts.merge.text_server import TOWER, TextServer
from fedvlm.rounds.method import Method
from fedvlm.training import processes
from fedvlm.training.folder import RunFolder

ALGORITHMS = ("grpo", "dr-grpo", "gmpo", "dapo", "lite-ppo")
IMAGE = Lora(rank=2, towers="image", projections=("q", "k", "v", "out"))


SHARP = 40.0  # logit scale: policies far from uniform, so that some ratios are clipped


def feddtl(local=None, merge=None, task=None, adapter=IMAGE) -> Method:
    return Method.build(
        adapter, local or TwoStage(**RULES), merge or TextServer(), task or example("lora")[0], seed=5
    )  # fmt: skip


def some(data: Data, *clients: int) -> Data:
    return replace(data, bounds=data.bounds[list(clients)], ids=data.ids[list(clients)])


def moved(params, by: float, seed: int = 3):
    """Somewhere else than at the start, where all changes of the tower are 0."""
    draw = torch.Generator().manual_seed(seed)
    return {k: v + by * torch.randn(v.shape, generator=draw) for k, v in params.items()}


# the loss


def by_hand(rule: TwoStage, policy, sample: DrawnActions, y, weight):
    """One client's loss, share of clipped ratios, and advantages: Eqs. 7–10 and 14–18 in plain Python."""
    policy, reference, y, weight = (v.tolist() for v in (policy, sample.reference, y, weight))
    actions, old = sample.actions.tolist(), sample.old.tolist()
    real, many = [i for i, w in enumerate(weight) if w > 0], len(actions)
    every = list(itertools.product(range(many), real))
    reward = {(j, i): float(actions[j][i] == y[i]) for j, i in every}

    def std(values) -> float:
        mean = sum(values) / len(values)
        return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0

    gain, advantage, apart, clipped = {}, {}, 0.0, 0
    for j, i in every:
        group = [reward[k, i] for k in range(many)]
        below = {"dr-grpo": 1.0, "lite-ppo": std(list(reward.values())) + 1e-4}.get(rule.algorithm, std(group) + 1e-4)
        a = advantage[j, i] = (reward[j, i] - sum(group) / many) / below
        action = actions[j][i]
        ratio = math.exp(policy[i][action]) / math.exp(old[j][i])
        top = 1 + (rule.clip_high if rule.algorithm in ("dapo", "gmpo") else rule.clip)
        cut = min(max(ratio, 1 - rule.clip), top)
        clipped += ratio != cut
        gain[j, i] = min(ratio * a, cut * a)
        if rule.kl == "exact":
            apart += sum(math.exp(p) * (p - r) for p, r in zip(policy[i], reference[i], strict=True))
        else:
            there = math.exp(reference[i][action]) / math.exp(policy[i][action])
            apart += there - math.log(there) - 1
    if rule.algorithm == "gmpo":
        won = 0.0
        for j, sign in itertools.product(range(many), (1, -1)):
            part = [abs(gain[j, i]) for i in real if sign * advantage[j, i] > 0]
            won += sign * len(part) / len(real) * math.prod(part) ** (1 / len(part)) if part else 0.0
        won /= many
    else:
        won = sum(gain.values()) / len(every)
    loss = rule.kl_weight * apart / len(every) - won
    return loss * (len(real) if rule.algorithm == "dr-grpo" else 1), clipped / len(every), advantage


def case(seed: int, clients: int = 2, random_numbers: int = 3, examples: int = 4, classes: int = 3, padding: int = 1):
    """Random policies and actions; the last client's last examples are padding."""
    draw = torch.Generator().manual_seed(seed)
    logits = [1.5 * torch.randn(clients, examples, classes, generator=draw) for _ in range(2)]
    actions = torch.randint(classes, (clients, random_numbers, examples), generator=draw)
    old = -2 * torch.rand(clients, random_numbers, examples, generator=draw)
    y = torch.randint(classes, (clients, examples), generator=draw)
    weight = torch.full((clients, examples), 1 / examples)
    weight[-1, examples - padding :] = 0
    weight[-1, : examples - padding] = 1 / (examples - padding)
    return logits[0], logits[1].log_softmax(-1), actions, old, Batch(torch.zeros(()), y, weight)


@pytest.mark.parametrize("kl", ["sampled", "exact"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_loss_is_what_the_paper_prints(double, algorithm, kl):
    """Loss, advantage and clip fraction by hand, and the slope by differences of that."""
    rule = TwoStage(algorithm=algorithm, kl=kl, kl_weight=0.3)
    shares = set()
    for seed in range(6):
        logits, reference, actions, old, batch = case(seed)
        reward = (actions == batch.y[:, None]).double()
        sample = DrawnActions(actions, old, rule.advantage(reward, batch.weight), reference)
        leaf = logits.clone().requires_grad_()
        loss, clipped = rule.policy_loss(leaf.log_softmax(-1), sample, batch)
        (slope,) = torch.autograd.grad(loss.sum(), leaf)
        for c in range(2):
            mine = DrawnActions(*(v[c] for v in sample))
            value, share, advantage = by_hand(rule, logits[c].log_softmax(-1), mine, batch.y[c], batch.weight[c])
            assert float(loss[c].detach()) == pytest.approx(value, rel=1e-10)
            assert float(clipped[c]) == pytest.approx(share, abs=1e-12)
            shares.add(round(share, 6))
            for (j, i), a in advantage.items():
                assert float(mine.advantage[j, i]) == pytest.approx(a, rel=1e-12)
            for i, k in itertools.product(range(4), range(3)):
                near = []
                for step in (1e-6, -1e-6):
                    there = logits[c].clone()
                    there[i, k] += step
                    near.append(by_hand(rule, there.log_softmax(-1), mine, batch.y[c], batch.weight[c])[0])
                assert float(slope[c, i, k]) == pytest.approx((near[0] - near[1]) / 2e-6, abs=1e-7)
    assert len(shares) > 3  # some are clipped, and not all


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_padding_weighs_nothing(double, algorithm):
    rule = TwoStage(algorithm=algorithm)
    logits, reference, actions, old, batch = case(7, padding=2)
    found = []
    for junk in (0, 1):
        wild = torch.Generator().manual_seed(junk)
        logits[-1, 2:] = 5 * torch.randn(2, 3, generator=wild)
        old[-1, :, 2:] = -torch.rand(3, 2, generator=wild)
        actions[-1, :, 2:] = torch.randint(3, (3, 2), generator=wild)
        reward = (actions == batch.y[:, None]).double()
        sample = DrawnActions(actions, old, rule.advantage(reward, batch.weight), reference)
        leaf = logits.clone().requires_grad_()
        loss, clipped = rule.policy_loss(leaf.log_softmax(-1), sample, batch)
        (slope,) = torch.autograd.grad(loss.sum(), leaf)
        assert not slope[-1, 2:].any() and slope[-1, :2].any()
        found.append((loss.detach(), clipped, slope[:, :2]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_algorithms_that_must_agree(double):
    """dapo is grpo but for the clip above; lite-ppo is grpo where a batch is one example; a geometric mean over one
    example is the mean; dr-grpo without its std sums over the batch."""
    logits, reference, actions, old, batch = case(3, examples=4, padding=2)
    reward = (actions == batch.y[:, None]).double()

    def loss(at=slice(None), **how):
        rule = TwoStage(**how)
        one = Batch(batch.x, batch.y[:, at], batch.weight[:, at] / batch.weight[:, at].sum(-1, keepdim=True))
        mine = reward[..., at], actions[..., at], old[..., at], reference[:, at], logits[:, at].log_softmax(-1)
        sample = DrawnActions(mine[1], mine[2], rule.advantage(mine[0], one.weight), mine[3])
        return rule.policy_loss(mine[4], sample, one)[0]

    torch.testing.assert_close(loss(algorithm="dapo", clip_high=0.2), loss(algorithm="grpo"))
    assert not torch.allclose(loss(algorithm="dapo", clip_high=0.9), loss(algorithm="grpo"))
    for i in range(2):
        first = slice(i, i + 1)
        torch.testing.assert_close(loss(first, algorithm="lite-ppo"), loss(first, algorithm="grpo"))
        torch.testing.assert_close(
            loss(first, algorithm="gmpo", clip_high=0.2), loss(first, algorithm="grpo", clip_high=0.2)
        )
    only_kl = [
        loss(algorithm=a, kl_weight=1.0, clip=0.0) - loss(algorithm=a, kl_weight=0.0, clip=0.0)
        for a in ("grpo", "dr-grpo")
    ]
    torch.testing.assert_close(only_kl[1], only_kl[0] * torch.tensor([4.0, 2.0]))


# one step of it


def at_work(rule: TwoStage, client: int = 0, classes: int = 5, **change):
    """A model away from its start, a reference apart from it, and a batch."""
    task, data = example("lora")
    task = task.subset(slice(classes))._replace(scale=SHARP)
    data = replace(some(data, client), y=data.y % classes, **change)
    model, params = Model(IMAGE, task), moved(copy_per_client(IMAGE.init(task, 1), 1), 0.1)
    return model, params, moved(params, 0.05, 4), data, next(data.batches(4))


def counts():
    return {"clipped": torch.zeros(1), "flat": torch.zeros(1)}


@pytest.mark.parametrize("relative", [False, True])
def test_actions_are_drawn_from_the_noisy_old_policy(double, relative):
    """z + σ·noise (times its length over √dim), normalised; the first class whose cumulated probability is above the die."""
    rule = TwoStage(noise=0.3, relative_noise=relative, actions=4)
    model, params, reference, data, batch = at_work(rule)
    found = rule.sample(model, params, reference, batch, data)
    clean = IMAGE.embed(model.task, params, batch.x)
    noise, dice = random_numbers(batch, data, 4, 16, clean)
    assert noise.shape == (1, 4, 4, 16) and dice.shape == (1, 4, 4)
    for j, i in itertools.product(range(4), range(4)):
        z = clean[0, i]
        noisy = z + 0.3 * noise[0, j, i] * (math.sqrt(sum(v * v for v in z.tolist()) / 16) if relative else 1)
        cosines = [float(noisy @ t / noisy.norm()) for t in model.task.names()]
        total = sum(math.exp(SHARP * c) for c in cosines)
        chances = [math.exp(SHARP * c) / total for c in cosines]
        action = next(k for k in range(5) if sum(chances[: k + 1]) > float(dice[0, j, i]))
        assert int(found.actions[0, j, i]) == action
        assert float(found.old[0, j, i]) == pytest.approx(math.log(chances[action]), rel=1e-10)
    torch.testing.assert_close(found.reference, model.logits(reference, batch.x).log_softmax(-1))
    reward = (found.actions == batch.y[:, None]).double()
    torch.testing.assert_close(found.advantage, rule.advantage(reward, batch.weight))


def test_noise_and_dice_are_a_clients_own(double):
    """The same whoever stands beside it; others for another client, step, round or seed."""
    _, data = example("lora")
    order = np.array([0, 2, 4])  # largest first
    batch = next(some(data, *order).batches(4))
    together = random_numbers(batch, some(data, *order), 3, 16, torch.zeros(()))
    for at, i in enumerate(order):
        alone = next(some(data, i).batches(4))
        for one, other in zip(together, random_numbers(alone, some(data, i), 3, 16, torch.zeros(())), strict=True):
            assert torch.equal(one[at : at + 1], other)
    for changed, step in ((replace(data, round=1), 0), (replace(data, seed=9), 0), (data, 1)):
        drawn = random_numbers(batch._replace(step=step), some(changed, *order), 3, 16, torch.zeros(()))
        for one, other in zip(together, drawn, strict=True):
            assert not (one == other).any()
    assert not (together[0][0] == together[0][1]).any()
    wide = random_numbers(batch, some(data, *order), 50, 16, torch.zeros(()))
    assert abs(float(wide[0].std()) - 1) < 0.02 and abs(float(wide[0].mean())) < 0.02
    assert abs(float(wide[1].mean()) - 0.5) < 0.05 and float(wide[1].min()) >= 0 and float(wide[1].max()) < 1


def test_noise_grows_with_the_embedding_only_where_it_is_relative(double):
    """Embeddings ten times as long: absolute noise turns them less, relative noise as much as before."""
    task, data = example("lora")
    params, data = copy_per_client(IMAGE.init(task, 1), 1), some(data, 0)
    batch = next(data.batches(4))

    class Longer(Lora):
        def embed(self, task, params, x):
            return 10 * super().embed(task, params, x)

    def old(adapter, relative):
        rule = TwoStage(noise=0.3, relative_noise=relative)
        return rule.sample(Model(adapter, task), params, params, batch, data).old

    torch.testing.assert_close(old(Longer(rank=2, towers="image"), True), old(IMAGE, True))
    assert not torch.allclose(old(Longer(rank=2, towers="image"), False), old(IMAGE, False))


@pytest.mark.parametrize("kl", ["sampled", "exact"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "edge",
    [{"actions": 1}, {"noise": 0.0}, {"kl_weight": 0.0}, {"classes": 1}, {"client": 3}, {"alike": True}],
    ids=str,
)
def test_at_the_edges_it_is_finite_and_what_it_must_be(double, edge, algorithm, kl):
    """No advantage leaves the KL alone; no KL and no advantage leave nothing; no noise starts at ratio 1."""
    given = {"actions": 8} | {k: v for k, v in edge.items() if k in ("actions", "noise", "kl_weight")}
    rule = TwoStage(algorithm=algorithm, kl=kl, **given)
    model, params, reference, data, batch = at_work(rule, edge.get("client", 0), edge.get("classes", 5))
    if "alike" in edge:  # an answer that nobody ever gives: no reward at all
        text = model.task.names().clone()
        text[-1] = -IMAGE.features(model.task, params, batch.x)[0].mean(0)
        model = Model(IMAGE, model.task._replace(text=F.normalize(text, dim=-1), scale=300.0))
        batch = batch._replace(y=torch.full_like(batch.y, 4))
    value, slopes = rule.reinforce(model, reference, data, counts())(params, batch)
    assert value.isfinite().all() and all(s.isfinite().all() for s in slopes)
    sample = rule.sample(model, params, reference, batch, data)
    flat = {"actions", "classes", "alike"} & edge.keys()
    assert not flat or not sample.advantage.any()

    def apart(now, _):
        policy = model.logits(now, batch.x).log_softmax(-1)
        if kl == "exact":
            each = (policy.exp() * (policy - sample.reference)).sum(-1)[:, None]
        else:
            at = sample.actions.transpose(1, 2)
            there = (sample.reference.gather(-1, at) - policy.gather(-1, at)).transpose(1, 2)
            each = there.exp() - there - 1
        size = (batch.weight > 0).sum() if algorithm == "dr-grpo" else 1
        return rule.kl_weight * size * batch.mean(each.mean(1))

    loss, found = by_autograd(apart)(params, batch)
    assert loss.abs().sum() > 0 or {"kl_weight", "classes"} & edge.keys()
    if flat:
        torch.testing.assert_close(value, loss)
        for one, other in zip(slopes, found, strict=True):
            torch.testing.assert_close(one, other)
    if "classes" in edge:
        assert value.abs().sum() < 1e-12 and all(s.abs().max() < 1e-12 for s in slopes)
    if "noise" in edge:
        policy = model.logits(params, batch.x).log_softmax(-1)
        torch.testing.assert_close(sample.old, policy.gather(-1, sample.actions.mT).mT)
        assert sample.advantage.any()
        if algorithm != "gmpo":  # advantages cancel out at ratio 1
            torch.testing.assert_close(value, loss)
    if "kl_weight" in edge:
        assert sample.advantage.any() and not loss.any() and any(s.any() for s in slopes)


def test_where_policy_and_reference_agree_there_is_no_kl(double):
    for kl in ("sampled", "exact"):
        rule = TwoStage(kl=kl, actions=1)
        model, params, _, data, batch = at_work(rule)
        value, slopes = rule.reinforce(model, params, data, counts())(params, batch)
        assert value.abs().sum() < 1e-12 and all(s.abs().max() < 1e-12 for s in slopes)


def test_the_old_policy_is_frozen_while_a_batch_lasts(double):
    """The second update's ratio is no longer 1, on the actions of the first; a new batch random_numbers anew."""
    rule = TwoStage(noise=0.0, kl_weight=0.0, actions=16)
    model, params, reference, data, batch = at_work(rule)
    count, taken = counts(), rule.sample(model, params, reference, batch, data)
    slopes = rule.reinforce(model, reference, data, count)
    first, found = slopes(params, batch)
    later = {k: v - 10.0 * g for (k, v), g in zip(params.items(), found, strict=True)}
    second, _ = slopes(later, batch)

    def ratio(now, sample):
        policy = model.logits(now, batch.x).log_softmax(-1)
        return (policy.gather(-1, sample.actions.mT).mT - sample.old).exp()

    def objective(now, sample):
        return rule.policy_loss(model.logits(now, batch.x).log_softmax(-1), sample, batch)

    torch.testing.assert_close(ratio(params, taken), torch.ones_like(taken.old))
    assert (ratio(later, taken) - 1).abs().max() > 0.05
    torch.testing.assert_close(first, objective(params, taken)[0])
    torch.testing.assert_close(second, objective(later, taken)[0])
    torch.testing.assert_close(count["clipped"], objective(params, taken)[1] + objective(later, taken)[1])
    again = rule.sample(model, later, reference, batch, data)
    assert not torch.allclose(second, objective(later, again)[0])
    third, _ = slopes(later, batch._replace(step=0))  # another batch, be it the same examples
    torch.testing.assert_close(third, objective(later, again)[0])


def test_a_round_of_it_by_hand(double):
    """Every batch once, `updates` steps on each, whatever `epochs` says; clipped and flat are means over the steps."""
    rule = TwoStage(lr=0.5, batch=8, epochs=3, updates=2, noise=0.5, relative_noise=True, kl_weight=0.2)
    model, params, reference, data, _ = at_work(rule)
    ours = {k: v.clone() for k, v in params.items()}
    shared, anchor = ({k: v[0] for k, v in given.items()} for given in (params, reference))
    found = rule.fit(model, ours, Message(shared, reference=anchor, stage=REINFORCED), {}, data)
    losses, clipped, flat = [], [], []
    for batch in data.batches(8, 1):
        taken = rule.sample(model, params, reference, batch, data)
        for _ in range(2):
            leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
            loss, cut = rule.policy_loss(model.logits(leaves, batch.x).log_softmax(-1), taken, batch)
            slopes = torch.autograd.grad(loss.sum(), list(leaves.values()))
            params = {k: v - 0.5 * g for (k, v), g in zip(params.items(), slopes, strict=True)}
            losses.append(float(loss.detach()))
            clipped.append(float(cut))
            flat.append(float(batch.mean((taken.advantage == 0).all(1).double())))
    assert len(losses) == 8
    close(ours, params)
    for name, values in (("loss", losses), ("clipped", clipped), ("flat", flat)):
        assert float(found[name]) == pytest.approx(np.mean(values), rel=1e-9)
    assert 0 < np.mean(clipped) < 1 and 0 < np.mean(flat) < 1


def test_without_a_second_stage_it_is_plain_training(double):
    _, data = example("lora")
    ours, theirs = (
        play(feddtl(rule(**RULES), registry.find("merge", "mean")()), data, 6, rounds=2).state.shared
        for rule in (TwoStage, registry.find("local", "sgd"))
    )
    same(ours, theirs)


ONLY_SECOND = {"stage": "reinforced", "reference": "final"}


def sent(state: State) -> Params:
    """All that the server sends."""
    return state.shared | {f"task.{k}": v for k, v in state.task.items()}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_reinforced_stacked_is_serial(double, algorithm):
    task, data = example("lora")
    rule = TwoStage(**RULES, algorithm=algorithm, noise=0.5, relative_noise=True)
    method = feddtl(
        rule, TextServer(**ONLY_SECOND, upload_share=0.5, upload_noise=0.1, text_batch=8), task._replace(scale=SHARP)
    )
    state, _, scored, cohort = play(method, data, chunk=1, rounds=2)
    for chunk in (2, 6):
        other, _, scored_beside, beside = play(method, data, chunk, rounds=2)
        close(sent(state), sent(other))
        close(scored, scored_beside)
        for name in ("loss", "train_accuracy", "text_loss"):
            assert beside.notes[name] == pytest.approx(cohort.notes[name], rel=1e-9)
        for name, values in cohort.effects.items():
            assert sorted(beside.effects[name]) == pytest.approx(sorted(values), rel=1e-9)  # in order of reply
    assert 0 < np.mean(cohort.effects["flat"]) < 1 and np.mean(cohort.effects["clipped"]) > 0


def test_reinforced_order_and_absence(double):
    """As in the contract, which ends before the second stage begins."""
    _, data = example("lora")
    method = feddtl(merge=TextServer(**ONLY_SECOND, upload_groups=2))
    state = play(method, data, 6, rounds=2).state
    same(sent(state), sent(play(method, data, 6, rounds=2, ids=ABLE[::-1].copy()).state))
    absent, *_, cohort = play(method, data, 6, rounds=2, lost=frozenset({0, 3}))
    same(sent(absent), sent(play(method, data, 6, rounds=2, ids=np.array([1, 2, 4])).state))
    assert cohort.notes["answered"] == 3 and not torch.equal(absent.task["text"], state.task["text"])


RULES_FOR_LORA = [
    n
    for n in registry.names("local")
    if not (rule := registry.find("local", n)).partner and not rule().incompatible(Lora(towers="image"))
]


@pytest.mark.parametrize("local", RULES_FOR_LORA)
def test_other_rules_do_not_mind_a_reference(double, local):
    _, data = example("lora")
    rule = registry.find("local", local)(**RULES)
    with_it, without = (
        play(feddtl(rule, Stages(stage=stage)), data, 6, rounds=2)[0] for stage in ("reinforced", "supervised")
    )
    assert all(v.isfinite().all() for v in with_it.shared.values())
    if local != "two_stage":
        same(with_it.shared, without.shared)


# the schedule


class Clients:
    """Two clients that answer what the script says: the model one further, and their training accuracy."""

    def __init__(self, script):
        self.script, self.heard = script, []

    def run(self, step, ids, message, round, exchange):
        self.heard.append(message)
        here = self.script[round - 1]
        for i, accuracy in zip(ids, here if isinstance(here, tuple) else (here, here), strict=True):
            values = {"n": torch.ones(1), "loss": torch.zeros(1)}
            values |= {"accuracy": torch.tensor([accuracy])}
            yield Reply(np.array([i]), values, {"w": message.shared["w"][None] + 2.0 * i})


def staged(script, **how):
    """The stage of every round, what went down, and the server's notes."""
    merge, clients = Stages(**how), Clients(script)
    state = State({"w": torch.tensor(10.0)}, {}, merge.init(None, 0, 0).server)  # type: ignore[arg-type]
    notes, models = [], []
    for round in range(1, len(script) + 1):
        models.append(float(state.shared["w"]))
        cohort = Cohort(clients, np.arange(2), round)  # the mean moves by one each round
        state = merge.round(None, state, cohort)  # type: ignore[arg-type]
        notes.append(cohort.notes)
    assert models == [10.0 + k for k in range(len(script))]
    return [n["stage"] for n in notes], clients.heard, notes, state


def by_rule(script, calm, calm_rounds) -> list[str]:
    """D.3: supervised ends when |accₜ − accₜ₋₁| < ε has held for T_r rounds running."""
    out, run, done = [], 0, False
    for t, value in enumerate(script):
        out.append("reinforced" if done else "supervised")
        run = run + 1 if t and abs(value - script[t - 1]) < calm else 0
        done = done or run >= calm_rounds
    return out


@given(
    st.lists(st.sampled_from([0.5, 0.501, 0.502, 0.75, 0.9]), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.00101, 0.3, 3.0]),
    st.integers(1, 3),
)
def test_the_switch_comes_by_the_papers_rule_and_for_good(script, calm, calm_rounds):
    torch.set_default_dtype(torch.float64)
    try:
        stages, heard, *_ = staged(script, tolerance=calm, patience=calm_rounds)
    finally:
        torch.set_default_dtype(torch.float32)
    assert stages == by_rule(script, calm, calm_rounds)
    assert [message.stage for message in heard] == stages
    assert ["w" in message.reference for message in heard] == [s == "reinforced" for s in stages]


def test_the_switch_in_plain_numbers(double):
    script = [0.5, 0.7, 0.701, 0.75, 0.751, 0.752, 0.1, 0.9]
    stages, _, notes, state = staged(script, tolerance=0.003, patience=2)
    assert stages == ["supervised"] * 6 + ["reinforced"] * 2
    assert [n["train_accuracy"] for n in notes] == script
    assert float(state.server[FINAL + "w"]) == 16.0 and float(state.server["stage.rounds"]) == 6
    assert staged([0.5, 0.75, 1.0], tolerance=0.25, patience=1)[0] == ["supervised"] * 3  # less than, not at most


def test_the_first_round_has_none_before_it(double):
    """However large `tolerance` is; and an accuracy that does not move is calm to the last digit."""
    assert staged([0.5] * 3, tolerance=9.0, patience=1)[0] == ["supervised", "supervised", "reinforced"]
    assert staged([0.7] * 4, tolerance=1e-12, patience=2)[0] == ["supervised"] * 3 + ["reinforced"]


def test_accuracy_is_the_mean_over_clients(double):
    """Each counted once; two that move apart stand still together."""
    stages, _, notes, _ = staged([(0.5, 0.7), (0.4, 0.8), (0.3, 0.9)], tolerance=0.003, patience=1)
    assert stages == ["supervised", "supervised", "reinforced"]
    assert notes[1]["train_accuracy"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    "reference,wanted", [("mix", [12.0, 12.5, 13.0]), ("latest", [12.0, 13.0, 14.0]), ("final", [12.0] * 3)]
)
def test_what_the_reference_is(double, reference, wanted):
    """½ (the model at the switch + the latest), or either."""
    _, heard, _, state = staged([0.5] * 5, tolerance=1.0, patience=1, reference=reference)
    assert [float(message.reference["w"]) for message in heard[2:]] == wanted
    assert float(state.server[FINAL + "w"]) == 12.0 and state.shared.keys() == {"w"}


def test_only_one_stage(double):
    stages, heard, _, state = staged([0.5] * 4, tolerance=1.0, patience=1, stage="supervised")
    assert set(stages) == {"supervised"} and not any(message.reference for message in heard)
    stages, heard, _, state = staged([0.5, 0.9, 0.1], stage="reinforced")
    assert set(stages) == {"reinforced"} and float(state.server[FINAL + "w"]) == 10.0
    assert [float(message.reference["w"]) for message in heard] == [10.0, 10.5, 11.0]


def test_clients_tell_their_training_accuracy(double):
    """Of the model as trained, on training images only, with the class embeddings that were sent."""
    task, data = example("lora")
    for merge in (Stages(), TextServer()):
        method = feddtl(merge=merge)
        start = method.init(6)
        assert start.task.keys() == ({"text"} if merge == TextServer() else set())
        text = F.normalize(start.task.get("text", task.names()).flip(0), dim=-1) if start.task else task.names()
        replies = heard(method, data, start._replace(task={"text": text} if start.task else {}).message())
        for i, reply in replies.items():
            low, high = data.bounds[i, :2]
            answer = (IMAGE.features(task, reply.shared, data.x[None, low:high])[0] @ text.T).argmax(-1)
            share = float((answer == data.y[low:high]).double().mean())
            assert float(reply.values["accuracy"][0]) == pytest.approx(share)


def heard(
    method: Method, data: Data, message: Message | None = None, chunk: int = 6, round: int = 1
) -> dict[int, Reply]:
    """The reply of each client: one by one, since they have lengths of their own."""
    engine, found = Stacked(method, data, chunk), dict[int, Reply]()
    for reply in engine.run("train", ABLE, message or method.init(6).message(), round, 0):
        for at, i in enumerate(reply.ids):
            values, shared = ({k: v[at : at + 1] for k, v in part.items()} for part in (reply.values, reply.shared))
            found[int(i)] = Reply(reply.ids[at : at + 1], values, shared)
    assert sorted(found) == ABLE.tolist()
    return dict(sorted(found.items()))


# the text server


def test_training_the_text_tower_lowers_its_loss(double):
    task, data = example("lora")
    merge = TextServer(text_lr=0.01, text_epochs=4, text_batch=16)
    method = feddtl(merge=merge)
    replies = [reply.values for reply in heard(method, data).values()]
    received = [(values["embeddings"][0], values["labels"][0].long()) for values in replies]
    changes = merge.text_adapter(IMAGE).init(task, 5)
    z, y = (torch.cat(part) for part in zip(*received, strict=True))

    def loss(changes) -> float:
        return float(F.cross_entropy(8.0 * z @ merge.class_embeddings(method.model, changes)["text"].T, y))

    after, mean_loss = merge.train_text_tower(method.model, changes, received, 1)
    assert loss(after) < mean_loss < loss(changes) and loss(changes) - loss(after) > 0.01
    assert after.keys() == changes.keys() and all(k.startswith(TOWER) for k in after)
    idle, nothing = merge.train_text_tower(method.model, changes, [(z[:0], y[:0])], 1)
    same(idle, changes)
    assert nothing == 0.0


def test_adam_of_the_text_tower_can_go_on_from_round_to_round(double):
    """Two rounds of one full batch with kept moments are one round of two steps; reset, the second step is as long again."""
    task, data = example("lora")
    method = feddtl(merge=TextServer(text_lr=0.01))
    received = [(r.values["embeddings"][0], r.values["labels"][0].long()) for r in heard(method, data).values()]
    kept = TextServer(text_lr=0.01, text_epochs=1, text_batch=1000, text_moments="kept")
    start, memory = kept.text_adapter(IMAGE).init(task, 5), {}
    once, _ = kept.train_text_tower(method.model, start, received, 1, memory)
    twice, _ = kept.train_text_tower(method.model, once, received, 2, memory)
    both, _ = replace(kept, text_epochs=2).train_text_tower(method.model, start, received, 1)
    torch.testing.assert_close(twice, both)
    anew, _ = replace(kept, text_moments="reset").train_text_tower(method.model, once, received, 2, {})
    assert max(float((anew[k] - twice[k]).abs().max()) for k in anew) > 1e-4
    state, *_ = play(feddtl(merge=kept), data, 6, rounds=2)
    assert float(state.server["adam.steps"]) == 2


def test_the_text_towers_loss_can_have_a_scale_of_its_own(double):
    task, data = example("lora")
    plain, other = feddtl(merge=TextServer()), feddtl(merge=TextServer(text_scale=14.3))
    same_scale = feddtl(merge=TextServer(text_scale=task.scale))
    received = [(r.values["embeddings"][0], r.values["labels"][0].long()) for r in heard(plain, data).values()]
    start = plain.merge.text_adapter(IMAGE).init(task, 5)
    found = [m.merge.train_text_tower(m.model, start, received, 1)[1] for m in (plain, same_scale, other)]
    assert found[0] == found[1] != found[2]


def test_class_embeddings_take_the_place_of_the_frozen_ones(double):
    """At first they are the same; then clients' answers follow what the server says."""
    task, data = example("lora")
    method = feddtl(merge=TextServer(text_lr=0.02))
    start = method.init(6)
    torch.testing.assert_close(start.task["text"], task.names())
    state, _, scored, _ = play(method, data, 6, rounds=2)
    text = state.task["text"]
    assert (text - task.names()).abs().max() > 1e-3
    towers = {k: v for k, v in state.server.items() if k.startswith(TOWER)}
    torch.testing.assert_close(text, TextServer().text_adapter(IMAGE).class_vectors(task, with_client_axis(towers))[0])
    now = method.for_message(state.message())
    assert torch.equal(now.task.names(), text) and state.shared.keys() == method.initial.keys()
    low, high = data.bounds[0, 2:]
    logits = 8.0 * IMAGE.features(task, with_client_axis(state.shared), data.x[None, low:high])[0] @ text.T
    wanted = F.cross_entropy(logits, data.y[low:high], reduction="sum")
    torch.testing.assert_close(scored["shared.loss"][0, 2], wanted)
    still = play(feddtl(merge=TextServer(text_lr=1e-12)), data, 6, rounds=2).state
    torch.testing.assert_close(still.task["text"], task.names(), rtol=0, atol=1e-9)


def test_novel_classes_get_embeddings_too(double):
    task, data = example("lora")
    few, rest = (task.subset(k) for k in (slice(3), slice(3, None)))
    task, data = few._replace(novel=rest), replace(data, y=data.y % 3)
    extras = {"base": Extra(data.x[:9], data.y[:9]), "novel": Extra(data.x[:8], data.y[:8] % 2)}
    data = replace(data, extras=extras)
    method = feddtl(merge=TextServer(text_lr=0.05), task=task)
    state, *_ = play(method, data, 6, rounds=2)
    said = state.task["novel"]
    assert said.shape == rest.names().shape and (said - rest.names()).abs().max() > 1e-3
    towers = {k: v for k, v in state.server.items() if k.startswith(TOWER)}
    torch.testing.assert_close(said, TextServer().text_adapter(IMAGE).class_vectors(rest, with_client_axis(towers))[0])
    now = method.for_message(state.message())
    assert now.task.novel and torch.equal(now.task.novel.names(), said)
    (reply,) = Stacked(method, data, 1).run("novel.shared", np.array([0]), state.message(), 2, 0)
    right = (IMAGE.features(rest, with_client_axis(state.shared), data.x[None, :8])[0] @ said.T).argmax(-1) == data.y[
        :8
    ] % 2
    assert reply.values["novel"][0].tolist() == torch.bincount((data.y[:8] % 2)[right], minlength=2).tolist()


# what is sent up


def sent_of(merge: TextServer, y: torch.Tensor, dim: int = 6, client: int = 2, **moment):
    """What a client sends of random embeddings, and what they were."""
    z = F.normalize(torch.randn(len(y), dim, generator=torch.Generator().manual_seed(1)), dim=-1)
    data = Data(z, y, np.array([[0, len(y), len(y), len(y)]]), np.array([client]), **({"seed": 4, "round": 3} | moment))
    return z, *merge.embeddings_to_send(z, y, data, client), merge.source_rows(y, data, client)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.sampled_from([0.01, 0.07, 0.1, 0.2, 0.28, 0.5, 0.55, 1.0]),
    st.integers(0, 9),
)
@always([25, 50], 0.28, 0)  # 7.000000000000001 in floating point
def test_how_many_are_sent_of_each_class(sizes, share, groups):
    """⌈share × n⌉ exactly, in at most `upload_groups` means of disjoint groups that differ by one at most."""
    y = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    z, sent, labels, made = sent_of(TextServer(upload_share=share, upload_groups=groups), y)
    assert len(sent) == len(labels) == len(made) and sent.shape[1] == 6
    rows = [int(r) for part in made for r in part]
    assert len(rows) == len(set(rows))
    for label, n in enumerate(sizes):
        kept = math.ceil(Fraction(str(share)) * n)
        mine = [part for part, k in zip(made, labels.tolist(), strict=True) if k == label]
        assert sum(len(p) for p in mine) == kept and len(mine) == (min(groups, kept) if groups else kept)
        assert all(bool((y[p] == label).all()) for p in mine)
        assert not mine or max(map(len, mine)) - min(map(len, mine)) <= 1
    for vector, part in zip(sent, made, strict=True):
        torch.testing.assert_close(vector, z[part].mean(0))


def test_nothing_held_back_is_everything_in_order():
    y = torch.tensor([2, 0, 1, 0])
    z, sent, labels, _ = sent_of(TextServer(), y)
    assert torch.equal(sent, z) and torch.equal(labels, y)


def test_shares_and_groups_are_shuffled():
    """By client and seed, not the first so many; and the same in every round, which must not add up to all."""
    y, share = torch.zeros(40, dtype=torch.int64), TextServer(upload_share=0.25)
    kept = [
        tuple(int(p) for p in sent_of(share, y, **how)[3]) for how in ({}, {"client": 5}, {"round": 4}, {"seed": 9})
    ]
    assert len({frozenset(k) for k in kept}) == 3 and kept[0] == kept[2]
    assert set(kept[0]) != set(range(10))
    grouped = sent_of(TextServer(upload_groups=4), y)[3]
    assert [len(g) for g in grouped] == [10] * 4 and set(grouped[0].tolist()) != set(range(10))


@pytest.mark.parametrize("how", [{}, {"upload_groups": 4}, {"upload_share": 0.5}], ids=str)
def test_blur_is_noise_of_that_size_on_what_is_sent(how):
    y = torch.arange(400) % 4
    _, plain, labels, made = sent_of(TextServer(**how), y, dim=200)
    _, sent, same_labels, same_made = sent_of(TextServer(**how, upload_noise=0.3), y, dim=200)
    assert torch.equal(labels, same_labels) and all(map(torch.equal, made, same_made))
    noise = sent - plain
    assert abs(float(noise.std()) - 0.3) < 0.02 and abs(float(noise.mean())) < 0.02
    for other, alike in (({"client": 5}, 0.0), ({"round": 4}, 1.0)):  # fresh noise each round could be averaged away
        _, elsewhere, *_ = sent_of(TextServer(**how, upload_noise=0.3), y, dim=200, **other)
        there = elsewhere - sent_of(TextServer(**how), y, dim=200, **other)[1]
        assert float((there * noise).mean()) / 0.09 == pytest.approx(alike, abs=0.1)


@pytest.mark.parametrize(
    "how", [{}, {"upload_share": 0.4}, {"upload_groups": 2}, {"upload_share": 0.4, "upload_noise": 0.1}], ids=str
)
@pytest.mark.parametrize("chunk", [1, 6])
def test_what_arrives_at_the_server(double, how, chunk):
    """Each client's own embeddings and labels without the padding between clients, and every byte counted."""
    task, data = example("lora")
    merge = TextServer(**how)
    method = feddtl(merge=merge)
    rows = 0
    for i, reply in heard(method, data, chunk=chunk).items():
        low, high = data.bounds[i, :2]
        z = IMAGE.features(task, reply.shared, data.x[None, low:high])[0]
        embeddings, labels = merge.embeddings_to_send(z, data.y[low:high], replace(data, round=1), i)
        torch.testing.assert_close(reply.values["embeddings"][0], embeddings)
        assert reply.values["labels"][0].tolist() == labels.tolist() and len(labels)
        rows += len(labels)
    *_, cohort = play(method, data, chunk, rounds=1)
    assert cohort.notes["embeddings"] == rows
    assert cohort.bytes_up == 5 * nbytes(method.initial) + 8 * (5 * 5 + rows * (task.dim + 1))
    assert cohort.bytes_down == 5 * (nbytes(method.initial) + 8 * 5 * task.dim)
    *_, later = play(feddtl(merge=replace(merge, stage="reinforced")), data, chunk, rounds=1)
    assert later.bytes_down == cohort.bytes_down + 5 * nbytes(method.initial)
    assert later.bytes_up == cohort.bytes_up  # the reference does not come back


def test_what_cannot_be_is_refused_in_words(double):
    for wrong in ({"upload_share": 0.0}, {"upload_share": 1.5}, {"upload_groups": -1}, {"upload_noise": -0.1}):
        with pytest.raises(FedvlmError, match=next(iter(wrong))):
            TextServer(**wrong)
    for wrong in ({"tolerance": -1.0}, {"patience": 0}):
        for merge in (Stages, TextServer):
            with pytest.raises(FedvlmError, match=next(iter(wrong))):
                merge(**wrong)
    with pytest.raises(FedvlmError, match="actions=0"):
        TwoStage(actions=0)
    words = replace(IMAGE, towers="text")
    with pytest.raises(FedvlmError, match=r"local=two_stage does not go with adapter=lora: .* towers=image"):
        feddtl(adapter=words, merge=Stages())
    with pytest.raises(FedvlmError, match=r"merge=text_server does not go with adapter=lora: .* towers=image"):
        feddtl(adapter=replace(IMAGE, towers="both"))
    with pytest.raises(FedvlmError, match="local=two_stage does not go with adapter=head"):
        Method.build(registry.find("adapter", "head")(), TwoStage(), Stages(), example("head")[0])


# whole runs


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory):
    return train_feddtl(images, tmp_path_factory.mktemp("feddtl") / "run")


def test_a_run_goes_through_both_stages(whole):
    records = whole.rounds()[1:]
    assert [r["stage"] for r in records] == ["supervised"] * 2 + ["reinforced"] * 2
    assert all((r["effects"]["flat"] > 0) == (r["stage"] == "reinforced") for r in records)
    assert all(0.5 < r["effects"]["text_cosine"] < 1.00001 for r in records)  # six digits are recorded
    assert records[-1]["embeddings"] == 36 and {"text_loss", "train_accuracy", "novel"} <= set(records[-1])
    assert "embeddings of private images" in whole.record.reveals
    state = whole.load()[0]
    assert state.task.keys() == {"text", "novel"} and any(k.startswith(FINAL) for k in state.server)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_stopped_in_either_stage_it_goes_on_to_the_same_bits(images, whole, tmp_path, at, monkeypatch):
    inner = RunFolder.save

    class Stop(Exception):
        pass

    def stopping(self, state, round):
        inner(self, state, round)
        if round == at:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", stopping)
        with pytest.raises(Stop):
            train_feddtl(images, tmp_path / "cut")
    assert not RunFolder(tmp_path / "cut").done
    again = train_feddtl(images, tmp_path / "cut")
    assert scores(again) == scores(whole)
    for name in ("state.safetensors", "outputs.safetensors"):
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_apart_as_in_one(images, tmp_path, bytes_only):
    """Through both stages, with all classes: base-to-novel shares everybody's test images, so it is for simulations."""
    given = {"protocol": "one", "rounds": 3}
    one, apart = (train_feddtl(images, tmp_path / e, engine=e, **given) for e in ("serial", "loopback"))
    assert scores(apart) == scores(one) and scores(one)[-1]["stage"] == "reinforced"
    assert state_of(apart.folder) == state_of(one.folder)


def test_what_clients_reveal_is_said_before_anything_runs(images, tmp_path, monkeypatch, capsys):
    seen = []

    def nothing_yet(jobs, at_once, report):
        seen.append(capsys.readouterr().err)
        raise FedvlmError("far enough")

    monkeypatch.setattr(processes, "run_all", nothing_yet)
    for words in (["run", "feddtl"], ["bench", "feddtl", "zero-shot", "protocol=base-to-novel"]):
        assert main([*words, f"data={images}", f"out={tmp_path / 'x'}"]) == 1
        assert seen.pop().count("feddtl: clients send embeddings of private images, and their labels") == 1
    assert main(["run", "fedclip", f"data={images}", f"out={tmp_path / 'y'}"]) == 1
    assert "clients send" not in seen.pop()


def test_dry_says_it_too(images, capsys):
    assert main(["run", "feddtl", f"data={images}", "--dry"]) == 0
    assert "(embeddings of private images, and their labels)" in capsys.readouterr().out
