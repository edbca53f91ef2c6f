"""Prompt methods: what they must become, and their equations by brute force or in closed form."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ABLE, close, example, play, small_adapter
from torch.nn import functional as F

from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Batch
from fedvlm.core.descent import by_autograd
from fedvlm.core.model import Model
from fedvlm.core.state import Message, State, with_client_axis
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.experts import Experts
from fedvlm.parts.adapters.factored import Factored, factors
from fedvlm.parts.adapters.generated import Generated
from fedvlm.parts.adapters.groups import Groups
from fedvlm.parts.adapters.plot import Plot
from fedvlm.parts.adapters.proda import Proda, upper_bound
from fedvlm.parts.adapters.prompt import Prompt
from fedvlm.parts.adapters.prompt_memory import PromptMemory
from fedvlm.parts.local.consistent import Consistent
from fedvlm.parts.local.experts import KNOWN, POOL, NearestExperts, nearest_prompts
from fedvlm.parts.local.factored import Refactor
from fedvlm.parts.local.groups import GroupSampling, gumbel, similarity
from fedvlm.parts.local.knowledge import Knowledge
from fedvlm.parts.local.memory import Memorise
from fedvlm.parts.local.orthogonal import Orthogonal, overlap
from fedvlm.parts.local.prograd import ProGrad, inner, zero_shot_divergence
from fedvlm.parts.local.sgd import Sgd
from fedvlm.parts.merge.experts import PromptPool
from fedvlm.parts.merge.mean import Mean
from fedvlm.parts.merge.trajectory import Trajectory
from fedvlm.privacy.descent import PrivateDescent
from fedvlm.privacy.mechanism import Privacy
from fedvlm.rounds.method import Method
from fedvlm.training.privacy_plan import example_refusal

WORDS = Prompt(context=2)
RULES = {"lr": 0.05, "batch": 4, "epochs": 1, "momentum": 0.5}


def moved(params, by=0.3, clients=1):
    """Away from where everything starts, where much is zero or alike; each client by itself."""
    draw = torch.Generator().manual_seed(9)
    return {k: v + by * torch.randn(clients, *v.shape, generator=draw).to(v) for k, v in params.items()}


def batch_of(data, clients=1, examples=4, step=0):
    rows = torch.arange(clients * examples).view(clients, examples)
    return Batch(data.x[rows], data.y[rows], torch.full((clients, examples), 1 / examples), step)


def method_of(adapter, local, merge=None, **rules):
    task, data = example(adapter)
    return Method.build(adapter, local(**(RULES | rules)), merge or Mean(), task, seed=5), data


def one_round(method, data):
    """The state and the cohort after a round of clients side by side."""
    cohort = Cohort(Stacked(method, data, 6), ABLE, 1, rounds=2)
    return method.round(method.init(6), cohort), cohort


# KgCoOp


def test_knowledge_is_the_squared_distance_to_the_frozen_class_features(double):
    task, data = example(WORDS)
    model, batch = Model(WORDS, task), batch_of(data, clients=2)
    params = moved(WORDS.init(task, 3), clients=2)
    more, _ = Knowledge(knowledge=3.0).gradients(model, Message({}), {})(params, batch)
    plain, _ = Knowledge(knowledge=0.0).gradients(model, Message({}), {})(params, batch)
    cosine = (WORDS.class_vectors(task, params) * task.names()).sum(-1)
    torch.testing.assert_close(more - plain, 3.0 * (2 - 2 * cosine).mean(-1))


def test_knowledge_of_weight_0_is_promptfl_and_a_large_one_keeps_near_the_phrases(double):
    method, data = method_of(WORDS, Knowledge, knowledge=0.0)
    state, cohort = one_round(method, data)
    plain, _ = one_round(method_of(WORDS, Sgd)[0], data)
    close(state.shared, plain.shared)
    assert max(cohort.effects["pull"]) < 1e-9
    strong, cohort = one_round(method_of(WORDS, Knowledge, knowledge=50.0)[0], data)
    assert min(cohort.effects["pull"]) > 0.1
    far, near = (WORDS.class_vectors(method.task, with_client_axis(s.shared)) for s in (plain, strong))
    assert ((near - method.task.names()).norm() < (far - method.task.names()).norm()).item()


# ProGrad


def test_a_gradient_loses_what_points_against_the_frozen_model(double):
    task, data = example(WORDS)
    model, batch = Model(WORDS, task), batch_of(data, clients=12, examples=2)
    batch.y[4:] = (batch.y[4:] + 2) % 5  # most clients have labels that the frozen model does not believe
    params = moved(WORDS.init(task, 3), by=0.1, clients=12)
    _, plain = model.gradients("cross-entropy")(params, batch)
    _, known = by_autograd(lambda now, b: zero_shot_divergence(model, now, b))(params, batch)
    _, kept = ProGrad().gradients(model, Message({}), {})(params, batch)
    conflict = inner(plain, known) < 0
    assert conflict.any() and not conflict.all()
    length = inner(known, known).sqrt() * inner(plain, plain).sqrt()
    expected = torch.where(conflict, 0, inner(plain, known) / length)
    torch.testing.assert_close(inner(kept, known) / length, expected, atol=1e-12, rtol=1e-9)
    same, found = plain[0][~conflict], kept[0][~conflict]
    torch.testing.assert_close(same, found)
    # what is kept and what was removed are orthogonal and add up
    removed = inner(plain, plain) - inner(kept, kept)
    torch.testing.assert_close(removed[conflict], (inner(plain, known) ** 2 / inner(known, known))[conflict])


def test_the_divergence_is_torchs(double):
    task, data = example(WORDS)
    batch, params = batch_of(data), moved(WORDS.init(task, 3))
    frozen = task.scale * batch.x[0] @ task.names().double().T
    learned = WORDS.logits(task, params, batch.x)[0]
    expected = F.kl_div(learned.log_softmax(-1), frozen.log_softmax(-1), reduction="batchmean", log_target=True)
    torch.testing.assert_close(zero_shot_divergence(Model(WORDS, task), params, batch)[0], expected)


def test_without_projection_prograd_is_promptfl(double):
    method, data = method_of(WORDS, ProGrad, projection=0.0)
    state, cohort = one_round(method, data)
    close(state.shared, one_round(method_of(WORDS, Sgd)[0], data)[0].shared)
    assert cohort.effects["removed"] == [0.0] * 5
    mislabelled = replace(data, y=(data.y + torch.arange(len(data.y)) % 2) % 5)
    _, cohort = one_round(method_of(WORDS, ProGrad)[0], mislabelled)
    acted = [(c > 0) == (r > 0) for c, r in zip(cohort.effects["conflicts"], cohort.effects["removed"], strict=True)]
    assert all(acted) and 0 < np.mean(cohort.effects["conflicts"]) < 1


# PromptSRC


def test_consistency_by_brute_force(double):
    """With tokens that are far from the start, so that all three terms act."""
    adapter = small_adapter("independent")
    task, data = example(adapter)
    params, batch = moved(adapter.init(task, 3), by=0.5), batch_of(data)
    features, text = adapter.features(task, params, batch.x)[0], adapter.class_vectors(task, params)[0]
    frozen = F.normalize(task.tower.image.features(batch.x), dim=-1)[0]
    logits, zero_shot = task.scale * features @ text.T, task.scale * frozen @ task.names().T
    parts = (
        10 * F.l1_loss(features, frozen),
        25 * F.l1_loss(text, task.names()),
        F.kl_div(logits.log_softmax(-1), zero_shot.log_softmax(-1), reduction="sum", log_target=True) / logits.numel(),
    )
    assert min(parts) > 1e-3
    found, _ = Consistent().gradients(Model(adapter, task), Message({}), {})(params, batch)
    torch.testing.assert_close(found[0], F.cross_entropy(logits, batch.y[0]) + sum(parts))


def test_without_terms_consistency_is_plain_training_and_text_prompts_have_no_image_term(double):
    none = {"image_weight": 0.0, "text_weight": 0.0, "logit_weight": 0.0}
    for adapter in (small_adapter("independent"), WORDS):
        method, data = method_of(adapter, Consistent, **none)
        close(one_round(method, data)[0].shared, one_round(method_of(adapter, Sgd)[0], data)[0].shared)
    method, data = method_of(WORDS, Consistent, **(none | {"image_weight": 7.0}))
    assert max(one_round(method, data)[1].effects["pull"]) < 1e-9
    method, data = method_of(WORDS, Consistent)
    assert min(one_round(method, data)[1].effects["pull"]) > 0.01
    with pytest.raises(FedvlmError, match="use adapter=independent or prompt"):
        method_of(small_adapter("gallop"), Consistent)


def test_the_mean_over_rounds_is_gaussian_and_only_the_last_round_has_it(double):
    method, data = method_of(WORDS, Sgd, Trajectory(middle=0.5, spread=0.3))
    engine, state, seen = Stacked(method, data, 6), method.init(6), []
    for at in range(1, 5):
        cohort = Cohort(engine, ABLE, at, rounds=4)
        state = method.round(state, cohort)
        seen.append(state.shared["context"] if at < 4 else state.server["trajectory.context"])
    plain = play(method_of(WORDS, Sgd)[0], replace(data, rounds=4), 6, rounds=4).state.shared["context"]
    weights = [math.exp(-((t / 4 - 0.5) ** 2) / (2 * 0.3**2)) for t in range(1, 5)]
    mean = sum(w * v for w, v in zip(weights, [*seen[:3], plain], strict=True)) / sum(weights)
    torch.testing.assert_close(state.shared["context"], mean)
    assert state.shared["context"].data_ptr() != state.server["trajectory.context"].data_ptr()  # or it cannot be saved
    assert cohort.effects["weight"] == [pytest.approx(weights[3] / sum(weights))]


def test_a_narrow_mean_does_not_underflow(double):
    method, data = method_of(WORDS, Sgd, Trajectory(middle=0.0, spread=1e-3))
    state: State = method.init(6)
    for at in (1, 2):
        state = method.round(state, Cohort(Stacked(method, data, 6), ABLE, at, rounds=2))
    assert state.shared["context"].isfinite().all()


# PLOT


def test_plot_is_balanced_transport(double):
    """The plan in logarithms, by Sinkhorn's own iteration until both marginals are met."""
    adapter = Plot(context=2, global_prompts=3, iterations=2000)
    task, data = example(adapter)
    params, x = moved(adapter.init(task, 3), by=1.0), data.x[None, :4].double()
    found, text = adapter.logits(task, params, x), adapter.prompts(task, params)
    for n, c in ((0, 0), (3, 4)):
        cosines = x[0, n, 1:] @ text[0, :, c].T
        f, g = torch.zeros(6, 1), torch.zeros(1, 3)
        for _ in range(500):
            f = -math.log(6) - (g - (1 - cosines) / 0.1).logsumexp(1, keepdim=True)
            g = -math.log(3) - (f - (1 - cosines) / 0.1).logsumexp(0, keepdim=True)
        plan = (f + g - (1 - cosines) / 0.1).exp()
        torch.testing.assert_close(plan.sum(1), torch.full((6,), 1 / 6))
        torch.testing.assert_close(found[0, n, c], task.scale * (plan * cosines).sum(), atol=2e-3, rtol=0)


