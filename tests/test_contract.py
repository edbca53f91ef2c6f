"""What every adapter × local × merge must do, whoever wrote it: one parametrised contract."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TINY, example

from fedvlm import parts
from fedvlm.backbones.text import TextTower
from fedvlm.config import recipe, recipes
from fedvlm.core import Cohort, FedvlmError, nbytes, told
from fedvlm.engines.stacked import Stacked
from fedvlm.method import Method

RULES = {"lr": 0.05, "batch": 4, "epochs": 2, "momentum": 0.5, "weight_decay": 0.01}
ABLE = np.array([0, 1, 2, 3, 4])  # client 5 has nothing to train on


def build(adapter: str, local: str, merge: str, **rules) -> Method:
    gentle = {"lr": 0.005} if adapter == "resnet" else {}  # batch norm over a few numbers: rounding errors grow fast
    gentle |= {"lr": 0.02} if local == "bdro" and adapter == "mlp" else {}  # its hardest examples pull strongly
    chosen = parts.find("local", local)(**(RULES | gentle | rules))
    shape = TINY.get(adapter, {}) | ({"towers": "image"} if merge == "text_server" and adapter == "lora" else {})
    kind = parts.find("adapter", adapter)(**shape)
    return Method.build(kind, chosen, parts.find("merge", merge)(), example(adapter)[0], seed=5)


PUBLISHED = {(r.adapter, r.local, r.merge) for r in map(recipe, recipes())}


def valid(names) -> bool:
    try:
        build(*names)
    except FedvlmError:
        return False
    return True


def quick(names) -> bool:
    """Networks are slow: every local rule and every merge once with two of them, and with each two pairs and those it
    was published with."""
    adapter, local, merge = names
    if not parts.find("adapter", adapter).heavy or (local, merge) in (("sgd", "mean"), ("bgp", "faa")):
        return True
    if names in PUBLISHED and parts.find("adapter", adapter).needs:
        return True
    return adapter in ("resnet", "lstm") and (merge == "mean" or local == "sgd")


EVERY = [c for c in itertools.product(*(parts.names(axis) for axis in parts.AXES)) if quick(c) and valid(c)]
# every combination is the same side by side, sends what it may and counts it; the rest of the contract is asked of all
# combinations with a shared and with a private adapter, and of each part once with every other adapter
WHOLE = {"test_stacked_is_serial", "test_private_never_goes_up", "test_bytes_are_exact"}
FULLY = {"head", "rotation", *(a for a in parts.names("adapter") if parts.find("adapter", a).heavy)}
SOME = [c for c in EVERY if c[0] in FULLY or c[1] == "sgd" or c[2] == "mean" or c in PUBLISHED]


def play(method, data, chunk, rounds=3, ids=ABLE, rows=None, state=None, start=1, lost=frozenset()):
    """The state, the private rows and the scores after some rounds."""
    engine = Stacked(method, data, chunk, rows)
    state = state or method.init(len(data))
    cohort = None
    for round in range(start, start + rounds):
        cohort = Cohort(engine, ids, round, lost=lost)
        state = method.round(state, cohort)
    everybody = np.arange(len(data))
    scores = Cohort(engine, everybody, start + rounds - 1).ask("score", state.shared)[1]
    return state, engine.rows.read(everybody, start + rounds - 1), scores, cohort


def close(a, b, tolerance=1e-9):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


def message(method):
    """What the server sends in the first round."""
    sent = {}

    class Ear:
        def run(self, step, ids, down, round, exchange):
            sent.update(down)
            yield from ()

    with contextlib.suppress(FedvlmError, ZeroDivisionError, IndexError, KeyError):
        method.round(method.init(6), Cohort(Ear(), ABLE, 1))
    return sent


def same(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def pytest_generate_tests(metafunc):
    if "method" in metafunc.fixturenames:
        chosen = EVERY if metafunc.function.__name__ in WHOLE else SOME
        if (
            metafunc.function is test_stacked_is_serial_with_adam
        ):  # an optimiser is a client's: the server does not matter
            chosen = [c for c in SOME if c[2] == "mean" or c[1] != "sgd"]
        metafunc.parametrize("method", chosen, indirect=True, ids="-".join)


@pytest.fixture
def method(request, double):
    return build(*request.param)


@pytest.fixture
def data(double, request):
    """Of the kind the method learns from."""
    if "method" not in request.fixturenames:
        return example("head")[1]
    return example(parts_of(request.getfixturevalue("method"))[0])[1]


def test_stacked_is_serial(method, data):
    """And what is sent down stays as it is."""
    sent = [{k: v.clone() for k, v in part.items()} for part in (method.initial, method.newcomer)]
    state, rows, scores, _ = play(method, data, chunk=1)
    for chunk in (2, 6):
        other_state, other_rows, other_scores, _ = play(method, data, chunk)
        close(state.shared, other_state.shared)
        close(rows, other_rows)
        close(scores, other_scores)
    same(sent[0], method.initial)
    same(sent[1], method.newcomer)


def test_stacked_is_serial_with_adam(method, data):
    adam = build(*(parts_of(method)), optimiser="adam", lr=0.01)
    close(*(play(adam, data, chunk, rounds=2)[0].shared for chunk in (1, 6)), tolerance=1e-8)


def parts_of(method):
    return [type(getattr(method, axis)).__module__.rsplit(".", 1)[-1] for axis in parts.AXES]


def test_private_never_goes_up(method, data):
    engine = Stacked(method, data, 6)
    down = message(method)
    for ids, up in engine.run("train", ABLE, down, 1, 0):
        assert set(up) == {k for k in down if not told(k)} | set(method.sends)
        assert not set(up) & set(method.newcomer)
        assert all(len(v) == len(ids) for v in up.values())


def test_diagnoses_are_one_number_a_client(method, data):
    """Also where what is diagnosed is shared, and there is one for all."""
    bare = replace(method.adapter, private=())
    for kind in (method, Method.build(bare, method.local, method.merge, method.task, 5)):
        for chunk in (1, 6):
            _, told = Cohort(Stacked(kind, data, chunk), ABLE, 1).ask("diagnose", kind.initial)
            assert set(told) == set(kind.adapter.watches) and all(v.shape == (len(ABLE),) for v in told.values())


def test_neighbours_do_not_matter(method, data):
    """Padded is ragged: a client gets the same beside larger ones as alone."""
    engine = Stacked(method, data, 6)
    together = {
        int(i): {k: v[n] for k, v in up.items()}
        for ids, up in engine.run("train", ABLE, message(method), 1, 0)
        for n, i in enumerate(ids)
    }
    for i in ABLE:
        alone = Stacked(method, data, 1)
        ((_, up),) = alone.run("train", np.array([i]), message(method), 1, 0)
        close({k: v[0] for k, v in up.items()}, together[int(i)])


def test_order_of_clients_does_not_matter(method, data):
    for chunk in (1, 6):
        a, b = (play(method, data, chunk, rounds=2, ids=ids)[0] for ids in (ABLE, ABLE[::-1].copy()))
        same(a.shared, b.shared)


def test_missing_clients_are_absent(method, data):
    state, rows, _, cohort = play(method, data, 6, lost=frozenset({0, 3}))
    fewer = play(method, data, 6, ids=np.array([1, 2, 4]))[0]
    same(state.shared, fewer.shared)
    assert cohort.notes["answered"] == 3 and set(cohort.notes["weights"]) == {1, 2, 4}
    for name, start in method.newcomer.items():
        assert torch.equal(rows[name][0], start)


def test_goes_on_bit_for_bit(method, data, tmp_path):
    """Two rounds, a fresh engine on the same rows, two more: the same bits as four at a stretch. A round that was
    begun and lost in between changes nothing."""
    whole, whole_rows, *_ = play(method, data, 6, rounds=4)
    state, *_ = play(method, data, 6, rounds=2, rows=tmp_path / "rows")
    play(method, data, 6, rounds=1, rows=tmp_path / "rows", state=state, start=3)
    state, rows, *_ = play(method, data, 6, rounds=2, rows=tmp_path / "rows", state=state, start=3)
    same(whole.shared, state.shared)
    same(whole_rows, rows)


def test_bytes_are_exact(method, data):
    *_, cohort = play(method, data, 6, rounds=1, lost=frozenset({1}))
    sent = message(method)
    shared, rows = (
        nbytes({k: v for k, v in sent.items() if not told(k)}),
        sum(data.counts("train")[i] for i in (0, 2, 3, 4)),
    )
    loose = 8 * rows * sum(-math.prod(shape) for shape in method.sends.values() if -1 in shape)  # a row an example
    assert cohort.bytes_down == cohort.exchange * 5 * nbytes(sent)
    assert cohort.bytes_up == 4 * (shared + 2 * method.extra) + loose + (cohort.exchange - 1) * 4 * 8


def test_a_newcomer_is_defined(method, data):
    """A client that never trained gets the shared view of everybody: its personal model is the newcomer's."""
    if not method.generalises:
        pytest.skip("nothing is shared")
    *_, scores, _ = play(method, data, 6)
    if method.newcomer:
        close({"x": scores["shared.score"][5]}, {"x": scores["personal.score"][5]})
        close({"x": scores["shared.loss"][5]}, {"x": scores["personal.loss"][5]})


