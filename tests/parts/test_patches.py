"""Adapters on patches and conditional prompts: what they must become, and their equations by brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import close, example, patched, play, random_data
from PIL import Image
from torch.nn import functional as F

from fedvlm.backbones import load
from fedvlm.backbones.base import view_format
from fedvlm.config.config import resolve
from fedvlm.core.data import Batch
from fedvlm.core.detection import scores_of
from fedvlm.core.state import with_client_axis
from fedvlm.data.pool import Pools
from fedvlm.data.source import open_source
from fedvlm.data.store import features
from fedvlm.errors import FedvlmError
from fedvlm.parts import transport
from fedvlm.parts.adapters import transported
from fedvlm.parts.adapters.background import Background
from fedvlm.parts.adapters.conditional import Conditional
from fedvlm.parts.adapters.gallop import Gallop
from fedvlm.parts.adapters.lapt import Lapt
from fedvlm.parts.adapters.prompt import Prompt
from fedvlm.parts.adapters.transported import Transported
from fedvlm.parts.local.sgd import Sgd
from fedvlm.parts.merge.mean import Mean
from fedvlm.predict.predictor import Predictor
from fedvlm.rounds.method import Method
from fedvlm.training import train
from fedvlm.training.planned_run import PlannedRun

WORDS = Prompt(context=2)
RULE = Sgd(lr=0.05, batch=4, epochs=2, momentum=0.5)


def moved(params, by=0.3):
    """Away from where everything starts, where much is zero or alike."""
    draw = torch.Generator().manual_seed(9)
    return {k: v + by * torch.randn(v.shape, generator=draw).to(v) for k, v in params.items()}


def trained(adapter, task, data):
    return play(Method.build(adapter, RULE, Mean(), task, seed=5), data, 6).state.shared


def seen(name):
    """The task, and images with patches [1, 9, 7, dim] of one client."""
    task, data = example(name)
    return task, data.x[None, :9].double(), data.y[None, :9]


# the view


def test_patches_are_the_towers_tokens_and_row_0_the_embedding():
    clip, rng = load("mini-clip"), np.random.default_rng(3)
    shown = [Image.fromarray(rng.integers(0, 256, (40 + 9 * i, 50, 3), dtype=np.uint8)) for i in range(3)]
    found = clip.encode(shown, "patches")
    assert found.shape == (3, *view_format(clip, "patches").shape) == (3, 65, 256) and found.dtype == torch.float16
    torch.testing.assert_close(found[:, 0].float(), clip.images(shown), atol=1e-3, rtol=0)
    tower, head = clip.model.vision_model, clip.model.visual_projection
    with torch.no_grad():
        states = tower(clip.pixels(shown)).last_hidden_state
        tokens = torch.stack([head(tower.post_layernorm(states[:, p])) for p in range(65)], 1)
    torch.testing.assert_close(found.float(), tokens / tokens.norm(dim=-1, keepdim=True), atol=1e-3, rtol=0)
    assert (found[:, 1:] - found[:, :1]).abs().amax((1, 2)).min() > 0.1


def test_patches_are_stored_as_halves(images):
    source, clip = open_source(str(images)), load("mini-clip")
    source = replace(source, items=source.items[:5])
    first, again = (features(source, clip, view="patches")[0] for _ in range(2))
    assert first.shape == (5, 65, 256) and first.dtype == torch.float16 and torch.equal(first, again)
    with pytest.raises(FedvlmError, match="patches"):
        view_format(load("pixels:8"), "patches")


# FedOTP


def test_one_patch_over_and_over_is_the_mean_of_two_prompts(double):
    """Nothing is left to transport: both prompts get the same of every patch, and γ is all that stays."""
    task, x, _ = seen("transported")
    params = with_client_axis(moved(Transported(context=2).init(task, 3)))
    alike = x[:, :, 1:2].expand(-1, -1, 7, -1)
    found = Transported(context=2, mass=0.6).logits(task, params, alike)
    shared, own = (WORDS.logits(task, {"context": params[k]}, alike[:, :, 0]) for k in ("context", "own"))
    torch.testing.assert_close(found, 0.6 * (shared + own) / 2)


def test_transport_is_one_problem_an_image_and_class_however_many_at_a_time(double, monkeypatch):
    """Two clients, of which only the own context differs; a newcomer's own is the shared one."""
    task, x, _ = seen("transported")
    adapter = Transported(context=2)
    params = with_client_axis(moved(adapter.init(task, 3), by=1.0))
    assert (params["own"] - params["context"]).abs().max() > 0.1
    params["own"] = torch.cat([params["own"], params["own"] + 0.5])
    x = torch.cat([x, x.flip(1)])
    found = adapter.logits(task, params, x)
    text = adapter.prompts(task, params)
    for k, n, c in ((0, 0, 0), (1, 4, 2), (1, 8, 4), (0, 3, 1)):
        cosines = x[k, n, 1:] @ text[k, :, c].T
        expected = task.scale * (transport.unbalanced(1 - cosines) * cosines).sum()
        torch.testing.assert_close(found[k, n, c], expected)
    monkeypatch.setattr(transported, "CHUNK", 1)
    torch.testing.assert_close(adapter.logits(task, params, x), found)
    assert adapter.shared_only(params)["own"] is params["context"]


