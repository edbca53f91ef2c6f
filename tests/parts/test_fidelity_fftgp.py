"""FFT-GP and its rivals as their papers have them: Algorithm 2, the ablations, what is scored, and that mechanisms act."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import build, close, numbered, play, random_data, random_task, small_adapter, train_small
from safetensors.torch import save_file

from fedvlm.config.config import Layout, resolve
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import SPLITS, Batch
from fedvlm.core.descent import Optimiser, by_autograd
from fedvlm.core.model import Model
from fedvlm.core.state import Message
from fedvlm.data.clients import Federation, federate, own_data
from fedvlm.data.pool import Pools
from fedvlm.data.source import Embeddings, Item, Source, keep_classes, keep_domains
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError
from fedvlm.evaluation.protocols import matrix_row as row_of
from fedvlm.evaluation.protocols import matrix_summary
from fedvlm.federation.admin import refuse_keys
from fedvlm.parts.adapters.attention import Attention
from fedvlm.parts.adapters.network import IMAGENET
from fedvlm.parts.adapters.resnet import ResNet
from fedvlm.parts.local.bgp import Bgp, aligned_loss
from fedvlm.parts.local.perfedavg import PerFedAvg, split_batch
from fedvlm.parts.local.sgd import Sgd
from fedvlm.report.tables import summarise
from fedvlm.rounds.method import Method

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


# BGP (Algorithm 2)


def one_client(examples: int, local):
    """FedCLIP's adapter on one client, and its model."""
    task = random_task()
    parts = build("attention", "sgd", "mean")
    method = Method.build(parts.adapter, local, parts.merge, task, 5)
    return method, random_data(task, sizes=((examples, 1, 1),))


def test_a_local_step_of_bgp_is_two_updates_by_hand():
    """A client with a single batch: w′ on the batch as one epoch shuffles it, the aligned update on the next epoch's."""
    method, data = one_client(4, Bgp(lr=0.1, batch=4, align=50.0))
    start, plain = method.initial, method.model.gradients("cross-entropy")
    anchor = {k: v[None] for k, v in start.items()}
    first, second = replace(data, round=1).batches(4, 2)
    _, found = plain(anchor, first)
    moved = {k: v - 0.1 * g for (k, v), g in zip(anchor.items(), found, strict=True)}
    aligned = by_autograd(lambda now, batch: aligned_loss(method.model, "cross-entropy", now, anchor, batch, 50.0))
    _, found = aligned(moved, second)
    expected = {k: (v - 0.1 * g)[0] for (k, v), g in zip(moved.items(), found, strict=True)}
    cohort = Cohort(Stacked(method, data, 1), np.array([0]), 1)
    close(method.round(method.init(1), cohort).shared, expected, 1e-6)
    _, task = plain(moved, second)
    length = torch.cat([g.flatten() for g in task]).norm()
    change = torch.cat([(a - b).flatten() for a, b in zip(found, task, strict=True)]).norm()
    assert cohort.effects["aligned"] == [0.5]
    assert cohort.effects["alignment"] == [pytest.approx(float(change / length), rel=1e-4)]


@pytest.mark.parametrize("examples,updates", [(4, 1), (12, 3), (10, 3)])
def test_bgp_takes_twice_fedavgs_updates_unless_the_budget_is_the_same(examples, updates, monkeypatch):
    count, step = [], Optimiser.step
    monkeypatch.setattr(Optimiser, "step", lambda *given: (count.append(1), step(*given)))
    for rule, expected in ((Sgd, updates), (Bgp, 2 * updates)):
        method, data = one_client(examples, rule(lr=0.1, batch=4))
        play(method, data, 1, rounds=1, ids=np.array([0]))
        assert len(count) == expected
        count.clear()
    method, data = one_client(examples, Bgp(lr=0.1, batch=4, budget="same"))
    play(method, data, 1, rounds=1, ids=np.array([0]))
    assert len(count) == updates


def test_a_client_with_one_batch_aligns_every_second_round_within_the_same_budget():
    """Clients of three, one and two updates: the count goes on over rounds, and stacked is serial."""
    task = random_task()
    data = random_data(task, sizes=((12, 1, 1), (4, 1, 1), (7, 1, 1)))
    parts = build("attention", "sgd", "mean")
    method = Method.build(parts.adapter, Bgp(lr=0.1, batch=4, align=9.0, budget="same"), parts.merge, task, 5)
    for chunk in (1, 3):
        engine, state, found = Stacked(method, data, chunk), method.init(3), []
        for round in (1, 2, 3):
            cohort = Cohort(engine, np.arange(3), round)
            state = method.round(state, cohort)
            found.append(sorted(cohort.effects["aligned"]))
        expected = [[0, 1 / 3, 0.5], [0.5, 2 / 3, 1], [0, 1 / 3, 0.5]]
        assert np.allclose(found, expected), found