def test_plot_of_one_prompt_is_promptfl_on_the_mean_patch(double):
    adapter = Plot(context=2, global_prompts=1)
    task, data = example(adapter)
    params, x = moved(adapter.init(task, 3)), data.x[None, :4].double()
    found = adapter.logits(task, params, x)
    torch.testing.assert_close(found, WORDS.logits(task, {"context": params["context"][:, 0]}, x[:, :, 1:].mean(2)))
    assert adapter.diagnose(task, params, torch.empty(0))["prompt_cosine"].tolist() == [1.0]


def test_the_mean_cosine_of_prompts(double):
    adapter = Plot(context=2, global_prompts=3)
    task, _ = example(adapter)
    params = moved(adapter.init(task, 3), by=1.0, clients=2)
    text = adapter.prompts(task, params)
    pairs = [(text[:, i] * text[:, j]).sum(-1).mean(-1) for i, j in ((0, 1), (0, 2), (1, 2))]
    torch.testing.assert_close(
        adapter.diagnose(task, params, torch.empty(0))["prompt_cosine"], torch.stack(pairs).mean(0)
    )


# ProDA


def test_the_bound_by_covariances_and_by_draws(double):
    """hᵀA_cy h with the covariance of all class features; the mean loss over draws from their distribution is below it."""
    task, data = example(WORDS)
    draw = torch.Generator().manual_seed(3)
    x, y = data.x[:6].double(), data.y[:6]
    text = F.normalize(task.names().double() + 0.3 * torch.randn(7, 5, 16, generator=draw), dim=-1)
    found = upper_bound(task.scale * torch.einsum("nd,mcd->nmc", x, text)[None], y[None])[0]
    centred, mean = (text - text.mean(0)).flatten(1), text.mean(0)
    covariance = (centred.T @ centred / 7).view(5, 16, 5, 16)
    for n, c in ((0, 0), (2, 3), (5, 1)):
        t = int(y[n])
        a = covariance[c, :, c] + covariance[t, :, t] - covariance[c, :, t] - covariance[t, :, c]
        torch.testing.assert_close(found[n, c], task.scale * x[n] @ mean[c] + task.scale**2 / 2 * x[n] @ a @ x[n])
    drawn = mean + (torch.randn(4000, 7, generator=draw) @ centred / math.sqrt(7)).view(-1, 5, 16)
    losses = F.cross_entropy((task.scale * drawn @ x.T).transpose(1, 2).reshape(-1, 5), y.repeat(4000))
    bound = F.cross_entropy(found, y)
    assert F.cross_entropy(task.scale * x @ mean.T, y) < losses < bound


