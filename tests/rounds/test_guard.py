"""One client lies: the server refuses what is out of range, shortens what is too long, and goes on with the others."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import malformed
import numpy as np
import pytest
import torch
from helpers import random_data, random_task, same, scores, small_setup, train_small
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvlm.core.cohort import Cohort
from fedvlm.core.schema import Field, Schema
from fedvlm.core.state import Reply, State
from fedvlm.data.pool import Pools
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import BadMessage, NoQuorum, VoidRound
from fedvlm.federation import wire
from fedvlm.parts.adapters.head import Head
from fedvlm.parts.local.sgd import Sgd
from fedvlm.parts.merge.classwise import Classwise
from fedvlm.parts.merge.mean import Mean
from fedvlm.parts.metrics.ece import Ece
from fedvlm.parts.metrics.macro_f1 import MacroF1
from fedvlm.rounds.guard import Guard
from fedvlm.rounds.method import Method
from fedvlm.training import train
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun

ABLE = np.array([0, 1, 2, 3, 4])
NAMES = tuple("abcdef")


def method_and_data(merge=None):
    task = random_task()
    metrics = {"ece": Ece(), "macro_f1": MacroF1()}
    return Method.build(Head(), Sgd(lr=0.1, batch=4), merge or Mean(), task, metrics=metrics), random_data(task)


class Lying:
    """An engine whose client 1 says something else."""

    def __init__(self, engine, lie, step="train", liar=1):
        self.engine, self.lie, self.step, self.liar = engine, lie, step, liar

    def run(self, step, ids, message, round, exchange):
        for reply in self.engine.run(step, ids, message, round, exchange):
            for at, i in enumerate(reply.ids):
                row = Reply(
                    reply.ids[at : at + 1],
                    {k: v[at : at + 1].clone() for k, v in reply.values.items()},
                    {k: v[at : at + 1].clone() for k, v in reply.shared.items()},
                )
                if i == self.liar and step == self.step:
                    self.lie(row, message)
                yield row


def guard_for(method, data, log=None, bound=5.0) -> Guard:
    declared = np.diff(data.bounds, axis=1)
    return Guard(method, NAMES, declared, data.extras, bound, [].append if log is None else log.append)


def set_to(name, value):
    def lie(reply, message):
        reply.values[name][:] = value

    return lie


def shared_as(change):
    def lie(reply, message):
        reply.shared["head"] = change(reply.shared["head"])

    return lie


LIES = [
    ("train", set_to("n", 1e30), "n out of its range"),
    ("train", set_to("n", -30), "n out of its range"),
    ("train", set_to("n", 0), "n out of its range"),
    ("train", set_to("n", 1.5), "n out of its range"),
    ("train", set_to("n", math.nan), "n with numbers that are not finite"),
    ("train", set_to("loss", 1e30), "loss out of its range"),
    ("train", shared_as(lambda head: head * math.nan), "head with numbers that are not finite"),
    ("train", shared_as(lambda head: head + math.inf), "head with numbers that are not finite"),
    ("train", shared_as(lambda head: head.half()), "torch.float16"),
    ("train", shared_as(lambda head: head[..., :-1]), "sent head as"),
    ("score", set_to("shared.score", 3831417), "shared.score out of its range"),
    ("score", set_to("shared.score", -1), "shared.score out of its range"),
    ("score", set_to("count", 1e6), "count out of its range"),
    ("score", set_to("shared.loss", -1e30), "shared.loss out of its range"),
    ("score", set_to("shared.ece", 1e4), "shared.ece out of its range"),
    ("score", set_to("shared.macro_f1", 1e4), "shared.macro_f1 out of its range"),
    ("validate", set_to("val", 1e20), "val out of its range"),
]


@pytest.mark.parametrize(("step", "lie", "why"), LIES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_lie_is_refused_and_named(step, lie, why):
    method, data = method_and_data()
    log: list[str] = []
    guard = guard_for(method, data, log)
    cohort = Cohort(Lying(Stacked(method, data, 6), lie, step), ABLE, 1, guard=guard)
    reply = cohort.ask(step, method.init(6).message())
    assert reply.ids.tolist() == [0, 2, 3, 4] and cohort.notes["answered"] == 4
    (line,) = log
    assert "client b is left out" in line and why in line
    record = guard.end_round(1)
    assert why in record["offences"]["b"] and set(record) == {"offences"}


def test_a_client_trains_on_no_more_than_the_training_images_it_declared():
    """Where it has more for testing, those do not count."""
    method, _ = method_and_data()
    data = random_data(random_task(), sizes=((9, 3, 20),) * 5)
    guard = guard_for(method, data)
    cohort = Cohort(Lying(Stacked(method, data, 5), set_to("n", 10)), ABLE, 1, guard=guard)
    assert cohort.ask("train", method.init(5).message()).ids.tolist() == [0, 2, 3, 4]
    assert "n out of its range" in guard.end_round(1)["offences"]["b"]


def test_an_honest_round_is_untouched():
    method, data = method_and_data()
    guard, bare = guard_for(method, data), Stacked(method, data, 6)
    for step in ("train", "score", "validate"):
        expected = Cohort(bare, ABLE, 1).ask(step, method.init(6).message())
        found = Cohort(Stacked(method, data, 6), ABLE, 1, guard=guard).ask(step, method.init(6).message())
        assert found.ids.tolist() == expected.ids.tolist()
        same(expected.values, found.values)
        same(expected.shared, found.shared)
    assert guard.end_round(1) == {}


def stretched(times):
    """An update of so many lengths of the honest one."""

    def lie(reply, message):
        move = (reply.shared["head"] - message.shared["head"]).double()
        reply.shared["head"][:] = (message.shared["head"] + times * move).clamp(-3e38, 3e38)

    return lie


def test_a_long_update_is_shortened_to_the_bound():
    method, data = method_and_data()
    guard, message = guard_for(method, data), method.init(6).message()
    honest = Cohort(Stacked(method, data, 6), ABLE, 1).ask("train", message).shared["head"]
    lengths = (honest - message.shared["head"]).flatten(1).norm(dim=1)
    engine = Lying(Stacked(method, data, 6), stretched(-50))
    sent = Cohort(engine, ABLE, 1, guard=guard).ask("train", message).shared["head"]
    found = (sent - message.shared["head"]).flatten(1).norm(dim=1)
    others = [0, 2, 3, 4]
    assert torch.equal(sent[others], honest[others])
    median = np.median([*lengths[others].tolist(), 1e99])
    assert found[1] == pytest.approx(5 * median, rel=1e-5)
    assert 10 < guard.end_round(1)["bounded"]["b"] < 100


def test_clients_that_stand_still_do_not_lower_the_bound():
    """Of five clients two do not move, and the others by 1, 2 and 7.9: with bound=4 nobody is too long."""
    method, data = method_and_data()
    message = method.init(6).message()
    move = torch.zeros(5, *message.shared["head"].shape)
    move[:, 0, 0] = torch.tensor([0.0, 1.0, 0.0, 2.0, 7.9])
    reply = Reply(ABLE, {"n": torch.ones(5), "loss": torch.zeros(5)}, {"head": message.shared["head"] + move})
    guard = guard_for(method, data, bound=4.0)
    inspection = guard.inspect("train", message, 1)
    (found,) = [*inspection.passed(reply), *inspection.rest()]
    same(found.shared, reply.shared)
    assert guard.end_round(1) == {}


@pytest.mark.parametrize("times", [-100_000, 1e30, 3e38, -1e300])
def test_an_update_far_beyond_the_others_is_refused(times):
    method, data = method_and_data()
    guard, message = guard_for(method, data), method.init(6).message()
    cohort = Cohort(Lying(Stacked(method, data, 6), stretched(times)), ABLE, 1, guard=guard)
    assert cohort.ask("train", message).ids.tolist() == [0, 2, 3, 4]
    record = guard.end_round(1)
    assert "times the round's median length" in record["offences"]["b"] and "bounded" not in record


def test_the_bound_may_be_switched_off_and_needs_three_clients():
    method, data = method_and_data()
    message = method.init(6).message()
    for bound, ids in ((0.0, ABLE), (5.0, ABLE[:2])):
        guard = guard_for(method, data, bound=bound)
        cohort = Cohort(Lying(Stacked(method, data, 6), stretched(-1000)), ids, 1, guard=guard)
        head = cohort.ask("train", message).shared["head"]
        assert (head - message.shared["head"])[1].norm() > 100 * (head - message.shared["head"])[0].norm()
        assert guard.end_round(1) == {}


def test_a_large_cohort_is_bounded_without_holding_all_of_it(monkeypatch):
    """The median is then that of the replies that fit into memory."""
    monkeypatch.setattr("fedvlm.rounds.guard.HELD_BYTES", 1)
    monkeypatch.setattr("fedvlm.rounds.guard.HELD_CLIENTS", 3)
    method, data = method_and_data()
    guard = guard_for(method, data)
    lying = Lying(Stacked(method, data, 1), stretched(-30), liar=4)
    inspection = guard.inspect("train", message := method.init(6).message(), 1)
    replies = [r for came in lying.run("train", ABLE, message, 1, 0) for r in inspection.passed(came)]
    replies += inspection.rest()
    assert [int(r.ids[0]) for r in replies] == [0, 1, 2, 3, 4] and set(guard.bounded) == {4}


def test_mean_with_a_liar_among_five_stays_near_the_others():
    method, data = method_and_data()
    honest = method.round(method.init(6), Cohort(Stacked(method, data, 6), ABLE, 1)).shared["head"]
    start = method.initial["head"]

    def after(lie, guard):
        cohort = Cohort(Lying(Stacked(method, data, 6), lie), ABLE, 1, guard=guard)
        return method.round(method.init(6), cohort).shared["head"]

    for lie in (stretched(-1000), set_to("n", 1e30), set_to("n", -1e30)):
        guarded, bare = after(lie, guard_for(method, data)), after(lie, None)
        assert (guarded - honest).norm() < 5 * (honest - start).norm()
        assert not torch.allclose(bare, guarded)
    assert (after(stretched(-1000), None) - honest).norm() > 50 * (honest - start).norm()


def test_three_offences_end_in_quarantine_and_a_resumed_run_remembers():
    method, data = method_and_data()
    guard, records = guard_for(method, data), []
    for round in range(1, 6):
        cohort = Cohort(Lying(Stacked(method, data, 6), set_to("n", -1)), ABLE, round, guard=guard)
        cohort.ask("train", method.init(6).message())
        cohort.ask("score", method.init(6).message())
        records.append(guard.end_round(round))
    assert ["b" in r.get("offences", {}) for r in records] == [True, True, True, False, False]
    assert [r.get("quarantined") for r in records] == [None, None, ["b"], ["b"], ["b"]]
    resumed = guard_for(method, data)
    resumed.restore(r.get("offences", {}) for r in records)
    assert resumed.quarantined == [1] and resumed.to_ask(ABLE, 1, 6, last=True).tolist() == [0, 2, 3, 4]
    cohort = Cohort(Stacked(method, data, 6), ABLE, 6, guard=resumed)
    cohort.ask("train", method.init(6).message())
    assert cohort.bytes_down == 4 * method.init(6).message().nbytes  # nothing is sent to it


def test_a_resumed_run_does_not_ask_who_is_in_quarantine(images, tmp_path, monkeypatch):
    """Stopped after three rounds with a liar and resumed, it is the run that was not stopped."""
    run_step = Stacked.run

    def lying(self, step, ids, message, round, exchange):
        yield from Lying(SimpleNamespace(run=partial(run_step, self)), set_to("n", -1)).run(
            step, ids, message, round, exchange
        )

    def stop(record):
        if record["round"] == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Stacked, "run", lying)
    keys = {"partition": "iid", "clients": 4, "unseen": "", "rounds": 5}
    whole = train_small(images, tmp_path / "whole", "fedavg", **keys)
    setup = small_setup(images, "fedavg", **keys)
    with pytest.raises(KeyboardInterrupt):
        train.train(PlannedRun(setup, Pools().load(setup), tmp_path / "parts"), stop)
    again = train.train(PlannedRun(setup, Pools().load(setup), tmp_path / "parts"))
    assert [len(r.get("quarantined", [])) for r in whole.rounds()] == [0, 0, 0, 1, 1, 1]
    assert scores(again) == scores(whole)


def test_a_late_client_rests_longer_each_time_unless_it_is_needed():
    method, data = method_and_data()
    guard = guard_for(method, data)
    asked = []
    for round in range(1, 12):
        ids = guard.to_ask(ABLE, 4, round, last=False)
        asked.append(1 in ids)
        if 1 in ids:
            guard.failed(1, round, "no answer in time", late=True)
        guard.end_round(round)
    assert asked == [True, False, True, False, False, True, False, False, False, False, True]
    assert 1 in guard.to_ask(ABLE, 5, 12, last=False)  # else there would be no quorum
    assert 1 in guard.to_ask(ABLE, 4, 12, last=True)  # the last round asks everybody


def test_class_counts_beyond_what_a_client_declared_are_refused():
    method, data = method_and_data(Classwise())
    guard = guard_for(method, data)
    lie = set_to("class_counts", 1e6)
    reply = Cohort(Lying(Stacked(method, data, 6), lie), ABLE, 1, guard=guard).ask("train", method.init(6).message())
    assert 1 not in reply.ids


def test_labels_out_of_range_or_fewer_than_embeddings_are_refused():
    method, data = method_and_data()
    guard = guard_for(method, data)
    schema = Schema({"embeddings": Field((-1, 4), low=-1, high=1), "labels": Field((-1,), low=0, high=2, whole=True)})

    def wrong(embeddings, labels):
        reply = Reply(np.array([0]), {"embeddings": embeddings[None], "labels": labels[None]})
        return [o.reason for o in guard.violations(reply, schema, {})]

    most = int(guard.declared[0, 0])
    assert wrong(torch.zeros(3, 4), torch.tensor([0.0, 1, 2])) == []
    assert "different lengths" in wrong(torch.zeros(3, 4), torch.zeros(2))[0]
    assert "labels out of its range" in wrong(torch.zeros(3, 4), torch.tensor([0.0, 1, 3]))[0]
    assert "labels out of its range" in wrong(torch.zeros(3, 4), torch.tensor([0.0, 1, 0.5]))[0]
    assert "more embeddings than" in wrong(torch.zeros(most + 1, 4), torch.zeros(most + 1))[0]


def test_a_variance_below_zero_is_refused():
    method, data = method_and_data()
    guard, sent = guard_for(method, data), {"bn.running_var": torch.ones(3)}
    reply = Reply(np.array([0, 1]), {}, {"bn.running_var": torch.tensor([[1.0, 2, 3], [1, -2, 3]])})
    assert [o.client for o in guard.violations(reply, Schema({}, shared=True), sent)] == [1]


def test_a_state_that_is_not_finite_is_never_kept():
    before = State({"w": torch.zeros(2)}, {}, {"after": torch.tensor([math.nan, 1.0])})
    kept = before._replace(server={"after": torch.tensor([math.nan, 2.0])})
    assert train.usable(kept, before) is kept
    for bad in (
        before._replace(shared={"w": torch.tensor([0.0, math.inf])}),
        before._replace(task={"text": torch.tensor([math.nan])}),
        before._replace(server={"after": torch.tensor([math.nan, math.nan])}),
        before._replace(server={"after": torch.tensor([math.inf, 1.0])}),
    ):
        with pytest.raises(VoidRound, match="not finite"):
            train.usable(bad, before)


def test_weights_of_3e38_cost_a_round_and_not_the_model(images, tmp_path, monkeypatch):
    """Without bound= the mean overflows: the round is void, and what was saved stands."""
    run_step = Stacked.run

    def overflowing(self, step, ids, message, round, exchange):
        for reply in run_step(self, step, ids, message, round, exchange):
            if step == "train" and round == 2:
                reply.shared["head"][:] = 3e38
            yield reply

    monkeypatch.setattr(Stacked, "run", overflowing)
    average = Mean.average

    def inflated(self, *args, **kwargs):
        found = average(self, *args, **kwargs)
        return found._replace(mean={k: v * 10 for k, v in found.mean.items()})  # 3e38 × 10 is infinite

    monkeypatch.setattr(Mean, "average", inflated)
    run = train_small(images, tmp_path / "run", rounds=3, bound=0)
    records = run.rounds()
    assert "not finite" in records[2]["void"] and "void" not in records[3] and run.record.result.void == 1
    assert all(v.isfinite().all() for v in run.load()[0].shared.values())


def test_a_client_that_is_not_in_the_scores_is_named_and_too_few_are_no_score(images, tmp_path, monkeypatch):
    run_step = Stacked.run

    def without(lost, when):
        def run(self, step, ids, message, round, exchange):
            gone = lost if step == "score" and when(round) else []
            yield from run_step(self, step, ids[~np.isin(ids, gone)], message, round, exchange)

        return run

    monkeypatch.setattr(Stacked, "run", without([0], lambda round: True))
    run = train_small(images, tmp_path / "one", rounds=2)
    assert run.record.result.last["missing"] == ["noto"]
    monkeypatch.setattr(Stacked, "run", without([0, 1], lambda round: round == 1))
    rounds = train_small(images, tmp_path / "two", rounds=2).rounds()
    assert "1 of 3 clients answered" in rounds[1]["unscored"] and "P" not in rounds[1] and "P" in rounds[2]
    monkeypatch.setattr(Stacked, "run", without([0, 1], lambda round: round == 2))
    with pytest.raises(NoQuorum, match="the last round cannot be scored"):
        train_small(images, tmp_path / "three", rounds=2)
    assert RunFolder(tmp_path / "three").load()[1] == 1  # and resume repeats the last round


SHARED = method_and_data(Classwise())
GUARD = guard_for(*SHARED)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_malformed_replies_are_refused_or_harmless(seed):
    """Structure-aware: whatever a client sends, the server has a fitting reply or an offence, never an exception."""
    method, _ = SHARED
    schema, message = GUARD.schema("train"), method.init(6).message()
    frame = malformed.reply(seed, schema, message.shared, int(GUARD.declared[1, 0]))
    try:
        header, parts = wire.unpack(frame)
        reply = wire.to_reply(1, parts)
    except BadMessage:
        return
    inspection = GUARD.inspect("train", message, 1)
    for accepted in (*inspection.passed(reply), *inspection.rest()):
        assert all(v.isfinite().all() for v in (*accepted.values.values(), *accepted.shared.values()))
        assert 0 < accepted.values["n"].item() <= GUARD.declared[1, 0]
        assert isinstance(header.ticket, int) and isinstance(header.error, str)


def test_an_honest_reply_is_what_is_damaged():
    """So that the test above does not only see replies that are refused for one reason."""
    method, _ = SHARED
    schema, shared = GUARD.schema("train"), method.initial
    parts = malformed.honest(schema, shared, int(GUARD.declared[1, 0]))
    assert GUARD.violations(wire.to_reply(1, parts), schema, shared) == []


@pytest.mark.parametrize("header", ["[]", "3", '{"ticket": "7"}', '{"error": 5}', '{"step": []}', '{"odd": 1}', "{"])
def test_a_header_of_another_kind_is_refused(header):
    from safetensors.torch import save

    with pytest.raises(BadMessage, match="not readable"):
        wire.unpack(save({"values/n": torch.ones(1)}, {"header": header}))


def test_the_longest_reply_follows_from_what_is_expected():
    schema = Schema({"n": Field(), "embeddings": Field((-1, 8))}, shared=True)
    shared = {"w": torch.zeros(100, 10)}
    assert 4000 + 8 * 8 * 50 < wire.longest_reply(schema, shared, 50) < 100_000
    frame = wire.pack(wire.Header(), {"values": {"n": torch.ones(1)}, "shared": {"w": shared["w"][None]}})
    assert len(frame) < wire.longest_reply(schema, shared, 0)


def test_a_round_that_nobody_answers_says_why():
    guard = guard_for(*SHARED)

    class Silent:
        def run(self, step, ids, message, round, exchange):
            guard.failed(0, round, "no link")
            return iter(())

    with pytest.raises(NoQuorum, match=r"0 of 1 clients answered \(client .* is left out: no link\)"):
        Cohort(Silent(), np.array([0]), 1, guard=guard).ask("train", SHARED[0].init(5).message())
