"""A liar among ten clients: with the guard the others learn on and the record names it; without, it breaks the run."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from helpers import scores, train_small
from torch.nn import functional as F

from fedvlm.config.config import Setup, resolve
from fedvlm.core.adapter import Task
from fedvlm.data.pool import Pool
from fedvlm.data.source import NO_DOMAIN, Item, Source
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.rounds.guard import Guard
from fedvlm.training import train
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun

CLASSES, EACH, ROUNDS, MARGIN = "abcde", 200, 8, 0.05
REFUSED = ("n = 1e30, update × −1", "n = −0.99 × the others' sum", "all weights NaN", "scores 3,831,417 right answers")
REFUSED += ("all weights 3e38", "update × −1,000")
SHORTENED = ("update × −20",)


@pytest.fixture(scope="module")
def attacks() -> ModuleType:
    """benchmarks/attacks.py, whose table of attacks is used here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        return importlib.import_module("attacks")


def test_the_page_has_what_the_guard_does_not_always_refuse_and_what_happens_without_it(attacks):
    guarded = [["away", *["−0.2"] * 5, "–"], ["n", *["−0.2"] * 5, "refused, quarantined after round 3"]]
    guarded += [["zeros", *["**−9.0**"] * 5, "refused in 1 of 5 runs"], ["loss", *"––––", "**−2.3**", "unseen"]]
    unguarded = [["shapes", *["**crash**"] * 5], ["n", *["**−45.0**"] * 5], ["**withstands**", *["1 of 3"] * 5]]
    text = "\n".join(attacks.folded(list("abcde"), guarded, unguarded))
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert rows == ["| attack", "| ---", "| away", "| zeros"]
    assert "costs: n." in text and "- loss: e **−2.3**" in text
    assert "withstand: a 1 of 3, b 1 of 3" in text and "every merge: shapes." in text


def pool() -> Pool:
    """Embeddings whose classes lie beside those of their names: there is something to learn."""
    draw = torch.Generator().manual_seed(1)
    text, centre = (F.normalize(torch.randn(len(CLASSES), 16, generator=draw), dim=-1) for _ in range(2))
    items = tuple(Item(f"{c}/{i}", NO_DOMAIN, c, "") for c in CLASSES for i in range(EACH))
    noise = 0.2 * torch.randn(len(items), 16, generator=draw)
    x = F.normalize((text / 2 + centre).repeat_interleave(EACH, 0) + noise, dim=-1)
    return Pool(Source("synthetic", Path("nowhere"), items), x, Task(tuple(CLASSES), text, 16, 8.0), "f", "none")


def play(folder: Path, lying: ModuleType, name: str, patch: pytest.MonkeyPatch) -> RunFolder:
    """A run of FedAvg in which client 0 makes this attack."""

    class Engine(lying.Lying):  # type: ignore[name-defined, misc]
        @classmethod
        def open(cls, job):
            return cls(job.method, job.data, lying.BY_NAME[name])

    patch.setattr(Setup, "engine_class", lambda setup: Engine)
    given = {"partition": "iid", "clients": 10, "rounds": ROUNDS, "lr": 0.3, "epochs": 2, "values": "paper"}
    return train.train(PlannedRun(resolve("fedavg", given), pool(), folder))


def accuracy(run: RunFolder) -> float:
    """As recorded after the last round: of the nine honest clients or, where the record is the lie, of all."""
    last = run.rounds()[-1]
    honest = [one["shared"]["test"] for name, one in last["clients"].items() if name != liar(run)]
    return last["shared"]["test"] if last["shared"]["test"] > 1 else float(np.mean(honest))


def liar(run: RunFolder) -> str:
    return run.record.clients[0]


@pytest.fixture(scope="module")
def honest_nine(attacks, tmp_path_factory) -> float:
    with pytest.MonkeyPatch.context() as patch:
        run = play(tmp_path_factory.mktemp("nine"), attacks, "one client stays away", patch)
    assert accuracy(run) > run.rounds()[0]["shared"]["test"] + 0.2  # there is something to lose
    return accuracy(run)


@pytest.mark.parametrize("name", REFUSED + SHORTENED)
def test_mean_learns_on_beside_a_liar_and_the_record_names_it(name, attacks, honest_nine, tmp_path, monkeypatch):
    run = play(tmp_path / "run", attacks, name, monkeypatch)
    assert honest_nine - MARGIN < accuracy(run) <= 1
    trained = run.rounds()[1:]
    if name in SHORTENED:
        assert all(list(r["bounded"]) == [liar(run)] and r["bounded"][liar(run)] > 5 for r in trained)
        assert not any("offences" in r for r in trained)
    else:
        found = [list(r.get("offences", [])) for r in run.rounds() if r["round"] or "score" in name]
        assert found[:3] == [[liar(run)]] * 3 and not any(found[3:])  # nobody asks it again
        assert run.rounds()[-1]["quarantined"] == [liar(run)] == run.record.finished.quarantined


@pytest.mark.parametrize("name", REFUSED + SHORTENED)
def test_the_same_lies_break_mean_without_the_guard(name, attacks, honest_nine, tmp_path, monkeypatch):
    monkeypatch.setattr(Guard, "inspect", lambda *args: None)
    monkeypatch.setattr(train, "usable", lambda state, before: state)
    try:
        found = accuracy(play(tmp_path / "run", attacks, name, monkeypatch))
    except FedvlmError:
        return  # not a number: nobody can train or score it
    assert found < honest_nine - 4 * MARGIN or found > 1


@pytest.mark.parametrize("method", ["fedavg", "fedclip", "fedot"])
@pytest.mark.parametrize("layout", [{}, {"partition": "iid", "clients": 10, "unseen": ""}])
def test_an_honest_run_is_the_same_with_and_without_the_bound(method, layout, images, tmp_path):
    bounded, free = (train_small(images, tmp_path / str(b), method, bound=b, **layout) for b in (5, 0))
    assert not any("bounded" in r or "offences" in r for r in bounded.rounds())
    assert scores(bounded) == scores(free)


def test_every_merge_has_a_column_and_every_attack_a_merge(attacks):
    assert sorted([*attacks.MERGES, *attacks.NOT_TRIED]) == sorted(registry.names("merge"))
    assert all(merge in attacks.MERGES for attack in attacks.ATTACKS for merge in attack.only)
    assert len(attacks.BY_NAME) == len(attacks.ATTACKS) + 1 and set(attacks.QUICK_ATTACKS) < set(attacks.BY_NAME)