def test_proda_of_one_prompt_is_promptfl(double):
    adapter = Proda(context=2, global_prompts=1)
    states = [one_round(*method_of(a, r))[0].shared for a, r in ((adapter, Orthogonal), (WORDS, Sgd))]
    torch.testing.assert_close(states[0]["context"][0], states[1]["context"])


def test_a_step_trains_some_prompts_and_other_rounds_others(double):
    adapter = Proda(context=2, global_prompts=6, sampled=2)
    task, data = example(adapter)
    params, trained = with_client_axis(adapter.init(task, 3)), []
    for step in range(8):
        batch = batch_of(data, step=step)
        loss = by_autograd(lambda now, b: adapter.loss("cross-entropy", adapter.train_logits(task, now, b), b))
        (slope,) = loss(params, batch)[1]
        trained.append((slope[0].flatten(1).norm(dim=1) > 0).tolist())
    assert all(sum(t) == 2 for t in trained) and all(map(any, zip(*trained, strict=True)))
    method, data = method_of(adapter, Orthogonal, orthogonality=0.0, epochs=1, batch=30)
    engine = Stacked(method, data, 6)
    start, seen = method.init(6), []
    for at in (1, 2):  # with a single step, on the same model
        after = method.round(start, Cohort(engine, np.array([0]), at, rounds=2)).shared["context"]
        seen.append(((after - start.shared["context"]).flatten(1).norm(dim=1) > 1e-9).tolist())
    assert seen[0] != seen[1] and sum(seen[0]) == sum(seen[1]) == 2