def test_training_lowers_the_loss(method, data):
    if not method.trains:
        pytest.skip("nothing is trained")
    view = "personal" if method.newcomer else "shared"
    loss = [play(method, data, 6, rounds=r)[2][f"{view}.loss"][:5, 0].sum() for r in (0, 4)]
    assert loss[1] < loss[0]


@pytest.mark.parametrize("adapter", [a for a in parts.names("adapter") if parts.find("adapter", a).transposes])
def test_slopes_by_hand_are_autograds(adapter, data):
    from fedvlm.local.descent import by_autograd
    from fedvlm.tasks import cross_entropy

    model = build(adapter, "sgd", "mean").model
    params = {k: v + 0.1 * torch.randn(len(ABLE), *v.shape) for k, v in model.adapter.init(model.task, 1).items()}
    large = Stacked(build(adapter, "sgd", "mean"), data, 6).at(np.array([0, 2, 4, 1, 3]), 1)
    for batch in large.batches(4):
        now = {k: v[: len(batch.y)] for k, v in params.items()}
        loss, hand = model.slopes("cross-entropy")(now, batch)
        other, auto = by_autograd(lambda p, b: cross_entropy(model.logits(p, b.x), b))(now, batch)
        torch.testing.assert_close(loss, other)
        for a, b in zip(hand, auto, strict=True):
            torch.testing.assert_close(a, b)


