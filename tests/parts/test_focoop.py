"""FOCoOp: its loss, its robust step, its server, each against what the equations say done by hand."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import ABLE, NOUNS, RULES, example, play

from fedvlm.config.config import resolve
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Batch, Extra
from fedvlm.core.merge import Replies
from fedvlm.core.model import Model
from fedvlm.core.state import Message, copy_per_client, with_client_axis
from fedvlm.data.pool import Pools
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.parts.adapters.outsiders import Outsiders, together
from fedvlm.parts.local.bdro import Bdro, noise
from fedvlm.parts.local.contrast import Contrast
from fedvlm.parts.local.means import Means
from fedvlm.parts.local.sgd import Sgd
from fedvlm.parts.merge.classwise import mean_by_class
from fedvlm.parts.merge.transport import Transport, drawn_to_barycentre, least_per_noun, transport_plan
from fedvlm.predict.export.folder import export
from fedvlm.predict.predictor import from_run
from fedvlm.report.effects import effects
from fedvlm.rounds.method import Method
from fedvlm.towers.text import TextTower
from fedvlm.training import train
from fedvlm.training.planned_run import PlannedRun

PROMPTS = Outsiders(context=2, count=3)


def focoop(local=None, merge=None, adapter=PROMPTS) -> Method:
    return Method.build(adapter, local or Bdro(**RULES), merge or Transport(), example("outsiders")[0], seed=5)


def test_the_loss_is_what_the_paper_prints(double):
    """−log p(y) − log p(ID), probabilities over classes and outsiders, written out."""
    task, data = example("outsiders")
    params = with_client_axis(PROMPTS.init(task, 1))
    params["own"] = params["own"] + torch.randn(params["own"].shape, generator=torch.Generator().manual_seed(3))
    batch = next(replace(data, bounds=data.bounds[:1], ids=data.ids[:1]).batches(4))
    logits = PROMPTS.train_logits(task, params, batch)
    assert logits.shape[-1] == len(task.classes) + 3
    total = 0.0
    for row, y, weight in zip(logits[0].tolist(), batch.y[0].tolist(), batch.weight[0].tolist(), strict=True):
        p = [math.exp(v) for v in row]
        total += weight * (-math.log(p[y] / sum(p)) - math.log(sum(p[: len(task.classes)]) / sum(p)))
    assert float(PROMPTS.loss("cross-entropy", logits, batch)[0]) == pytest.approx(total, rel=1e-12)
    assert float(batch.mean(PROMPTS.losses(logits, batch.y))[0]) == pytest.approx(total, rel=1e-12)
    with pytest.raises(FedvlmError, match="a loss of its own"):
        PROMPTS.loss("contrastive", logits, batch)


def test_outsiders_take_part_in_detection_and_not_in_the_answer(double):
    task, data = example("outsiders")
    params, x = with_client_axis(PROMPTS.init(task, 1)), data.x[None, :6]
    every = task.scale * x @ together(PROMPTS.encode(task, params)).mT
    torch.testing.assert_close(PROMPTS.logits(task, params, x), every[..., : len(task.classes)])
    torch.testing.assert_close(PROMPTS.detection_scores(task, params, x)["mcm"], every.softmax(-1)[..., :-3].amax(-1))


@pytest.mark.parametrize("fusion, name", [(0.0, "own"), (1.0, "context")])
def test_fused_prompts_are_mixtures(double, fusion, name):
    task, _ = example("outsiders")
    params = {k: torch.randn_like(v) for k, v in with_client_axis(PROMPTS.init(task, 1)).items()}
    other = replace(PROMPTS, fusion=fusion)
    alone = params | {"own": params[name], "context": params[name]}
    torch.testing.assert_close(other.class_vectors(task, params), PROMPTS.class_vectors(task, alone))


def test_without_noise_and_exploration_it_is_plain_training(double):
    """With everything evened out, the robust step is a step on the mean loss."""
    _, data = example("outsiders")
    plain = play(focoop(Sgd(**RULES)), data, 6, rounds=1).state.shared
    even = play(focoop(Bdro(**RULES, ascent_steps=0, sigma=0.0, temperature=1e9)), data, 6, rounds=1).state.shared
    hard = play(focoop(Bdro(**RULES, ascent_steps=0, sigma=0.0, temperature=0.1)), data, 6, rounds=1).state.shared
    torch.testing.assert_close(plain["context"], even["context"], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(plain["context"], hard["context"], rtol=1e-3, atol=1e-6)


def robust(rule: Bdro, task, data, params, batch, model=PROMPTS):
    gradients = rule.robust_gradients(Model(model, task), ["context", "outsiders"], data, Means(data))
    return gradients(params, batch)


@pytest.mark.parametrize("space", ["features", "parameters"])
def test_exploration_goes_where_the_loss_is_higher(double, space):
    task, data = example("outsiders")
    data = replace(data, bounds=data.bounds[:1], ids=data.ids[:1])
    params, batch = copy_per_client(PROMPTS.init(task, 1), 1), next(data.batches(8))

    def found(steps: int) -> float:
        rule = Bdro(penalty=5.0, outsider_penalty=5.0, temperature=1e9, sigma=1e-4, ascent_steps=steps, space=space)
        return float(robust(rule, task, data, params, batch)[0][0])

    assert found(8) > found(2) > found(0)


@pytest.mark.parametrize("space", ["features", "parameters"])
def test_a_robust_step_by_hand(double, space):
    """The worst case of the classes' prompts in two repetitions, that of the outsiders', then the soft maximum's slope."""
    task, data = example("outsiders")
    data = replace(data, bounds=data.bounds[:1], ids=data.ids[:1])
    params, batch = copy_per_client(PROMPTS.init(task, 1), 1), next(data.batches(4))
    one, other = (5.0, 7.0) if space == "features" else (5e3, 7e3)  # large enough for full steps
    rule = Bdro(ascent_steps=2, penalty=one, outsider_penalty=other, temperature=0.3, l1=1e-3, sigma=0.05, space=space)
    value, slopes = robust(rule, task, data, params, batch)

    def losses(given: dict, shift: dict) -> torch.Tensor:
        if space == "parameters":
            logits = PROMPTS.train_logits(task, given | {k: given[k] + v for k, v in shift.items()}, batch)
        else:
            text = PROMPTS.encode(task, given)
            text = torch.cat([text[k] + shift.get(k, 0) for k in ("context", "outsiders")], 1)
            logits = task.scale * batch.x @ text.mT
        return PROMPTS.losses(logits, batch.y)[0]

    spaces = {"parameters": params, "features": PROMPTS.encode(task, params)}
    start, away = noise({k: spaces[space][k] for k in ("context", "outsiders")}, data, 0.05), {}
    for name, hold in (("context", one), ("outsiders", other)):
        away[name] = start[name]
        for _ in range(2):
            step = away[name].clone().requires_grad_()
            (up,) = torch.autograd.grad(losses(params, away | {name: step}).mean(), step)
            away[name] = (up.abs() - 0.001).clamp(min=0) * up.sign() / (2 * hold)
    leaf = params["own"].clone().requires_grad_()
    each = losses(params | {"own": leaf}, away)
    soft = 0.3 * (each / 0.3).exp().mean().log()
    apart = sum(
        h * away[k].square().sum() + 0.001 * away[k].abs().sum() for k, h in (("context", one), ("outsiders", other))
    )
    torch.testing.assert_close(value[0], (soft - apart).detach())
    torch.testing.assert_close(slopes[list(params).index("own")], torch.autograd.grad(soft, leaf)[0])