def test_the_alignment_of_no_strength_has_no_effect():
    method, data = one_client(8, Bgp(lr=0.1, batch=4, align=0.0))
    cohort = play(method, data, 1, rounds=1, ids=np.array([0])).cohort
    assert cohort.effects["alignment"] == [pytest.approx(0, abs=1e-6)]


def test_the_ablations_have_a_plain_average_and_only_meta_learning_is_perfedavg():
    """Tables 13 and 14: "Only ML" is PerFedAvg of Tables 2 and 3 digit by digit, and BGP alone is Table 11's row without
    FAA. With FAA, only-ml was bit-identical to faa-only."""
    setups = {name: resolve(f"fft-gp-{name}", {}) for name in ("only-ml", "only-da", "bgp-only", "faa-only")}
    found = {name: (s.parts["local"].name, s.parts["merge"].name) for name, s in setups.items()}
    assert found["only-ml"] == ("perfedavg", "mean") and found["only-da"] == found["bgp-only"] == ("bgp", "mean")
    assert found["faa-only"] == ("sgd", "faa")
    assert setups["only-da"].parts["local"].settings["phases"] == "aligned"
    assert all(s.parts["local"].settings["keep"] for s in setups.values())  # one definition of P


# PerFedAvg's inner step


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_the_inner_step_has_the_learning_rate_and_what_it_does_is_told(optimiser):
    """It stayed at 0.01 whatever lr was."""
    method, data = one_client(8, PerFedAvg(lr=0.1, batch=8, optimiser=optimiser))
    cohort = play(method, data, 1, rounds=1, ids=np.array([0])).cohort
    plain, start = method.model.gradients("cross-entropy"), {k: v[None] for k, v in method.initial.items()}
    first, second = split_batch(next(iter(replace(data, round=1).batches(8))))
    moved = {k: v - 0.1 * g for (k, v), g in zip(start.items(), plain(start, first)[1], strict=True)}
    at, before = (torch.cat([g.flatten() for g in plain(p, second)[1]]) for p in (moved, start))
    step, size = (torch.cat([v.flatten() for v in p]) for p in ([moved[k] - start[k] for k in start], start.values()))
    assert cohort.effects["gradient_change"] == [pytest.approx(float((at - before).norm() / before.norm()), rel=1e-4)]
    assert cohort.effects["inner_step"] == [pytest.approx(float(step.norm() / size.norm()), rel=1e-4)]


def test_a_model_that_is_kept_is_the_one_that_was_trained_also_with_perfedavg():
    """One definition of P in one table: with keep=true nothing is adapted at test."""
    kept, data = one_client(8, PerFedAvg(lr=0.1, batch=4, keep=True))
    found = play(kept, data, 1, rounds=1, ids=np.array([0]))
    row, message = found.rows, Message(found.state.shared)
    personal = kept.personal_models(row, message, data)
    close({k: v[0] for k, v in personal.items()}, found.state.shared, 1e-6)  # the mean of one client is its own model
    adapted, _ = one_client(8, PerFedAvg(lr=0.1, batch=4))
    assert not torch.equal(adapted.personal_models({}, message, data)["w1"][0], found.state.shared["w1"])