def test_a_patch_that_fits_no_prompt_does_not_count(double):
    task, x, _ = seen("transported")
    adapter = Transported(context=2)
    params = with_client_axis(adapter.init(task, 3))
    far = -F.normalize(adapter.prompts(task, params).sum((1, 2)), dim=-1)  # opposite to all of them
    one, other = x.clone(), x.clone()
    one[:, :, 3], other[:, :, 3] = far, F.normalize(far + 0.1 * x[0, 0, 1], dim=-1)
    a, b, whole = (adapter.logits(task, params, v) for v in (one, other, x))
    assert (a - b).abs().max() < 0.2 * (a - whole).abs().max()


# LoCoOp


def test_without_entropy_background_is_promptfl_on_the_image(double):
    task, data = example("background")
    whole = trained(WORDS, task, replace(data, x=data.x[:, 0].double()))
    close(trained(Background(context=2, entropy=0.0), task, data), whole)
    other = trained(Background(context=2), task, data)["context"]
    assert (other - whole["context"]).abs().max() > 1e-4


def test_background_is_chosen_by_rank():
    """The true class, 2, stands at place 0 … 4 of five patches; a patch's scale and offset do not matter."""
    order = torch.tensor([[2, 0, 1, 3, 4], [0, 2, 1, 3, 4], [0, 1, 2, 3, 4], [0, 1, 3, 2, 4], [0, 1, 3, 4, 2]])
    patches = torch.zeros(5, 5).scatter_(1, order, torch.arange(5.0, 0, -1).expand(5, 5))
    patches = patches * torch.tensor([0.1, 5, 1, 1, 2])[:, None] + torch.tensor([3.0, 0, -9, 1, 0])[:, None]
    logits = torch.cat([torch.zeros(1, 5), patches])[None, None]
    for rank in (1, 2, 3, 4, 5):
        entropies = torch.distributions.Categorical(logits=patches[rank:]).entropy() if rank < 5 else torch.zeros(1)
        count, sum = Background(rank=rank).background_entropy(logits, torch.tensor([[2]]))
        assert count.item() == 5 - rank and sum.item() == pytest.approx(entropies.sum().item(), rel=1e-5)
    assert Background().background_entropy(logits, torch.tensor([[2]]))[0].item() == 4  # a fifth of five


def test_background_loss_by_brute_force(double):
    """Images without background, with some, and padding; the whole batch's patches count alike."""
    draw = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(2, 5, 7, 6, generator=draw)
    y = torch.randint(6, (2, 5), generator=draw)
    logits[0, 1, 1:] += 20 * F.one_hot(y[0, 1], 6)  # its class is first everywhere
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1.0]])
    adapter = Background(rank=2, entropy=0.7)
    batch = Batch(logits, y, real / real.sum(1, keepdim=True))
    found = adapter.loss("cross-entropy", logits, batch)
    for k in range(2):
        cross, entropies = [], []
        for n in range(int(real[k].sum())):
            cross.append(F.cross_entropy(logits[k, n, 0], y[k, n]).item())
            mine = []
            for p in range(1, 7):
                chance = logits[k, n, p].softmax(0)
                if y[k, n] not in chance.topk(2).indices:
                    mine.append(-(chance * chance.log()).sum().item())
            assert bool(mine) == ((k, n) != (0, 1))
            entropies += mine
            each = cross[-1] - 0.7 * (np.mean(mine) if mine else 0)
            assert adapter.losses(logits, y)[k, n].item() == pytest.approx(each)
        assert found[k].item() == pytest.approx(np.mean(cross) - 0.7 * np.mean(entropies))


def test_gl_mcm_adds_the_surest_patch(double):
    task, x, _ = seen("background")
    params = with_client_axis(moved(Background(context=2).init(task, 3)))
    plain, both = (Background(context=2, patchwise=p).detection_scores(task, params, x) for p in (False, True))
    surest = torch.stack([scores_of(WORDS.logits(task, params, x[:, :, p]))["mcm"] for p in range(1, 7)]).amax(0)
    torch.testing.assert_close(both["mcm"], plain["mcm"] + surest)
    torch.testing.assert_close(plain["mcm"], scores_of(WORDS.logits(task, params, x[:, :, 0]))["mcm"])
    assert all(torch.equal(both[k], plain[k]) for k in ("energy", "max-logit"))