def test_noise_is_a_clients_own(double):
    """The same whoever stands beside it, another each round."""
    _, data = example("outsiders")
    one = noise({"context": torch.zeros(6, 5, 2, 8)}, data, 1.0)["context"]
    alone = replace(data, bounds=data.bounds[2:3], ids=data.ids[2:3])
    assert torch.equal(one[2:3], noise({"context": torch.zeros(1, 5, 2, 8)}, alone, 1.0)["context"])
    later = noise({"context": torch.zeros(6, 5, 2, 8)}, replace(data, round=1), 1.0)["context"]
    assert not torch.equal(one, later) and abs(float(one.std()) - 1) < 0.2


def test_classes_are_averaged_by_who_holds_them(double):
    draw = torch.Generator().manual_seed(1)
    replies, before = torch.randn(3, 4, 2, 5, generator=draw), torch.randn(4, 2, 5, generator=draw)
    counts = torch.tensor([[3.0, 0, 0, 1], [1, 2, 0, 0], [0, 0, 0, 5]])
    found = mean_by_class(replies, counts, before)
    torch.testing.assert_close(found[0], (3 * replies[0, 0] + replies[1, 0]) / 4)
    torch.testing.assert_close(found[1], replies[1, 1])
    torch.testing.assert_close(found[2], before[2])  # nobody has it
    torch.testing.assert_close(found[3], (replies[0, 3] + 5 * replies[2, 3]) / 6)


