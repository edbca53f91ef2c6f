"""Methods of the papers' tables beside the papers' own: FedAKT, FedGH, FedOT's VPT and Server CoOp, FedCLIP's variants,
FedDTL with another text tower, and reinforcement on other adapters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import ABLE, build, example, layered, play, random_data, random_task, small_adapter, tiny_clip, tiny_whole
from torch.nn import functional as F

from fedvlm.backbones import load
from fedvlm.config import trust
from fedvlm.config.config import resolve
from fedvlm.core.cohort import Cohort
from fedvlm.core.model import Model
from fedvlm.core.state import with_client_axis
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.attention import Attention
from fedvlm.parts.adapters.both_towers import BothTowers
from fedvlm.parts.adapters.conditional import Conditional
from fedvlm.parts.adapters.guided import Guided, transferred
from fedvlm.parts.adapters.prompt import Prompt
from fedvlm.parts.adapters.rotation import Rotation
from fedvlm.parts.adapters.server_coop import ServerCoop
from fedvlm.parts.adapters.two_masks import TwoMasks
from fedvlm.parts.adapters.visual import Visual
from fedvlm.parts.adapters.visual_head import VisualHead
from fedvlm.parts.local.fedrep import FedRep
from fedvlm.parts.local.sgd import Sgd
from fedvlm.parts.local.two_stage import TwoStage
from fedvlm.parts.merge.mean import Mean
from fedvlm.parts.merge.other_text import PROJECTION, OtherText
from fedvlm.parts.merge.prototypes import Prototypes
from fedvlm.parts.merge.stages import Stages
from fedvlm.parts.merge.text_server import TextServer
from fedvlm.rounds.method import Method


def counts(method: Method) -> tuple[int, int]:
    """Numbers that are sent, and that stay on a client."""
    return tuple(sum(v.numel() for v in part.values()) for part in (method.initial, method.newcomer))  # type: ignore[return-value]


def build_of(adapter, task, local=None, merge=None) -> Method:
    return Method.build(adapter, local or Sgd(lr=0.05, batch=4), merge or Mean(), task, 5)


def with_axis(adapter, task, seed: int = 1):
    return with_client_axis(adapter.init(task, seed))


def test_fedakt_sends_the_adapter_and_learns_from_the_surer_prediction(double):
    task, data = random_task(), random_data(random_task())
    d, k = task.dim, len(task.classes)
    method = build_of(Guided(), task)
    assert counts(method) == (2 * (d * d + d), k * d + k)  # FedOT's Table 3
    one, other = torch.randn(2, 3, k), 3 * torch.randn(2, 3, k)
    p, q = one.softmax(-1), other.softmax(-1)
    sure = [1 - torch.distributions.Categorical(probs=x).entropy() / np.log(k) for x in (p, q)]
    kl = [F.kl_div(a.log(), b, reduction="none").sum(-1) for a, b in ((p, q), (q, p))]
    torch.testing.assert_close(transferred(one, other), sure[1] * kl[0] + sure[0] * kl[1])
    even = transferred(one, torch.zeros_like(other))  # a teacher that does not know teaches nothing
    torch.testing.assert_close(even, sure[0] * F.kl_div(torch.full_like(p, 1 / k).log(), p, reduction="none").sum(-1))
    params, batch = with_axis(Guided(), task), next(iter(random_data(task, ((9, 0, 0),)).batches(4)))
    plain = Guided(transfer=0.0)
    torch.testing.assert_close(  # V = 0 at the start: both predictions are the same
        Model(plain, task).loss("cross-entropy", params, batch),
        plain.task_type.losses["cross-entropy"](plain.logits(task, params, batch.x), batch),
    )
    played = play(method, data, 6)
    assert played.scores["personal.score"].sum() > played.scores["shared.score"].sum()  # newcomers guess


def test_fedgh_trains_the_classifier_on_class_means(double):
    task, data = random_task(), random_data(random_task())
    merge = Prototypes(server_lr=0.1, server_epochs=2)
    method = build_of(small_adapter("head", init_from="random"), task, merge=merge)
    params = {k: v[None].repeat(6, 1, 1) for k, v in method.initial.items()}
    sent = merge.client_values(method.model, params, data)[0]["prototypes"]
    for i, (low, high, *_) in enumerate(data.bounds):
        x, y = data.x[low:high], data.y[low:high]
        for c in range(len(task.classes)):
            mean = x[y == c].mean(0) if (y == c).any() else torch.zeros(task.dim)
            torch.testing.assert_close(sent[i, c], mean)
    head = method.initial["head"].clone().requires_grad_()
    expected = head
    for own in [*sent, *sent]:
        known = own.norm(dim=-1) > 0
        if known.any():
            logits = task.scale * F.normalize(own[known], dim=-1) @ expected.T
            loss = F.cross_entropy(logits, torch.nonzero(known).flatten())
            expected = expected - 0.1 * torch.autograd.grad(loss, expected, create_graph=True)[0]
    torch.testing.assert_close(merge.trained(method.initial["head"], sent, task.scale), expected.detach())
    engine = Stacked(method, data, 2)
    after = method.round(method.init(6), Cohort(engine, ABLE, 1)).shared["head"]
    torch.testing.assert_close(after, merge.trained(method.initial["head"], sent[ABLE], task.scale))
    with pytest.raises(FedvlmError, match="merge=prototypes does not go with adapter=attention"):
        build_of(Attention(), task, merge=merge)


def test_fedots_vpt_has_private_tokens_and_a_shared_classifier(double):
    task, data = layered(random_task())
    adapter = VisualHead(tokens=3, depth=9)
    params = with_axis(adapter, task)
    assert params["tokens"].shape == (1, 2, 3, 12)  # as many layers as the tower has
    deep = Visual(tokens=3, deep=True)
    same = {"tokens": params["tokens"]}
    torch.testing.assert_close(adapter.logits(task, params, data.x[None]), deep.logits(task, same, data.x[None]))
    sizes = counts(build_of(VisualHead(tokens=2), task))
    assert sizes == (len(task.classes) * task.dim, 2 * 12)  # FedOT's Table 3


def test_a_newcomer_of_server_coop_has_the_context_alone(double):
    adapter = ServerCoop(context=2)
    task, data = example(adapter)
    method = build_of(adapter, task)
    assert set(method.initial) == {"context"}
    x = data.x[None, :5]
    shared = method.shared_model(method.init(1).message())
    context = {"context": method.initial["context"][None]}
    torch.testing.assert_close(adapter.logits(task, shared, x), Prompt(context=2).logits(task, context, x))
    drawn = build_of(ServerCoop(context=2, random=True), task)
    as_drawn = drawn.shared_model(drawn.init(1).message())
    everything = with_axis(Conditional(context=2), task, seed=5)
    torch.testing.assert_close(adapter.logits(task, as_drawn, x), Conditional(context=2).logits(task, everything, x))


def test_fedclips_mask_on_text_and_on_both(double):
    task, data = random_task(), random_data(random_task())
    x, alone = 5 * data.x[None], Attention()
    both, text = TwoMasks(), TwoMasks(images=False)
    params = with_axis(both, task)
    assert sum(v.numel() for v in params.values()) == 2 * sum(v.numel() for v in alone.init(task, 1).values())
    even = params | {k: torch.zeros_like(params[k]) for k in ("text.w2", "text.b2")}  # a uniform mask changes nothing
    torch.testing.assert_close(both.logits(task, even, x), alone.logits(task, params, x))
    only = {k: v for k, v in even.items() if k.startswith("text.")}
    torch.testing.assert_close(text.logits(task, only, data.x[None]), task.scale * data.x[None] @ task.names().T)
    mask = torch.softmax(
        torch.tanh(task.names() @ params["text.w1"][0].T + params["text.b1"][0]) @ params["text.w2"][0].T
        + params["text.b2"][0],
        -1,
    )
    torch.testing.assert_close(text.class_vectors(task, params)[0], F.normalize(mask * task.names(), dim=-1))
    assert text.alignment == "classes" and text.view == "embedding" and both.view == "raw"


def test_clip_whole_is_both_encoders(double):
    adapter = BothTowers()
    task, data = example(adapter)
    params = with_axis(adapter, task)
    x = data.x[:3]
    logits = adapter.logits(task, params, x[None])[0]
    whole, model = tiny_whole(), tiny_clip()
    tokens = whole.tokens(task.phrases)
    pixels = (x - whole.image.mean) / whole.image.std
    expected = (
        model(pixel_values=pixels.double(), input_ids=tokens).logits_per_image / model.logit_scale.exp() * task.scale
    )
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    prepared = adapter.prepare(task, params, {})
    torch.testing.assert_close(adapter.logits(task, prepared, x[None])[0], logits)
    assert (
        sum(v.numel() for v in params.values()) == sum(v.numel() for v in model.parameters()) - 1
    )  # without the scale
    method = build_of(adapter, task)
    after = play(method, data, 1, rounds=1).state.shared
    moved = {k.partition(".")[0] for k, v in after.items() if not torch.equal(v, method.initial[k])}
    assert moved == {"image", "text", "text_projection"}
    masked = BothTowers(mask=True)
    more = with_axis(masked, task)
    assert {k for k in more if k.startswith("mask.")} == {f"mask.{k}" for k in Attention().init(task, 1)}
    assert not torch.allclose(masked.logits(task, more, x[None])[0], logits)


@pytest.mark.parametrize("name", ["maple", "mma", "crossed"])
def test_reinforcement_trains_other_adapters(name, double):
    """FedDTL's Tables 9 and 25."""
    adapter = small_adapter(name)
    task, data = example(adapter, ((4, 1, 1), (3, 1, 1)))
    local = TwoStage(lr=0.05, batch=4, relative_noise=True, noise=1.0)
    method = build_of(adapter, task, local, Stages(stage="reinforced"))
    engine = Stacked(method, data, 2)
    cohort = Cohort(engine, np.arange(2), 1)
    after = method.round(method.init(2), cohort)
    assert cohort.notes["stage"] == "reinforced"
    assert any(not torch.equal(v, method.initial[k]) for k, v in after.shared.items())