# GalLoP


def test_one_global_prompt_is_promptfl(double):
    task, data = example("gallop")
    whole = trained(WORDS, task, replace(data, x=data.x[:, 0].double()))
    alone = trained(Gallop(context=2, global_prompts=1, local_prompts=0, drop=0.9), task, data)  # the last prompt stays
    close({"context": alone["context"][0]}, whole)


def test_local_prompts_read_their_own_number_of_patches(double):
    task, x, _ = seen("gallop")
    adapter = Gallop(
        context=2, global_prompts=2, local_prompts=3, patches=3
    )  # 3 and 6 patches, and 9, of which there are 6
    params = with_client_axis(moved(adapter.init(task, 3)))
    found = adapter.logits(task, params, x)
    text = {
        k: [WORDS.class_vectors(task, {"context": one})[0] for one in params[k][0][:, None]]
        for k in ("context", "detail")
    }
    for n in (0, 5):
        whole = torch.stack([t @ x[0, n, 0] for t in text["context"]]).mean(0)
        patches = F.normalize(x[0, n, 1:] @ params["projection"][0].T, dim=-1)
        nearest = [(t @ patches.T).sort(descending=True).values for t in text["detail"]]
        local = torch.stack([near[:, :k].mean(1) for near, k in zip(nearest, (3, 6, 6), strict=True)]).mean(0)
        torch.testing.assert_close(found[0, n], task.scale * (whole + local) / 2)


def test_the_map_starts_as_the_identity_and_every_prompt_by_itself(double):
    task, _ = example("gallop")
    params = Gallop(context=2).init(task, 3)
    assert torch.equal(params["projection"], torch.eye(task.dim))
    contexts = torch.cat([params["context"], params["detail"]]).flatten(1)
    assert len(contexts) == 8 and torch.pdist(contexts).min() > 0.01


def batch_at(step, examples=50):
    real = torch.ones(2, examples)
    return Batch(real, real.long(), real / examples, step)


def test_prompt_dropout_is_drawn_by_place():
    adapter = Gallop(global_prompts=4, drop=0.75)
    kept = adapter.prompt_weights(batch_at(3))
    assert torch.equal(kept.sum(1), torch.ones(50)) and torch.equal((kept > 0).sum(1), torch.ones(50, dtype=torch.long))
    assert torch.equal(kept, adapter.prompt_weights(batch_at(3)))
    assert not torch.equal(kept, adapter.prompt_weights(batch_at(4)))
    assert (kept.sum(0) > 4).all()  # everybody's turn comes
    assert torch.equal(Gallop(global_prompts=4, drop=0.5).prompt_weights(batch_at(3)).unique(), torch.tensor([0, 0.5]))
    assert torch.equal(Gallop(global_prompts=4, drop=0.0).prompt_weights(batch_at(3)), torch.full((50, 4), 0.25))


def test_what_is_dropped_learns_nothing_and_losses_add_up(double):
    task, x, y = seen("gallop")
    adapter = Gallop(context=2, global_prompts=3, local_prompts=2, patches=2, drop=0.7)
    params = {k: v.requires_grad_() for k, v in with_client_axis(moved(adapter.init(task, 3))).items()}
    batch = Batch(x[:, :1], y[:, :1], torch.ones(1, 1), step=2)
    logits = adapter.train_logits(task, params, batch)
    assert logits.shape == (1, 1, 3, 5)
    loss = adapter.loss("cross-entropy", logits, batch)
    expected = torch.stack([F.cross_entropy(logits[0, :, r], y[0, :1]) for r in range(3)]).sum()
    torch.testing.assert_close(loss[0], expected)
    torch.testing.assert_close(adapter.losses(logits, batch.y)[:, 0], loss)
    (slope,) = torch.autograd.grad(loss, params["context"])
    assert torch.equal(slope[0].flatten(1).norm(dim=1) > 0, adapter.prompt_weights(batch)[0] > 0)


# CoCoOp


def test_without_its_network_conditional_is_promptfl(double):
    task, data = example("conditional")
    params, x = with_client_axis(Conditional(context=2).init(task, 3)), data.x[None, :6]
    silent = params | {k: torch.zeros_like(params[k]) for k in ("b", "b0")}
    torch.testing.assert_close(Conditional(context=2).logits(task, silent, x), WORDS.logits(task, params, x))