def test_orthogonality_is_the_mean_over_pairs_and_pushes_prompts_apart(double):
    adapter = Proda(context=2, global_prompts=3)
    task, data = example(adapter)
    params, batch = moved(adapter.init(task, 3), clients=2), batch_of(data, clients=2)
    nameless = adapter.nameless(task, params)
    pairs = [(nameless[:, i] * nameless[:, j]).sum(-1).abs() for i in range(3) for j in range(3) if i != j]
    torch.testing.assert_close(overlap(Model(adapter, task), params), torch.stack(pairs).mean(0))
    more, plain = (
        Orthogonal(orthogonality=w).gradients(Model(adapter, task), Message({}), {})(params, batch)[0] for w in (0.5, 0)
    )
    torch.testing.assert_close(more - plain, 0.5 * torch.stack(pairs).mean(0))
    apart = []
    for weight in (0.0, 20.0):
        method, data = method_of(adapter, Orthogonal, orthogonality=weight)
        state, cohort = one_round(method, data)
        assert all(0 < o <= 1 for o in cohort.effects["overlap"])
        apart.append(float(overlap(method.model, with_client_axis(state.shared))))
    assert apart[1] < apart[0]


# FedTPG


def test_the_context_is_attention_over_class_names(double):
    adapter = Generated(context=2, heads=2)
    task, _ = example(adapter)
    params = moved(adapter.init(task, 3))
    one = {k: v[0] for k, v in params.items()}
    names = task.names().double()
    key, value = names @ one["key"].T, names @ one["value"].T
    heads = [
        F.scaled_dot_product_attention(one["query"][None, :, at], key[None, :, at], value[None, :, at])[0]
        for at in (slice(0, 4), slice(4, 8))
    ]
    inner_layer = F.layer_norm(torch.cat(heads, -1), (8,)) @ one["hidden.weight"].T + one["hidden.bias"]
    context = inner_layer.relu() @ one["out.weight"].T + one["out.bias"]
    found = adapter.class_vectors(task, params)
    torch.testing.assert_close(found, WORDS.class_vectors(task, {"context": context[None, None]}))
    backwards = task._replace(classes=task.classes[::-1], text=task.text.flip(0))
    torch.testing.assert_close(adapter.class_vectors(backwards, params), found.flip(1))  # a set has no order
    half = task.subset(slice(0, 2))
    assert (adapter.class_vectors(half, params) - found[:, :2]).abs().max() > 1e-3  # another set, another context
    assert 0 < adapter.diagnose(task, params, torch.empty(0))["selectivity"] < 1