def test_fedots_local_only_leaves_the_classifier(double):
    task, data = random_task(), random_data(random_task())
    local = FedRep(lr=0.05, batch=4, train_shared=False)
    played = play(build_of(Rotation(), task, local), data, 6, rounds=2)
    torch.testing.assert_close(played.state.shared["head"], task.names())
    assert played.rows["skew"][0].abs().sum() > 0


def test_another_text_tower_with_a_projection(double):
    adapter = replace(small_adapter("lora"), towers="image")
    task, _ = example(adapter)
    own = OtherText().init(Model(adapter, task), 2, 1)
    usual = TextServer().init(Model(adapter, task), 2, 1)
    torch.testing.assert_close(own.task["text"], usual.task["text"])  # the identity
    assert torch.equal(own.server[PROJECTION], torch.eye(task.dim))
    other = OtherText(text_backbone="mini-clip", text_layers=1).init(Model(adapter, task), 2, 1)
    assert other.server[PROJECTION].shape == (task.dim, 256)
    theirs = load("mini-clip").texts(task.phrases).to(other.server[PROJECTION])
    expected = F.normalize(theirs @ other.server[PROJECTION].T, dim=-1)
    torch.testing.assert_close(other.task["text"].to(expected), expected, rtol=0, atol=1e-4)
    with pytest.raises(FedvlmError, match="text_backbone=pixels:8 has no text tower"):
        OtherText(text_backbone="pixels:8").init(Model(adapter, task), 2, 1)


def test_another_text_tower_of_a_strangers_run_is_asked_for():
    setup = resolve("feddtl", {"merge": "other_text", "text_backbone": "python:evil:load"})
    assert any("run code" in need.does and "evil" in need.what for need in trust.needs(setup))


def test_fedbn_keeps_all_normalisation_on_the_clients():
    adapter = small_adapter("resnet", private=resolve("fedbn", {}).adapter.private)
    plain = build("resnet", "sgd", "mean")
    task, data = example(adapter)
    method = Method.build(adapter, plain.local, plain.merge, task, 5)
    whole = {k: v.dim() for k, v in plain.initial.items()}
    assert set(method.initial) == {k for k, dims in whole.items() if dims > 1 or k == "fc.bias"}
    state, rows, *_ = play(method, data, 6, rounds=1)
    kept = {k for k in whole if k not in method.initial}
    assert kept <= rows.keys() and any("running" in k for k in kept)
    assert not torch.equal(rows["bn1.running_mean"][0], rows["bn1.running_mean"][1])
    assert not torch.equal(state.shared["conv1.weight"], method.initial["conv1.weight"])