def test_clients_say_how_many_they_hold(double):
    _, data = example("outsiders")
    method = focoop()
    reply = Cohort(Stacked(method, data, 6), ABLE, 1).ask("train", Message(method.initial))
    for i, row in zip(reply.ids, reply.values["class_counts"], strict=True):
        low, high = data.bounds[i, :2]
        assert row.tolist() == np.bincount(data.y[low:high].numpy(), minlength=5).tolist()


def planted(seed: int):
    """20 classes; 3 clients × 40 outsiders, of which 30 lie near classes and the rest nowhere near."""
    draw = torch.Generator().manual_seed(seed)
    classes = torch.randn(20, 2, 16, generator=draw)
    away = 6 + torch.randn(120, 2, 16, generator=draw)
    like = torch.randperm(120, generator=draw)[:30]
    away[like] = classes[torch.arange(30) % 20] + 0.3 * torch.randn(30, 2, 16, generator=draw)
    return classes, away, set(like.tolist())


@pytest.mark.parametrize("seed", range(5))
def test_class_like_outsiders_are_found(double, seed):
    classes, away, like = planted(seed)
    plan = transport_plan(classes, away, relaxation=0.1)
    torch.testing.assert_close(plan.sum(1), torch.full((20,), 1 / 20), rtol=0, atol=1e-12)
    found = set(plan.sum(0).sort(descending=True).indices[:30].tolist())
    assert len(found & like) >= 29


def test_the_server_drops_them_and_draws_classes_near(double):
    classes, away, like = planted(1)
    before = {"context": classes, "outsiders": away[:40]}
    replies = Replies(np.arange(3), {}, {"outsiders": away.view(3, 40, 2, 16)})
    merge = Transport(class_like=0.25, retain=0.5)
    after = merge.calibrated(before, replies, Cohort(None, np.arange(3), 1))  # type: ignore[arg-type]
    kept = [int((away == row).flatten(1).all(1).nonzero()[0]) for row in after["outsiders"]]
    versions = {u: {u, u + 40, u + 80} for u in range(40)}
    assert [k % 40 for k in kept] == list(range(40)), "each before its own noun"
    assert all(k not in like or versions[u] <= like for u, k in enumerate(kept))
    apart = torch.cdist(classes.flatten(1), away[sorted(like)].flatten(1)).min(1).values
    nearer = torch.cdist(after["context"].flatten(1), away[sorted(like)].flatten(1)).min(1).values
    assert (nearer < apart).all() and after["context"].norm() > 0.7 * classes.norm()