@pytest.mark.parametrize("specific", [False, True])
def test_every_image_has_a_prompt_of_its_own(specific, double):
    task, data = example("conditional")
    adapter = Conditional(context=2, specific=specific)
    params = moved(adapter.init(task, 3)) | {"a0": torch.ones(1)}  # the one hidden unit is awake
    net = torch.nn.Sequential(torch.nn.Linear(16, 1), torch.nn.ReLU(), torch.nn.Linear(1, 8))
    for layer, name in ((net[0], "a"), (net[2], "b")):
        layer.weight.data, layer.bias.data = params[name], params[f"{name}0"]
    x = data.x[:6]
    shift = net(x).detach()
    assert (shift - shift[0]).abs().max() > 0.1
    one = [
        WORDS.logits(task, with_client_axis({"context": params["context"] + s}), h[None, None])
        for s, h in zip(shift, x, strict=True)
    ]
    torch.testing.assert_close(adapter.logits(task, with_client_axis(params), x[None]), torch.cat(one, 1))
    real = torch.tensor([[1.0, 1, 1, 1, 0, 0]]) / 4
    batch = Batch(x[None], data.y[None, :6], real)
    alike = adapter.logits_and_aligned(task, with_client_axis(params), batch)[1]
    few = Batch(x[None, :4], data.y[None, :4], real[:, :4])
    alone = adapter.logits_and_aligned(task, with_client_axis(params), few)[1]
    torch.testing.assert_close(alike, alone)  # padding counts nothing


# LAPT


def test_lapt_by_brute_force(double):
    task, data = example("lapt")
    adapter = Lapt(context=2, count=3, mixing=0.6)
    params = with_client_axis(moved(adapter.init(task, 3)))
    x, y = data.x[None, :6], data.y[None, :6]
    batch = Batch(x, y, torch.full((1, 6), 1 / 6), step=4)
    outer = task._replace(classes=task.nouns[:3])
    classes, nouns = WORDS.class_vectors(task, params), WORDS.class_vectors(outer, {"context": params["negatives"]})
    text = torch.cat([classes, nouns], 1)[0]
    logits = adapter.train_logits(task, params, batch)
    torch.testing.assert_close(logits[:, :, 0], task.scale * x @ text.T)
    names = task.names().double()[y]
    for part in np.linspace(0, 0.5, 2001):  # the mixture is one on the way from the name to half of the image
        if (
            task.scale * F.normalize(part * x + (1 - part) * names, dim=-1) @ text.T - logits[:, :, 1]
        ).abs().max() < 1e-2:
            break
    else:
        raise AssertionError("no mixture gives these logits")
    image, mixture = (F.cross_entropy(logits[0, :, s], y[0]) for s in (0, 1))
    torch.testing.assert_close(adapter.loss("cross-entropy", logits, batch)[0], image + 0.6 * mixture)
    torch.testing.assert_close(adapter.losses(logits, y).mean(), image + 0.6 * mixture)
    torch.testing.assert_close(adapter.logits(task, params, x), WORDS.logits(task, params, x))  # no noun is an answer
    chance = (task.scale * x @ text.T).softmax(-1)[..., :5].sum(-1)
    torch.testing.assert_close(adapter.detection_scores(task, params, x)["mcm"].sigmoid(), chance)
    with pytest.raises(FedvlmError, match="count=9"):
        Lapt(count=9).init(task, 3)


# all of them


@pytest.mark.parametrize("adapter", [Transported(context=2), Background(context=2), Gallop(context=2)])
def test_images_alone_are_the_features_kept(adapter, double):
    """A run writes features down: one vector an image, not all its patches."""
    task, x, _ = seen("background")
    assert torch.equal(adapter.features(task, with_client_axis(adapter.init(task, 3)), x.half()), x[:, :, 0])


@pytest.mark.parametrize("name", ["fedotp", "fedlocoop", "fedgallop", "cocoop", "fedlapt"])
def test_recipes_learn_on_real_images(name, images, tmp_path):
    given = {
        "data": str(images),
        "rounds": 2,
        "context": 2,
        "outsiders": str(images / "noto" / "bird"),
        "shots": 2,
        "lr": 0.02,
    }
    given |= {"fedgallop": {"global_prompts": 2, "local_prompts": 2}, "fedlapt": {"count": 5, "candidates": 40}}.get(
        name, {}
    )
    setup = resolve(name, given | {"domains": 2})
    pool = Pools().load(setup)
    run = train.train(PlannedRun(setup, pool, tmp_path / "run"))
    start, *_, last = run.rounds()
    assert last["personal"]["val_loss"] < start["personal"]["val_loss"] and 0 <= last["auroc"] <= 1
    method = PlannedRun(setup, pool).method
    predictor = Predictor(load("mini-clip"), method.model, method.initial | method.newcomer, "shared")
    (_, chance), *_ = predictor.predict([Image.open(next((images / "noto" / "bird").iterdir()))])
    assert 0.2 <= chance <= 1


def test_patched_examples_begin_with_the_image():
    task, _ = example("head")
    data = random_data(task)
    torch.testing.assert_close(patched(data).x[:, 0].float(), data.x.float(), atol=1e-3, rtol=0)
