"""The site's own view of a run: what it answers, and what it refuses, whatever a server asks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedvlm.core.state import Message
from fedvlm.errors import Refused
from fedvlm.federation.protocol import DIAGNOSE, SCORE, Course, Diary
from fedvlm.federation.wire import Header

PLAN = Course(rounds=2, asks=["train", "adjust"], tells=["sums"])
NAMES = ("train", "adjust", "validate", "score", "diagnose", "outputs", "secure.keys", "look")


@pytest.mark.parametrize(
    ("course", "asked", "place"),
    [
        (PLAN, ("train", 1, 0), 0),
        (PLAN, ("adjust", 2, 1), 1),
        (PLAN, ("score", 0, 0), SCORE),
        (replace(PLAN, diagnoses=True), ("diagnose", 2, 0), DIAGNOSE),
        (replace(PLAN, once=True, every=5), ("score", 1, 0), SCORE),
        (replace(PLAN, secure=True), ("secure.keys", 1, 0), 0),
    ],
)
def test_what_a_plan_has_gets_its_place(course, asked, place):
    assert course.place(Header(*asked), Message({})) == place


@pytest.mark.parametrize(
    ("course", "asked", "extra"),
    [
        (PLAN, ("train", 3, 0), ""),  # a round beyond the plan
        (PLAN, ("train", -1, 0), ""),
        (PLAN, ("train", 0, 0), ""),  # nothing is trained before the first round
        (PLAN, ("train", 1, 1), ""),  # the second exchange adjusts
        (PLAN, ("adjust", 1, 0), ""),
        (PLAN, ("adjust", 1, 2), ""),
        (PLAN, ("adjust", 1, -1), ""),  # of a list that would be the last one
        (PLAN, ("validate", 1, 1), ""),  # not of this method
        (PLAN, ("score", 1, 1), ""),
        (replace(PLAN, every=2), ("score", 1, 0), ""),
        (PLAN, ("diagnose", 2, 0), ""),  # its diagnostics would tell of single clients
        (replace(PLAN, diagnoses=True), ("diagnose", 1, 0), ""),
        (PLAN, ("train", 1, 0), "dp.clip"),  # what the method does not tell
        (PLAN, ("score", 1, 0), "sums"),
        (PLAN, ("secure.masked", 1, 0), ""),
        (replace(PLAN, secure=True), ("train", 1, 0), ""),
        (replace(PLAN, trains=False), ("train", 1, 0), ""),  # unseen= holds this site out
        (PLAN, ("outputs", 2, 0), ""),
    ],
)
def test_what_a_plan_has_not_is_refused(course, asked, extra):
    with pytest.raises(Refused):
        course.place(Header(*asked), Message({}, extra={extra: torch.ones(1)} if extra else {}))


ANY = st.tuples(st.sampled_from(NAMES), st.integers(-1, 4), st.integers(-1, 3), st.integers(0, 2))
OF_PLAN = [("train", 1, 0), ("adjust", 1, 1), ("score", 1, 0), ("train", 2, 0), ("adjust", 2, 1), ("score", 2, 0)]
NEARLY = st.tuples(st.sampled_from(OF_PLAN), st.integers(0, 1)).map(lambda found: (*found[0], found[1]))
REQUESTS = st.one_of(NEARLY, NEARLY, ANY)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(REQUESTS, max_size=25), st.sets(st.integers(0, 24)))
def test_no_place_has_two_answers_and_none_is_outside_the_plan(tmp_path_factory, asked, killed):
    """Whatever a server asks in whatever order, with processes that are killed before their answer is kept."""
    folder, answered, computed = tmp_path_factory.mktemp("site"), dict[tuple, str](), dict[tuple, int]()
    last = -1
    for at, (step, round, exchange, what) in enumerate(asked):
        diary = Diary(folder, sync=False)  # a process of its own
        try:
            place = PLAN.place(Header(step, round, exchange), Message({}))
            stored = diary.admit(round, place, str(what))
        except Refused:
            continue
        key = (round, place)
        assert 0 <= round <= PLAN.rounds and round >= last and answered.setdefault(key, str(what)) == str(what)
        assert place in (0, 1, SCORE)
        last = round
        if stored is None:
            computed[key] = computed.get(key, 0) + 1
            if at not in killed:
                diary.keep(place, str(what).encode())
        else:
            assert stored.decode() == str(what)
    assert len(computed) <= 1 + 3 * PLAN.rounds


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 6), max_size=6))
def test_an_honest_server_that_stops_and_repeats_a_round_gets_the_same_answers(tmp_path_factory, stops):
    """It goes on from its last whole round, however often it is stopped in the middle of one."""
    places = [(r, p) for r in (1, 2) for p in ((0, 1, SCORE))]
    folder, given_to = tmp_path_factory.mktemp("site"), dict[tuple, bytes]()
    at, stops = 0, list(stops)
    while at < len(places):
        if stops and at == stops[0]:
            stops.pop(0)
            at = at // 3 * 3
            continue
        diary, (round, place) = Diary(folder, sync=False), places[at]
        stored = diary.admit(round, place, "the same")
        answer = stored or f"{round}.{place}".encode()
        diary.keep(place, answer)
        assert given_to.setdefault(places[at], answer) == answer
        at += 1
    assert len(given_to) == len(places)


def test_a_round_that_is_over_and_an_exchange_that_was_passed_over_are_refused(tmp_path):
    diary = Diary(tmp_path, sync=True)
    assert diary.admit(1, 1, "a") is None
    with pytest.raises(Refused, match="something else before"):
        diary.admit(1, 1, "b")
    for round, place in ((1, 0), (0, 5)):
        with pytest.raises(Refused):
            diary.admit(round, place, "b")
    diary.keep(1, b"kept")
    assert (tmp_path / "answer-1").stat().st_mode & 0o077 == 0
    assert Diary(tmp_path, True).admit(1, 1, "a") == b"kept"
    assert diary.admit(2, 0, "a") is None and not (tmp_path / "answer-1").exists()


def test_a_secure_sum_may_be_begun_again_until_it_was_opened(tmp_path):
    diary = Diary(tmp_path, sync=True)
    for _ in range(2):
        diary.admit(1, 0, "told")
    diary.open(0)
    diary.admit(1, 0, "told", new=False)
    with pytest.raises(Refused, match="helped to open a sum of round 1 before"):
        diary.admit(1, 0, "told")


def test_a_line_that_was_cut_took_no_place(tmp_path):
    Diary(tmp_path, sync=True).admit(1, 0, "a")
    whole = (tmp_path / "diary.jsonl").read_bytes()
    (tmp_path / "diary.jsonl").write_bytes(whole + b'\n[1, 1, "b')
    assert Diary(tmp_path, sync=True).admit(1, 1, "c") is None
    with pytest.raises(Refused, match="something else before"):
        Diary(tmp_path, sync=True).admit(1, 1, "b")
    assert (tmp_path / "diary.jsonl").stat().st_mode & 0o077 == 0