def test_personal_models_of_the_fairness_benchmark_are_all_trained_ones(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("fairness", None)
    import fairness  # benchmarks/fairness.py

    args = Namespace(data="emoji", lr=0.01, rounds=1, seeds="1", out="")
    for local in fairness.LOCALS:
        settings = fairness.setup_for(args, "mean", local).parts["local"].settings
        assert settings["keep"] and settings["lr"] == 0.01
        assert settings.get("inner", 0) == 0  # lr


# What merges did


def test_merges_tell_how_far_their_weights_are_from_the_plain_mean():
    task = random_task()
    data = random_data(task)
    for name, effects in (
        ("ga", {"from_uniform", "weights_moved"}),
        ("afl", {"from_uniform", "weights_moved"}),
        ("faa", {"from_uniform", "weights_moved", "usable_slopes"}),
        ("qffl", {"from_uniform", "server_step"}),
        ("grace", {"from_sizes"}),
    ):
        method = build("head", "sgd", name)
        cohort = play(method, data, 6, rounds=2).cohort
        assert set(cohort.effects) == effects <= set(type(method.merge).effects), name  # FAA has more by compare=true
        weight = torch.tensor(list(cohort.notes["weights"].values()), dtype=torch.float64)
        if "from_uniform" in effects:
            distance = float((weight - 1 / len(weight)).abs().sum() / 2)
            assert cohort.effects["from_uniform"] == [pytest.approx(distance)] and distance > 0
        assert all(0 <= v <= 1.0001 for (v,) in cohort.effects.values())


def test_q_ffl_of_q_zero_takes_the_whole_step_of_the_mean():
    method = build("head", "sgd", "qffl")
    method = Method.build(method.adapter, method.local, replace(method.merge, q=0.0), method.task, 5)
    cohort = play(method, random_data(random_task()), 6, rounds=1).cohort
    assert cohort.effects == {"from_uniform": [pytest.approx(0)], "server_step": [pytest.approx(1)]}


# Pixels of pre-trained networks


def test_normalisation_belongs_to_the_weights(tmp_path):
    task, kind = random_task(classes=3), small_adapter(ResNet)
    torch.manual_seed(0)
    saved = {k: torch.rand_like(v) for k, v in kind.init(task, 9).items()}
    public = {k.replace("square", "var"): v for k, v in saved.items()}
    save_file(public, tmp_path / "public.safetensors")
    pretrained = replace(kind, start=str(tmp_path / "public.safetensors"))
    images = torch.randint(256, (1, 4, 3, 12, 12), dtype=torch.uint8)
    mean, std = (torch.tensor(v)[:, None, None] for v in IMAGENET)
    params = {k: v[None] for k, v in pretrained.init(task, 1).items()}
    expected = pretrained.logits(task, params, (images.float() / 255 - mean) / std)
    torch.testing.assert_close(pretrained.logits(task, params, images), expected)
    signed = kind.logits(task, params, images)
    torch.testing.assert_close(signed, kind.logits(task, params, images.float() / 127.5 - 1))
    torch.testing.assert_close(replace(pretrained, normalise="signed").logits(task, params, images), signed)
    save_file(saved, tmp_path / "own.safetensors")
    with pytest.raises(FedvlmError, match="trained with fedvlm; say normalise="):
        replace(kind, start=str(tmp_path / "own.safetensors")).init(task, 1)
    replace(kind, start=str(tmp_path / "own.safetensors"), normalise="signed").init(task, 1)


# Which data there are


def source_of(domains: str = "abcdef", classes: str = "xyz", each: int = 10) -> Source:
    items = [Item(f"{d}/{c}/{i}.png", d, c, "") for d in domains for c in classes for i in range(each)]
    return Source("made", Path("nowhere"), tuple(items))


def test_a_held_out_domain_is_always_among_those_that_are_drawn():
    source = source_of()
    usual = keep_domains(source, 3).domains
    for held_out in source.domains:
        found = keep_domains(source, 3, (held_out,)).domains
        assert held_out in found and len(found) == 3
        assert len(set(found) & set(usual)) >= 2
        if held_out in usual:
            assert found == usual
    assert keep_domains(source, 0, ("a",)).domains == source.domains


def test_a_run_holds_out_a_domain_that_the_draw_would_drop(images):
    pools, words = Pools(), {"data": str(images), "domains": 2, "on": "resnet", "backbone": "pixels:8"}
    for held_out in ("noto", "twemoji", "openmoji"):
        assert held_out in pools.load(resolve("fedavg", words | {"unseen": held_out})).source.domains


def test_only_the_classes_that_are_named():
    source = source_of()
    found = keep_classes(source, ("z", "x"))
    assert found.classes == ["x", "z"] and len(found.items) == 120
    text = torch.eye(3)
    given = replace(source, embeddings=Embeddings(torch.arange(180)[:, None].float(), text, 1.0))
    kept = keep_classes(given, ("z", "x")).embeddings
    assert torch.equal(kept.text, text[[0, 2]]) and len(kept.x) == 120
    assert keep_classes(source, ()) is source
    with pytest.raises(FedvlmError, match="classes=w: no such class"):
        keep_classes(source, ("w", "x"))
    with pytest.raises(FedvlmError, match="at least two"):
        keep_classes(source, ("x",))


# What is scored


def rows_of(federation: Federation, k: int, split: str = "test") -> list[int]:
    at = SPLITS.index(split)
    low, high = federation.data.bounds[k, at : at + 2]
    return sorted(federation.data.x[low:high, 0].long().tolist())


LAYOUT = Layout(partition="domain-dirichlet", clients=3, alpha=0.3, unseen=("b",))


def test_alignment_of_features_of_length_one_does_not_depend_on_their_length(double):
    """FedCLIP's mask is compared at d times its length, an inferred one; compared=normalised does not depend on it."""
    task = random_task()
    now, sent = ({k: v[None] for k, v in Attention().init(task, seed).items()} for seed in (1, 2))
    draw = torch.Generator().manual_seed(3)
    batch = Batch(torch.randn(1, 8, task.dim, generator=draw), torch.zeros(1, 8).long(), torch.full((1, 8), 1 / 8))

    def gained(unit: bool, scale: float) -> float:
        class Longer(Attention):
            def logits_and_aligned(self, task, params, batch):
                logits, features = super().logits_and_aligned(task, params, batch)
                return logits, scale * features

        model = Model(Longer(), task)
        with_term, without = (
            aligned_loss(model, "cross-entropy", now, sent, batch, strength, unit) for strength in (1.0, 0.0)
        )
        return float(with_term - without)

    assert gained(True, 1.0) == pytest.approx(gained(True, 7.0)) and gained(True, 1.0) > 0
    assert gained(False, 7.0) > 10 * gained(False, 1.0)
    assert resolve("fft-gp", {"compared": "normalised"}).local.compared == "normalised"


def test_clients_are_scored_on_the_images_that_score_says():
    pool = numbered(source_of("abc", each=20).items)
    own = federate(pool, LAYOUT, 1)
    parts = {k: rows_of(own, k) for k in range(9)}
    for score, group in (("domain", lambda k: range(k // 3 * 3, k // 3 * 3 + 3)), ("all", lambda k: range(9))):
        found = federate(pool, replace(LAYOUT, score=score), 1)
        for k in range(9):
            wanted = [j for j in group(k) if (j in own.unseen) == (k in own.unseen)]
            assert rows_of(found, k) == sorted(i for j in wanted for i in parts[j])
            for split in ("train", "val"):
                assert rows_of(found, k, split) == rows_of(own, k, split)
            low, high = found.data.bounds[k, [0, 3]]
            assert found.items[low:high].tolist() == found.data.x[low:high, 0].long().tolist()
            assert torch.equal(
                found.data.y[low:high], own.data.y[torch.from_numpy(np.argsort(own.items))][found.items[low:high]]
            )
    whole = [i for i, item in enumerate(pool.source.items) if item.domain == "b"]
    everything = federate(pool, replace(LAYOUT, unseen_split="all", score="domain"), 1)
    assert rows_of(everything, 3) == whole and rows_of(everything, 0) == rows_of(
        federate(pool, replace(LAYOUT, score="domain"), 1), 0
    )
    alone = federate(pool, replace(LAYOUT, unseen_split="all"), 1)
    assert sorted(rows_of(alone, 3) + rows_of(alone, 4) + rows_of(alone, 5)) == whole
    assert rows_of(alone, 3, "train") == rows_of(alone, 3, "val") == []


def test_each_clients_own_model_on_the_whole_of_a_held_out_domain():
    """FOCoOp's Tables 4, 9, 10: the clients that train are scored on the images of the one that does not, no others."""
    pool = numbered(source_of("abc", each=20).items)
    keys = {"partition": "domain", "clients": 1, "unseen": ("b",), "unseen_split": "all", "score": "unseen"}
    found = federate(pool, Layout(**keys), 1)
    whole = [i for i, item in enumerate(pool.source.items) if item.domain == "b"]
    assert [rows_of(found, k) for k in range(3)] == [whole] * 3 and rows_of(found, 1, "train") == []
    own = federate(pool, Layout(**keys | {"score": "own"}), 1)
    assert [rows_of(found, k, "train") for k in range(3)] == [rows_of(own, k, "train") for k in range(3)]


def test_what_cannot_be_scored_so_is_refused_in_words():
    plain = numbered(source_of("abc").items)
    with pytest.raises(FedvlmError, match="score=domain: these clients are of no single domain"):
        federate(plain, Layout(partition="dirichlet", score="domain"), 1)
    with pytest.raises(FedvlmError, match="score=unseen: nobody is held out"):
        federate(plain, Layout(score="unseen"), 1)
    with pytest.raises(FedvlmError, match="score=all: a site is scored on its own"):
        own_data(plain, Layout(score="all"), 1, ["x", "y", "z"], 0)
    for key in ("score=domain", "unseen_split=all", "classes=x,y"):
        name, _, value = key.partition("=")
        with pytest.raises(FedvlmError, match=f"{name}=.* does not go with federation="):
            refuse_keys(resolve("fedclip", {name: value}))


CUT = {"partition": "domain-dirichlet", "clients": 2, "alpha": 0.3, "split": "50,25,25", "keep": True, "lr": 0.5}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory) -> Path:
    """Embeddings of three domains, which need no encoding."""
    draw = torch.Generator().manual_seed(1)
    text, y, domain = torch.randn(4, 8, generator=draw), torch.arange(240) % 4, torch.arange(240) // 80
    shift = torch.randn(3, 8, generator=draw)
    x = text[y] + shift[domain] + torch.randn(240, 8, generator=draw)
    path = tmp_path_factory.mktemp("embedded") / "made.safetensors"
    named = {"domains": '["noto", "twemoji", "openmoji"]'}
    save_file({"x": x, "y": y, "domain": domain, "text": text}, path, named)
    return path


@pytest.fixture(scope="module")
def scored(embedded, tmp_path_factory):
    """Runs of FedAvg whose clients keep their models, by what is scored."""
    ways = {"own": {}, "domain": {"score": "domain"}, "all": {"score": "all"}}
    ways["val"] = {"personal_split": "val", "unseen_split": "all"}
    folder = tmp_path_factory.mktemp("scored")
    return {name: train_small(embedded, folder / name, "fedavg", **CUT, **way) for name, way in ways.items()}


def test_personal_models_are_scored_on_other_clients_images(scored):
    """Training does not change; the shared model scores the same on a domain as its clients together."""
    last = {name: run.rounds()[-1] for name, run in scored.items()}
    names = [n for n in last["own"]["clients"] if not n.startswith("openmoji")]
    for name in names:
        kept = {way: last[way]["clients"][name]["personal"]["val"] for way in ("own", "domain", "all")}
        assert len(set(kept.values())) == 1
    for domain in ("noto", "twemoji"):
        shared = {last["domain"]["clients"][f"{domain}-{k}"]["shared"]["test"] for k in range(2)}
        assert len(shared) == 1
    everybody = {last["all"]["clients"][n]["shared"]["test"] for n in names}
    assert len(everybody) == 1
    assert len({last[way]["P"] for way in ("own", "domain", "all")}) == 3
    own = last["val"]["personal"]
    assert last["val"]["P"] == own["val"] != own["test"] == last["val"]["acc"]
    record = scored["val"].record
    clients = record.finished.last["clients"]
    values = [[clients[f"{d}-{k}"]["personal"]["val"] for k in range(2)] for d in ("noto", "twemoji")]
    kept = [[v for v in two if v is not None] for two in values]
    assert matrix_summary([row_of(record)])["P"] == pytest.approx(np.mean([np.mean(two) for two in kept]))


def test_tables_say_what_was_scored(scored):
    def said(*names: str) -> str:
        return "\n".join(summarise([scored[n] for n in names]).notes)

    assert "scored on: G on test images of held-out clients, P on test images of the client itself" in said("own")
    assert "P on test images of the client's domain" in said("domain")
    assert "P on test images of all clients that train" in said("all")
    assert "G on all images of held-out clients, P on validation images of the client itself" in said("val")
    both = "the client itself; G on test images of held-out clients, P on test images of the client's domain"
    assert both in said("own", "domain")


def test_every_engine_scores_the_same(scored, embedded, tmp_path, monkeypatch):
    from helpers import InProcess, scores

    from fedvlm.federation.engines import loopback

    monkeypatch.setattr(loopback, "Worker", InProcess)
    run = train_small(embedded, tmp_path / "run", "fedavg", **CUT, score="domain", engine="loopback")
    ours, theirs = scores(scored["domain"])[-1], scores(run)[-1]
    assert ours["clients"] == theirs["clients"] and ours["P"] == theirs["P"]