def test_without_its_last_layer_the_generator_is_one_vector_of_promptfl(double):
    adapter = Generated(context=2, heads=2)
    task, data = example(adapter)
    params = moved(adapter.init(task, 3))
    params["out.weight"] = torch.zeros_like(params["out.weight"])
    alike = params["out.bias"][:, None, None].expand(-1, 1, 2, -1)
    x = data.x[None, :5]
    torch.testing.assert_close(adapter.logits(task, params, x), WORDS.logits(task, {"context": alike}, x))
    with pytest.raises(FedvlmError, match="heads=3 does not divide"):
        Generated(heads=3).init(task, 3)
    with pytest.raises(FedvlmError, match="leave specific="):
        Generated(specific=True)


# FedMGP


GROUPS = Groups(context=2, layers=2)


def test_groups_are_averaged_and_their_likeness_is_added(double):
    """Group by group; a padded example changes nothing."""
    task, data = example(GROUPS)
    params, batch = moved(GROUPS.init(task, 3), clients=2), batch_of(data, clients=2)
    every = [torch.cat([params[k] for k in pair], 1) for pair in GROUPS.exchangeable]
    images, texts = [], []
    for g in range(5):
        tokens = task.tower.image.features(batch.x, tokens=every[1][:, g : g + 1])
        images.append(F.normalize(tokens, dim=-1))
        texts.append(task.tower.text.features(task.tower.text.plan(task.classes, 2), every[0][:, g : g + 1]))
    expected = task.scale * torch.stack([f @ t.mT for f, t in zip(images, texts, strict=True)]).mean(0)
    torch.testing.assert_close(GROUPS.logits(task, params, batch.x), expected)
    pairs = [(i, j) for i in range(5) for j in range(5) if i != j]
    term = sum((part[i] * part[j]).sum(-1).mean(-1) for part in (images, texts) for i, j in pairs) / len(pairs)

    def loss(weight, batch):
        return GroupSampling(diversity=weight).gradients(Model(GROUPS, task), Message({}), {})(params, batch)[0]

    torch.testing.assert_close(loss(0.7, batch) - loss(0.0, batch), 0.7 * term)
    rows = torch.arange(8).view(2, 4)[:, [0, 1, 2, 3, 3]]
    padded = Batch(data.x[rows], data.y[rows], torch.tensor([[0.25] * 4 + [0.0]] * 2))
    torch.testing.assert_close(loss(0.7, padded), loss(0.7, batch))