def test_calibration_is_a_barycentre(double):
    draw = torch.Generator().manual_seed(3)
    classes, away = torch.randn(2, 1, 3, generator=draw), torch.randn(4, 1, 3, generator=draw)
    plan = torch.tensor([[0.1, 0.3, 0.1, 0.0], [0.0, 0.0, 0.0, 0.5]])
    found = drawn_to_barycentre(classes, away, plan, torch.tensor([0, 1]), 0.6)
    torch.testing.assert_close(found[0], 0.6 * classes[0] + 0.4 * (0.25 * away[0] + 0.75 * away[1]))
    torch.testing.assert_close(found[1], classes[1])  # matched with none of the seemly


def test_each_noun_keeps_its_least_class_like_version():
    mass = torch.tensor([[0.5, 0.1, 0.2], [0.1, 0.3, 0.3]])
    assert least_per_noun(mass).tolist() == [3, 1, 2]


def test_the_least_of_all_contexts_can_be_kept_as_printed(double):
    """Eq. 11: the U of all K·U with the least mass, whatever their noun."""
    draw = torch.Generator().manual_seed(1)
    shared = {"context": torch.randn(3, 2, 4, generator=draw)}
    sets = torch.randn(4, 5, 2, 4, generator=draw)
    mass = transport_plan(shared["context"], sets.flatten(0, 1), Transport.relaxation).sum(0)
    told = argparse.Namespace(acted=lambda **_: None)
    replies = argparse.Namespace(shared={"outsiders": sets})
    found = Transport(kept="all").calibrated(shared, replies, told)["outsiders"]
    assert torch.equal(found, sets.flatten(0, 1)[mass.sort(stable=True).indices[:5]])
    assert not torch.equal(found, Transport().calibrated(shared, replies, told)["outsiders"])


@pytest.mark.parametrize("change", [{"class_like": 0.0}, {"class_like": 1.0}, {"retain": 0.0}, {"relaxation": 50.0}])
def test_the_server_is_finite_whatever_it_is_told(double, change):
    _, data = example("outsiders")
    state = play(focoop(merge=Transport(**change)), data, 6).state
    assert all(v.isfinite().all() for v in state.shared.values())
    assert state.shared["outsiders"].shape == (3, 2, 8)


def test_all_outsiders_alike_is_no_division_by_zero(double):
    same = torch.ones(4, 2, 3)
    assert transport_plan(same, same, 0.1).isfinite().all()


def test_one_client_with_one_example_of_one_class(double):
    _, data = example("outsiders")
    found = play(focoop(), data, 6, ids=np.array([3]))
    assert all(v.isfinite().all() for part in (found.state.shared, found.rows, found.scores) for v in part.values())


def test_what_does_not_go_together_is_refused_in_words(double):
    task = example("head")[0]
    with pytest.raises(FedvlmError, match="works on shared parameters named context, outsiders"):
        Method.build(registry.find("adapter", "head")(), Sgd(), Transport(), task)
    with pytest.raises(FedvlmError, match="does not go with adapter=head"):
        Method.build(registry.find("adapter", "head")(), Contrast(), registry.find("merge", "mean")(), task)
    with pytest.raises(FedvlmError, match="count=100 outsider prompts, and there are 4 nouns"):
        Outsiders(context=2).init(example("outsiders")[0], 1)


def test_a_contrast_of_nothing_is_plain_training(double):
    """μ = 0; and with μ the shared prompt comes nearer to the frozen model's words."""
    task, data = example("lowrank")
    adapter = registry.find("adapter", "lowrank")(context=2)

    def shared(local):
        method = Method.build(adapter, local, registry.find("merge", "mean")(), task, 5)
        return play(method, data, 6, rounds=2).state.shared

    torch.testing.assert_close(shared(Contrast(**RULES, contrast=0.0)), shared(Sgd(**RULES)))
    gentle = RULES | {"lr": 0.02}

    def near(local) -> float:
        private = {k: v for k, v in adapter.init(task, 5).items() if k in adapter.private}
        params = with_client_axis(shared(local) | private)
        return float((adapter.class_vectors(task, params)[0] * task.names()).sum(-1).mean())

    assert near(Contrast(**gentle, contrast=20.0)) > near(Sgd(**gentle)) + 1e-3


