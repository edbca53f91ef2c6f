"""Benches: the frozen model beside the methods, sweeps that choose on validation, and what to do next."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from helpers import other_values
from run_folders import write

import fedvlm
from fedvlm import api
from fedvlm.cli import main
from fedvlm.config.config import Config, resolve
from fedvlm.core.tasks import CLASSIFICATION
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.studies import comparison, sweep
from fedvlm.training import planning
from fedvlm.training.folder import RunFolder

GRID = ("lr=1e-6,0.05", "mu=0.01,1")


def words(images, out, *more):
    return [f"data={images}", "unseen=noto", "seeds=1,2", "rounds=2", "jobs=1", f"out={out}", *more]


@pytest.fixture(scope="module")
def swept(images, tmp_path_factory):
    """Two methods with one grid, of which fedavg has no mu."""
    out = tmp_path_factory.mktemp("sweep") / "runs"
    assert main(["bench", "fedavg", "fedprox", *GRID, *words(images, out)]) == 0
    return out


def test_the_table_has_the_value_that_validation_chose(swept):
    tries = [r.record for r in fedvlm.runs(swept / "sweep")]
    assert len(tries) == 2 + 4 and {r.seed for r in tries} == {1}
    scores = {
        r.local.settings["lr"]: (r.finished.last["shared"]["val"] + r.finished.last["personal"]["val"]) / 2
        for r in tries
        if r.method.name == "fedavg"
    }
    assert scores.keys() == {1e-6, 0.05} and len(set(scores.values())) == 2
    chosen = max(scores, key=lambda lr: scores[lr])
    runs = fedvlm.runs(swept)  # without what was tried
    found = [(r.record.method.name, r.record.seed) for r in runs]
    assert sorted(found) == [(m, s) for m in ("fedavg", "fedprox", "zero-shot") for s in (1, 2)]
    assert {r.record.local.settings["lr"] for r in runs if r.record.method.name == "fedavg"} == {chosen}


def scored(root, lr: float, shared: float, personal: float, test: float, before: float) -> RunFolder:
    """A finished run whose last round has these validation accuracies, and whose selected round is an earlier one."""
    run = write(root / str(lr), "fedavg", lr=lr)
    views = {"shared": {"val": shared, "test": test}, "personal": {"val": personal, "test": test}}
    best = {"shared": {"val": before, "test": test}, "personal": {"val": before, "test": test}}
    last, selected = run.record.finished.last | views, run.rounds()[1] | best
    result = replace(run.record.finished, last=last, selected=selected)
    run.write("run.json", replace(run.record, result=result).to_json().encode())
    return run


def test_a_value_is_chosen_by_validation_in_the_last_round(tmp_path, monkeypatch):
    """Both views count; neither test images nor an earlier round do."""
    runs = {
        0.1: scored(tmp_path, 0.1, 0.5, 0.8, test=0.9, before=0.7),
        0.2: scored(tmp_path, 0.2, 0.6, 0.9, test=0.1, before=0.2),
        0.3: scored(tmp_path, 0.3, 0.1, 0.95, test=0.5, before=0.99),
    }
    assert [sweep.score([run]) for run in runs.values()] == pytest.approx([0.65, 0.75, 0.525])
    assert sweep.score([runs[0.1], runs[0.2]]) == pytest.approx(0.7)  # over held-out targets
    monkeypatch.setattr(sweep.Sweep, "tried", lambda self, setups: [[runs[s.local.lr]] for s in setups])
    setup, search = resolve("fedavg", {}), sweep.Search({"lr": list(runs)})
    (choice,) = sweep.Sweep([setup], search, Pools()).by_grid([(setup, search)])
    assert choice.point == {"lr": 0.2} and choice.setup.local.lr == 0.2


def test_it_says_what_was_tried_and_goes_on_where_it_stopped(swept, images, capsys):
    assert main(["bench", "fedavg", "fedprox", *GRID, *words(images, swept)]) == 0
    text, said = capsys.readouterr()
    assert text.count("6 of 6 runs are already finished") == 2  # of the sweep and of the table: nothing is repeated
    assert "sweep of lr=1e-06,0.05 mu=0.01,1: chosen on seed 1 by the validation accuracy" in text
    assert "chosen: fedavg lr=0.05; fedprox lr=0.05 mu=" in text
    assert "zero-shot is not in this sweep: it trains nothing" in text
    assert "fedavg is not in all of the sweep: it has no mu" in text
    assert "fedavg has no mu=: it is left out of that part of the sweep" in said
    assert f"6 runs in {swept}\n" in text and f"next: fedvlm report {swept}\n" in text
    assert f"next: fedvlm predict {swept / 'fed'}" in text


def test_a_grid_is_the_product_and_a_failed_run_is_never_chosen():
    search = sweep.Search({"lr": [0.1, 0.2], "batch": [8, 16]})
    assert [tuple(p.values()) for p in sweep.points(search)] == [(0.1, 8), (0.1, 16), (0.2, 8), (0.2, 16)]
    assert sweep.score([]) == -math.inf
    setup = resolve("fedavg", {})
    found = [sweep.Choice(setup, {"lr": lr}, score, runs) for lr, score, runs in ((0.1, 0.5, [1]), (0.2, 0.9, []))]
    assert sweep.best(setup, found).point == {"lr": 0.1}
    with pytest.raises(FedvlmError, match="every run of the sweep failed"):
        sweep.best(setup, found[1:])


@pytest.mark.parametrize(
    ("given", "axes"),
    [
        ({"lr": "0.1,0.2", "rounds": "3"}, {"lr": [0.1, 0.2]}),
        ({"lr": [0.1, 0.2], "batch": "16,32"}, {"lr": [0.1, 0.2], "batch": [16, 32]}),
        ({"local.lr": "0.1,0.2"}, {"local.lr": [0.1, 0.2]}),
        ({"optimiser": "sgd,adam"}, {"optimiser": ["sgd", "adam"]}),
        ({"template": "a {},the {}", "seeds": "1,2", "split": "60,20,20", "classes": "a,b", "lr": "0.1"}, {}),
    ],
)
def test_which_keys_are_swept(given, axes):
    fixed, search = sweep.separated(["fedavg"], given)
    assert search.axes == axes
    assert fixed.keys() == given.keys() - axes.keys()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rounds": "5,10"}, r"rounds=5,10: a sweep chooses on validation, and rounds= changes the task or the budget"),
        ({"partition": "iid,dirichlet"}, "start a bench for each value"),
        ({"lr": "0.1,high"}, "lr=high: expected a number"),
        ({"lr": "0.1,0.1"}, "at least two values"),
    ],
)
def test_sweeps_that_make_no_sense(given, says):
    with pytest.raises(FedvlmError, match=says):
        sweep.separated(["fedavg"], given)


def test_a_closed_form_has_no_optimiser_to_sweep(images, capsys):
    setup = resolve("moments", {"data": str(images), "lr": 0.5, "unseen": "noto"})
    assert not {"lr", "local.lr", "batch"} & set(sweep.keys_to_sweep(setup)) and "pulls" in sweep.keys_to_sweep(setup)
    planning.checked(setup, Pools())
    assert "lr= has no effect on moments" in capsys.readouterr().out


def test_moments_are_no_updates_to_compare():
    with pytest.raises(FedvlmError, match="cosine=true"):
        _ = resolve("moments", {"cosine": True}).merge


def test_the_frozen_model_is_added_where_it_can_classify(images, tmp_path):
    """With the same data, split and seeds; not twice, and not for a backbone without a text tower."""
    given = {"data": str(images), "unseen": "noto", "seeds": "1", "rounds": 3, "shots": 2, "out": str(tmp_path)}
    pools = api.new_pools()
    frozen, other = comparison.setups_of(["fedavg"], given | {"dp": "client", "epsilon": 8}, pools)
    assert frozen.method.name == "zero-shot" and frozen.config.dp == "none" and frozen.config.shots == 2
    assert frozen.config.unseen == other.config.unseen and frozen.config.seeds == (1,)
    for methods, more in ((["zero-shot", "fedavg"], {}), (["fedavg"], {"on": "resnet"})):
        names = [s.method.name for s in comparison.setups_of(methods, given | more, pools)]
        assert names == methods


# keys that say nothing of the frozen model: how methods are trained, and where that is computed
OF_TRAINING = {"values", "rounds", "participation", "sampling", "dropout", "quorum", "bound", "evaluate_every"}
OF_TRAINING |= {"dp", "epsilon", "delta", "noise_multiplier", "clip_norm", "clip_quantile", "noise_at"}
OF_TRAINING |= {"secure", "threshold", "secure_range"}
OF_COMPUTING = {"federation", "engine", "device", "chunk", "workers", "threads", "timeout", "grace", "log"}
OF_TEXT = {"stride"}  # the frozen model is not added there


@pytest.mark.parametrize("key", sorted(f.name for f in fields(Config)))
def test_the_frozen_model_is_evaluated_as_the_methods_are(key):
    value = other_values()[key]
    setup = resolve("fedavg", {"data": "emoji", key: value})
    pool = SimpleNamespace(task=SimpleNamespace(text=1), source=SimpleNamespace(task_type=CLASSIFICATION))
    (frozen,) = comparison.frozen([setup], pool)
    assert getattr(setup.config, key) != getattr(Config(), key)
    if key not in OF_TRAINING | OF_COMPUTING | OF_TEXT:
        assert getattr(frozen.config, key) == getattr(setup.config, key)