def test_groups_are_drawn_in_proportion_to_their_similarity(double):
    _, data = example(GROUPS)
    rule, rounds = GroupSampling(temperature=0.5), 4000
    weight = torch.tensor([0.9, -0.3, 0.2, 0.0]) / rule.temperature
    first = torch.zeros(4)
    for at in range(rounds // len(data)):
        drawn = weight + gumbel(replace(data, round=at), 4)
        first += torch.bincount(drawn.argmax(1), minlength=4)
    torch.testing.assert_close(first / first.sum(), weight.softmax(0), atol=0.03, rtol=0)


def test_what_is_sent_is_a_group_and_the_others_stay(double):
    """A client's groups are the same set before and after the choice; at a low temperature the most similar are sent."""
    rule = GroupSampling(lr=1e-12, temperature=1e-6)
    task, data = example(GROUPS)
    model = Model(GROUPS, task)
    everything = moved(GROUPS.init(task, 3), clients=6)
    sent = {k: v[0] for k, v in moved(GROUPS.init(task, 3), by=0.5).items() if k in ("context", "tokens")}
    before = {k: v.clone() for k, v in everything.items()}
    data = Stacked(method_of(GROUPS, Sgd)[0], data, 6).at(np.array([0, 2, 4, 1, 3, 5]), 1)
    found = rule.fit(model, everything, Message(sent), {}, data)
    similar = torch.stack([similarity(before, sent, *pair) for pair in GROUPS.exchangeable]).mean(0)
    best = similar.argsort(1, descending=True)[:, :2]
    for shared, own in GROUPS.exchangeable:
        old, new = (torch.cat([p[shared], p[own]], 1) for p in (before, everything))
        for i in range(6):
            came_from = [int((old[i] - group).flatten(1).norm(dim=1).argmin()) for group in new[i]]
            assert sorted(came_from) == list(range(5)) and set(came_from[:2]) == set(best[i].tolist())
            assert all(came_from[g] == g for g in range(2) if g in best[i])  # it keeps its place in the mean
            torch.testing.assert_close(new[i], old[i, came_from], atol=1e-9, rtol=0)
    torch.testing.assert_close(found["exchanged"], (best >= 2).double().mean(1))
    assert 0 < found["exchanged"].mean() <= 1


def test_groups_without_choice_are_a_fixed_split_and_the_term_makes_them_differ(double):
    """At a temperature at which the most similar groups always win: those that were received and hardly trained."""
    method, data = method_of(GROUPS, GroupSampling, diversity=0.0, temperature=1e-9, lr=1e-3)
    state, cohort = one_round(method, data)
    assert cohort.effects["exchanged"] == [0.0] * 5
    close(state.shared, one_round(method_of(GROUPS, Sgd, lr=1e-3)[0], data)[0].shared)
    apart = [
        np.mean(one_round(method_of(GROUPS, GroupSampling, diversity=w)[0], data)[1].effects["group_cosine"])
        for w in (0.0, 10.0)
    ]
    assert apart[1] < apart[0]
    shared = GROUPS.shared_only(with_client_axis(method.adapter.init(method.task, 3)))
    for name, own in GROUPS.exchangeable:
        assert torch.equal(shared[own][:, :2], shared[name]) and torch.equal(shared[own][:, 2], shared[name][:, 0])


# pFedMoAP


EXPERTS = Experts(context=2, experts=3, size=4)


def test_experts_are_mixed_by_attention(double):
    """Class by class and image by image; with one weight for all it is the mean."""
    task, data = example(EXPERTS)
    params, x = moved(EXPERTS.init(task, 3), clients=2), data.x[:6].view(2, 3, -1)
    found = EXPERTS.logits(task, params, x)
    contexts = torch.cat([params["context"][:, None], params["others"]], 1)
    text = torch.stack([WORDS.class_vectors(task, {"context": contexts[:, e]}) for e in range(4)], 1)
    for k, n, c in ((0, 0, 0), (1, 2, 3), (0, 1, 4)):
        h, t = x[k, n], text[k, :, c]
        weight = ((params["query"][k] @ h) @ (params["key"][k] @ t.T) / 2).softmax(0)
        mixture = F.normalize(weight @ t, dim=0)
        torch.testing.assert_close(found[k, n, c], task.scale * (0.5 * h @ t[0] + 0.5 * h @ mixture))
    uniform = EXPERTS.gate(params | {"query": torch.zeros_like(params["query"])}, text, x)
    torch.testing.assert_close(uniform, torch.full((2, 3, 5, 4), 0.25))


def test_experts_that_are_all_the_own_prompt_are_promptfl(double):
    task, data = example(EXPERTS)
    params, x = moved(EXPERTS.init(task, 3)), data.x[None, :5]
    expected = WORDS.logits(task, params, x)
    torch.testing.assert_close(EXPERTS.logits(task, EXPERTS.shared_only(params), x), expected)
    torch.testing.assert_close(replace(EXPERTS, share=1.0).logits(task, params, x), expected)


def test_the_nearest_prompts_of_others(double):
    """Neither the client's own nor those that the server does not have; its own where there are too few."""
    _, data = example(EXPERTS)
    data = replace(data, bounds=data.bounds[:2], ids=np.array([1, 4]))
    pool = torch.randn(6, 1, 2, 8, generator=torch.Generator().manual_seed(3))
    context = pool[[1, 4]] + 0.01
    for known, expected in (([1, 1, 1, 1, 1, 1], 3), ([0, 1, 0, 1, 1, 0], 2), ([0, 0, 0, 0, 0, 0], 0)):
        extra = {POOL: pool, KNOWN: torch.tensor(known, dtype=torch.float64)}
        others, count = nearest_prompts(context, 3, Message({}, extra=extra), data)
        assert count.tolist() == [expected] * 2
        for row, client in enumerate((1, 4)):
            usable = [i for i in range(6) if known[i] and i != client]
            by_distance = sorted(usable, key=lambda i: float((pool[i] - context[row]).norm()))[:3]
            expected_rows = [pool[i] for i in by_distance] + [context[row]] * (3 - len(by_distance))
            torch.testing.assert_close(others[row], torch.stack(expected_rows))


def test_clients_go_on_with_their_own_prompt_beside_those_of_others(double):
    """In the first round nobody has others: with all of the weight on its own prompt it trains as PromptFL does."""
    adapter = replace(EXPERTS, share=1.0)
    method, data = method_of(adapter, NearestExperts, PromptPool())
    engine, plain = Stacked(method, data, 6), method_of(WORDS, Sgd, keep=True)[0]
    first = Cohort(engine, ABLE, 1, rounds=2)
    state = method.round(method.init(6), first)
    close(state.shared, one_round(plain, data)[0].shared)
    assert first.effects["experts"] == [0.0] * 5 and first.effects["borrowed"] == [0.0] * 5
    assert first.effects["prompts"] == [5.0]
    own = engine.rows.read(ABLE, 1)["personal.context"]
    torch.testing.assert_close(state.server[POOL][ABLE], own)
    second = Cohort(engine, ABLE, 2, rounds=2)
    after = method.round(state, second)
    assert second.effects["experts"] == [3.0] * 5
    assert all(0 < b < 1 for b in second.effects["borrowed"])
    rows = engine.rows.read(ABLE, 2)
    for i in range(5):  # what it mixes in are prompts of the round before, and none is its own
        apart = (rows["others"][i][:, None] - own).flatten(2).norm(dim=-1)
        assert apart.min(1).values.max() < 1e-12 and i not in apart.argmin(1).tolist()
    step = (after.server[POOL][ABLE] - own).flatten(1).norm(dim=1)
    mean = (after.server[POOL][ABLE] - state.shared["context"]).flatten(1).norm(dim=1)
    assert (step > 0).all() and not torch.allclose(step, mean)
    with pytest.raises(FedvlmError, match="keep=false"):
        NearestExperts(keep=False)


# pFedPrompt


def test_a_memory_adds_the_clients_own_examples_to_the_shared_context(double):
    """Trained as PromptFL; by brute force over the client's examples at the α and β that it chose."""
    adapter = PromptMemory(context=2, size=40)
    method, data = method_of(adapter, Memorise, amounts=(3.0,), sharpnesses=(2.0,))
    found = play(method, data, 6, rounds=2)
    close(found.state.shared, play(method_of(WORDS, Sgd)[0], data, 6, rounds=2).state.shared)
    rows = {k: found.rows[k][:1] for k in adapter.private}
    low, high = data.bounds[0, 0], data.bounds[0, 1]
    x = data.x[None, 60:65]
    own = torch.zeros(5, 5)
    for key, label in zip(data.x[low:high], data.y[low:high], strict=True):
        own[:, label] += 3.0 * torch.exp(-2.0 * (1 - x[0] @ key))
    shared = with_client_axis(found.state.shared)
    logits = adapter.logits(method.task, shared | rows, x)
    torch.testing.assert_close(logits, WORDS.logits(method.task, shared, x) + own)
    newcomer = {k: v[None] for k, v in method.newcomer.items()}
    torch.testing.assert_close(adapter.logits(method.task, shared | newcomer, x), logits - own)
    assert found.cohort.effects["remembers"] == [1.0] * 5 and not adapter.open_vocabulary
    without, _ = method_of(adapter, Memorise, amounts=(0.0,))
    assert one_round(without, data)[1].effects["remembers"] == [0.0] * 5


# DP-FPL


def test_factors_and_residual_add_up_and_one_step_finds_a_low_rank_prompt(double):
    draw = torch.Generator().manual_seed(4)
    context, start = torch.randn(2, 1, 5, 8, generator=draw), torch.randn(2, 1, 2, 8, generator=draw)
    found = factors(context, start)
    torch.testing.assert_close(found["left"] @ found["right"] + found["rest"], context)
    torch.testing.assert_close(found["left"].mT @ found["left"], torch.eye(2).expand(2, 1, 2, 2))
    torch.testing.assert_close(found["left"].mT @ found["rest"], torch.zeros(2, 1, 2, 8), atol=1e-12, rtol=0)
    for _ in range(200):
        found = factors(context, found["right"])
    best = torch.linalg.svdvals(context)[..., 2:].square().sum(-1).sqrt()
    torch.testing.assert_close(found["rest"].flatten(2).norm(dim=-1), best)  # the best approximation of rank 2
    low = context[..., :2] @ start
    assert factors(low, start)["rest"].abs().max() < 1e-12


def test_a_round_trains_the_factors_and_keeps_the_residual(double):
    adapter = Factored(context=4, rank=2)
    method, data = method_of(adapter, Refactor)
    params = with_client_axis(method.initial | {k: method.newcomer[k] for k in adapter.private})
    params = {k: v.repeat(5, 1, 1, 1) for k, v in params.items()}
    data = Stacked(method, data, 6).at(np.array([0, 2, 4, 1, 3]), 1)
    before = factors(adapter.own_context(params), params["right"])
    found = method.local.fit(method.model, params, Message(method.initial), {}, data)
    torch.testing.assert_close(params["rest"], before["rest"])
    change = adapter.own_context(params) - adapter.own_context(before)
    assert (torch.linalg.matrix_rank(change, rtol=1e-9) <= 4).all() and (change.flatten(1).norm(dim=1) > 1e-6).all()
    expected = before["rest"].flatten(1).norm(dim=1) / adapter.own_context(before).flatten(1).norm(dim=1)
    torch.testing.assert_close(found["residual"], expected)
    assert (expected > 0.1).all()
    with pytest.raises(FedvlmError, match="rank=5: the context has 4 vectors"):
        Factored(context=4, rank=5).init(method.task, 3)


def test_without_its_private_prompt_dp_fpl_is_promptfl(double):
    adapter = Factored(context=2, rank=1)
    task, data = example(adapter)
    params, x = moved(adapter.init(task, 3)), data.x[None, :4]
    torch.testing.assert_close(adapter.logits(task, adapter.shared_only(params), x), WORDS.logits(task, params, x))


def test_noise_reaches_the_shared_context_and_the_factors_but_not_the_residual(double):
    """With dp=example, which covers this rule: its gradients are those of single examples, and only they read the data."""
    adapter = Factored(context=4, rank=2)
    method, data = method_of(adapter, Refactor, epochs=1, momentum=0.0)
    private = replace(method, privacy=Privacy("example", 1.0, 1.0, 5.0))
    assert example_refusal(private, SimpleNamespace(data=data, names=tuple("abcdef"))) == ""
    derived = replace(private, local=type("Derived", (Refactor,), {"fit": lambda *args: Refactor.fit(*args)})())
    assert "trains in its own way" in example_refusal(derived, SimpleNamespace(data=data, names=tuple("abcdef")))
    one = Stacked(method, data, 6).at(np.array([0]), 1)
    ends = []
    for noise in (0.0, 5.0):
        params = with_client_axis(method.initial | {k: method.newcomer[k] for k in adapter.private})
        params = {k: v.clone() for k, v in params.items()}
        descent = PrivateDescent(noise, 1.0, b"secret")
        method.local.fit(method.model, params, Message(method.initial), {}, descent.on(one))
        ends.append(params)
    assert torch.equal(ends[0]["rest"], ends[1]["rest"])
    for name in ("context", "left", "right"):
        assert (ends[0][name] - ends[1][name]).norm() > 1e-3