def test_batches_of_padding_weigh_nothing(double):
    """The soft maximum leaves padding out."""
    task, data = example("outsiders")
    params = copy_per_client(PROMPTS.init(task, 1), 1)
    one = replace(data, bounds=data.bounds[:1], ids=data.ids[:1])
    batch = next(one.batches(4))
    wide = Batch(
        torch.cat([batch.x, batch.x[:, :2]], 1), torch.cat([batch.y, batch.y[:, :2]], 1),
        torch.cat([batch.weight, torch.zeros(1, 2)], 1), batch.step,
    )  # fmt: skip
    torch.testing.assert_close(*(robust(Bdro(), task, one, params, b) for b in (batch, wide)))
    assert NOUNS[:3] == task.nouns[:3]


def test_outsiders_get_their_nouns_after_another_method_has_run(images, monkeypatch):
    """The pool of a method without nouns once served for one with candidates=0: False is 0."""
    monkeypatch.setattr("fedvlm.data.pool.nouns", lambda: ["anvil", "bird", "cloud", "treaty", "fruit", "moss"])
    given = {"data": str(images), "template": "a sketch of a {}"}
    pools = Pools()
    assert pools.load(resolve("promptfl", given)).task.nouns == ()
    far = pools.load(resolve("focoop", given | {"count": 2})).task.nouns
    assert set(far) == {"anvil", "bird", "cloud", "treaty", "fruit", "moss"}
    assert far.index("bird") > 2 and far.index("fruit") > 2  # class names are not far


def test_a_run_from_images_to_a_prediction(images, tmp_path, monkeypatch):
    monkeypatch.setattr("fedvlm.data.pool.nouns", lambda: ["anvil", "cloud", "treaty", "moss", "anthem"])
    given = {"data": str(images), "unseen": "noto", "rounds": 2, "count": 3, "context": 2, "shots": 2, "lr": 0.1}
    given |= {"outsiders": str(images / "noto" / "bird"), "template": "an image of a {}"}
    setup = resolve("focoop", given)
    run = train.train(PlannedRun(setup, Pools().load(setup), tmp_path / "run"))
    record = run.rounds()[-1]
    assert {"acc", "auroc", "fpr95", "effects", "global_share"} <= record.keys() and record["acc"] == record["P"]
    assert 0 < {e.name: e.last for e in effects(run)}["global_share"] < 1
    assert record["detection"]["newcomer"]["auroc"] <= 1 and run.record.data.nouns
    picture = next((images / "noto" / "bird").iterdir())
    assert len(export(run, tmp_path / "out")) >= 3
    read, plain = [], TextTower.features
    monkeypatch.setattr(TextTower, "features", lambda *args, **more: read.append(args[1]) or plain(*args, **more))
    for client in ("", "twemoji"):
        model = from_run(run, client)
        assert model.predict([picture])[0]
        once = len(read)
        assert model.predict([picture] * 3, batch=1)[0] == model.predict([picture])[0]
        assert len(read) == once, "words are read once for all pictures"


@pytest.mark.parametrize("chunk", [6, 2, 1])
def test_an_evaluation_reads_every_prompt_once(double, monkeypatch, chunk):
    """Of both views, with outsiders to be told: own contexts a client each, and what is shared once."""
    _, data = example("outsiders")
    method, read = focoop(), []
    plain = TextTower.features

    def count(tower, plan, context, *rest, **more):
        read.append(max(len(context), 1) * len(plan.ends))
        return plain(tower, plan, context, *rest, **more)

    engine = Stacked(method, replace(data, extras={"outsiders": Extra(data.x[:9])}), chunk)
    state = method.round(method.init(6), Cohort(engine, ABLE, 1))
    monkeypatch.setattr(TextTower, "features", count)
    Cohort(engine, np.arange(6), 1).ask("score", state.message())
    assert sum(read) == 5 + 3 + 6 * 5  # the shared view's classes, the outsiders, each client's own classes