READERS = [n for n in parts.names("adapter") if parts.find("adapter", n).needs in ("text tower", "both towers")]


@pytest.mark.parametrize("name", [n for n in READERS if n not in ("conditional", "visual")])  # an image's own, and none
def test_words_are_read_once_however_many_images(name, double, monkeypatch):
    """An evaluation in small blocks, with outsiders to be told, reads no more than one block without them would."""
    method, (_, data) = build(name, "sgd", "mean"), example(name)
    nouns = getattr(method.adapter, "count", 0)
    read, plain = [], TextTower._read

    def count(tower, ends, shared, past, own, clients, *rest):
        read.append(clients * len(ends))
        return plain(tower, ends, shared, past, own, clients, *rest)

    def reads(block, outside, beforehand):
        read.clear()
        with monkeypatch.context() as patch:
            patch.setattr(type(method.adapter), "block", block)
            if not beforehand:
                patch.setattr(type(method.adapter), "read", lambda self, task, params, before: params)
            engine = Stacked(method, replace(data, outside=data.x[:9] if outside else None), 6)
            Cohort(engine, np.arange(6), 0).ask("score", method.init(6).shared)
        return sum(read)

    monkeypatch.setattr(TextTower, "_read", count)
    once = reads(1 << 16, False, False)
    assert reads(2, True, True) <= once + nouns * len(method.views) < reads(2, True, False)
    assert reads(2, True, True) == reads(1 << 16, True, True)
