"""A site's own account of what it released: over rounds, runs and federations, and through kills."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace

import pytest
import torch
from test_sites import STYLES, answer, begun, federation
from test_sites import Sites as Sites

from fedvlm.cli import main
from fedvlm.errors import Refused
from fedvlm.federation import agent, budget
from fedvlm.federation.budget import Budget
from fedvlm.federation.wire import Header, pack_message, unpack
from fedvlm.privacy.accounting import Release

federation = federation
DELTA = 1e-5


@pytest.fixture(autouse=True)
def own_accounts(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVLM_DATA_HOME", str(tmp_path / "kept"))


def account(run: str = "one", federation: str = "heart", **limits) -> Budget:
    path = str(Budget.path_of("images"))
    return Budget(path, "images", federation, run, **{"epsilon": 0.0, "per_run": 0.0, "delta": DELTA} | limits)


RUNS = [("one", "heart"), ("two", "heart"), ("one", "lung")]


def spend_all(release: Release) -> None:
    for run, federation in RUNS:
        for round in (1, 2, 3, 4):
            account(run, federation).spend(round, f"request {round}", release)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process that is killed is a fork")
@pytest.mark.parametrize("release", [Release(2.0, 1.0, 1), Release(1.5, 0.25, 4)], ids=["client", "example"])
def test_epsilon_is_that_of_dp_accounting_over_runs_federations_and_twenty_kills(release):
    """A process that is killed at any moment asks again for what it may have asked for before."""
    pytest.importorskip("dp_accounting")
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, pld

    draw, counts = random.Random(3), []
    for _ in range(20):
        child = os.fork()
        if not child:
            spend_all(release)
            os._exit(0)
        time.sleep(draw.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        counts.append(len(budget.entries(Budget.path_of("images"))))
    spend_all(release)
    found = budget.entries(Budget.path_of("images"))
    assert len(found) == len(set(found)) == 12 and counts == sorted(counts) and counts[0] < 12
    theirs = pld.PLDAccountant()
    event = GaussianDpEvent(release.noise)
    theirs.compose(event if release.rate == 1 else PoissonSampledDpEvent(release.rate, event), 12 * release.times)
    assert budget.spent((e.release for e in found), DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-3)


def test_a_line_that_was_cut_is_of_nothing_that_left_and_costs_nothing():
    pytest.importorskip("dp_accounting")
    account().spend(1, "a", Release(2.0, 1.0, 1))
    path = Budget.path_of("images")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    account().spend(2, "b", Release(2.0, 1.0, 1))
    assert [e.round for e in budget.entries(path)] == [1, 2]
    assert path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0


def test_what_is_spent_is_refused_before_it_is_written():
    pytest.importorskip("dp_accounting")
    release = Release(4.0, 1.0, 1)
    one = budget.spent([release], DELTA)
    mine = account(epsilon=1.2 * one)
    mine.spend(1, "a", release)
    with pytest.raises(Refused, match="all runs"):
        account("two", "lung", epsilon=1.2 * one).spend(1, "a", release)
    with pytest.raises(Refused, match="a run"):
        account(per_run=1.2 * one).spend(2, "b", release)
    with pytest.raises(Refused, match="all runs"):
        account("two", "lung", epsilon=1.2 * one).check(release, 1)
    mine.spend(1, "a", release)  # the same again
    assert len(budget.entries(Budget.path_of("images"))) == 1


KEYS = {"dp": "example", "epsilon": 4.0, "clip_norm": 1.0}


def test_a_federation_keeps_to_the_budget_of_a_site(federation, capsys):
    """The site's ε is what it agreed to, its scores are not told, and a second run does not fit any more."""
    pytest.importorskip("dp_accounting")
    sites = federation(rules={"twemoji": "epsilon: 5\n"})
    plan = sites.plan("fedavg", unseen=[], **KEYS)
    run = sites.play(plan)
    data = str(sites.place / "data" / "twemoji")
    found = budget.entries(Budget.path_of(data))
    assert [e.round for e in found] == [1, 2]
    about = agent.SiteClient.record(sites.place / "twemoji" / "runs" / plan.name / "clients" / "twemoji")
    epsilon = budget.spent((e.release for e in found), about.budget.delta)
    assert 3.9 < epsilon <= 4.0
    scores = run.rounds()[-1]["clients"]
    assert scores["twemoji"]["shared"] == {"val": None, "test": None}
    assert scores["noto"]["shared"]["test"] is not None and len(budget.entries(Budget.path_of(data))) == 2
    for style in STYLES:  # the processes of another job
        sites.sites[style].close()
        sites.start(style)
    home = str(sites.place / "twemoji")
    assert main(["ledger", home, "--budget"]) == 0
    said = capsys.readouterr()
    assert (
        f"epsilon={epsilon:.3g} spent" in said.out + said.err and f"{5 - epsilon:.3g} of 5 left" in said.out + said.err
    )
    run = sites.play(sites.plan("fedavg", unseen=[], seed=1, **KEYS))
    assert "twemoji does not take part: this site's budget of epsilon=5 for all runs" in sites.status.said[0]
    assert run.rounds()[-1]["missing"] == ["twemoji"]


@pytest.mark.parametrize("step", ["validate", "adjust", "diagnose", "novel.shared"])
def test_what_no_noise_covers_is_not_answered_under_a_budget(federation, step):
    pytest.importorskip("dp_accounting")
    sites = federation(rules={"twemoji": "epsilon: 5\n"})
    one, _ = begun(sites, "twemoji", sites.plan("fedavg", unseen=[], **KEYS))
    with pytest.raises(Refused, match="under a budget"):
        one.client.reply(step, message_of(one), Header(step, 2))


def test_scores_under_a_budget_tell_neither_accuracies_nor_counts(federation):
    pytest.importorskip("dp_accounting")
    sites = federation(rules={"twemoji": "epsilon: 5\ncounts: false\n"})
    one, ready = begun(sites, "twemoji", sites.plan("fedavg", unseen=[], **KEYS))
    values = one.client.reply("score", message_of(one), Header("score", 0)).values
    assert ready.counts == values["count"][0].tolist() == [1, 0, 0]
    assert all(not v.any() for k, v in values.items() if k != "count")


def message_of(one: agent.Agent):
    from fedvlm.core.state import Message

    return Message(dict(one.client.method.initial))


def test_noise_is_of_the_request_and_the_same_for_the_same(federation):
    """Another model, another round: other noise. A process that was killed before it could answer: the same."""
    pytest.importorskip("dp_accounting")
    sites = federation(rules={"twemoji": "epsilon: 5\n"})
    plan = sites.plan("fedavg", unseen=[], **KEYS)
    one, _ = begun(sites, "twemoji", plan)
    ask = pack_message(message_of(one), Header("train", 1, 0, 1))
    first = unpack(answer(one, ask))[1]["shared"]["head"]
    place = one.place / "answer-0"
    assert place.exists()
    again = unpack(answer(agent.Agent(one.home, plan.name), ask))[1]["shared"]["head"]
    place.unlink()  # killed before it kept the answer
    anew = unpack(answer(agent.Agent(one.home, plan.name), ask))[1]["shared"]["head"]
    assert torch.equal(first, again) and torch.equal(first, anew)
    client, message = agent.SiteClient(one.place), message_of(one)
    client.about = replace(client.about, budget=None)  # more than it would answer
    others = [client.reply("train", message, Header("train", 1, k)).shared["head"][0] for k in (1, 2)]
    assert float((others[0] - others[1]).norm()) > 0.1 * float((first - message.shared["head"]).norm())
