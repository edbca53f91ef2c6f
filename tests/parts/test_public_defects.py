"""Defects found in public code for federated learning, with a test for each (see also the contract and reductions)."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import ABLE, build, random_data, random_task, train_small

from fedvlm.backbones.hf import Clip
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data
from fedvlm.core.state import Message, State
from fedvlm.data.clients import Federation
from fedvlm.engines.stacked import Stacked
from fedvlm.evaluation.views import selection
from fedvlm.training.train import result


def test_the_mean_is_a_mean_and_not_the_last_reply(double):
    method, data = build("head", "sgd", "mean"), random_data(random_task())
    trained = Cohort(Stacked(method, data, 6), ABLE, 1).ask("train", Message(method.initial)).shared["head"]
    state = method.round(method.init(6), Cohort(Stacked(method, data, 6), ABLE, 1))
    sizes = torch.tensor([30.0, 8.0, 20.0, 1.0, 13.0])
    torch.testing.assert_close(state.shared["head"], torch.einsum("k,kcd->cd", sizes / sizes.sum(), trained))
    assert (state.shared["head"] - trained[-1]).abs().max() > 1e-3


def test_training_reads_the_training_split_only(double):
    """Rows outside the training split become NaN; the trained model must not change."""
    method, data = build("head", "sgd", "mean"), random_data(random_task())
    clean = method.round(method.init(6), Cohort(Stacked(method, data, 6), ABLE, 1))
    x = data.x.clone()
    for _, train, _, high in data.bounds:
        x[train:high] = float("nan")
    poisoned = method.round(method.init(6), Cohort(Stacked(method, replace(data, x=x), 6), ABLE, 1))
    assert torch.equal(clean.shared["head"], poisoned.shared["head"])


def test_every_training_row_is_used_once_per_epoch(double):
    data = random_data(random_task())
    order = np.argsort(-data.counts("train"), kind="stable")
    part = Stacked(build("head", "sgd", "mean"), data, 6).at(order, 1)
    marked = replace(part, x=torch.arange(len(data.x)).double()[:, None])
    seen = [[] for _ in order]
    for batch in marked.batches(4, epochs=3):
        for k in range(len(batch.y)):
            seen[k] += batch.x[k, batch.weight[k] > 0, 0].tolist()
    for k, i in enumerate(order):
        low, high = data.bounds[i, :2]
        assert sorted(seen[k]) == sorted(list(range(low, high)) * 3)


def test_one_large_client_does_not_pad_all_others_to_its_size(double):
    sizes = np.array([40_000] + [1] * 800)
    ends = sizes.cumsum()
    bounds = np.stack([ends - sizes, ends, ends, ends], axis=1)
    data = Data(torch.zeros(ends[-1], 1), torch.zeros(ends[-1], dtype=torch.long), bounds, np.arange(801))
    tracemalloc.start()
    count = sum(len(batch.y) for batch in data.batches(4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 10_000 + 800 and peak < 50e6  # planned at once it would be 10,000 × 801 × 4 rows: 256 MB


def test_the_result_is_the_last_round_or_the_best_on_validation_and_never_the_best_on_test(images, tmp_path):
    run = train_small(images, tmp_path / "run", rounds=6, lr=0.3)
    found, records = run.record.finished, run.rounds()
    assert found.last["round"] == 6
    best = max(records, key=selection)
    assert found.selected["round"] == best["round"]


def test_selection_uses_validation_of_training_clients_only():
    record = {
        "shared": {"val": 0.2, "test": 0.9},
        "personal": {"val": 0.4, "test": 0.9},
        "newcomer": {"val": 1.0, "test": 1.0},
    }
    assert selection(record) == pytest.approx(0.3)
    better_on_test = record | {"personal": {"val": 0.3, "test": 1.0}}
    assert selection(better_on_test) < selection(record)


def test_the_selected_round_is_the_best_on_validation_even_if_the_worst_on_test(double):
    method = build("head", "sgd", "mean")

    def record(round, val, test):
        return {"round": round, "personal": {"val": val, "test": test}, "bytes_up": 0, "bytes_down": 0, "seconds": 0.0}

    data = random_data(random_task())
    federation = Federation(tuple("abcdef"), ("a",) * 6, data, random_task())
    found = result(method, federation, [record(0, 0.1, 0.9), record(1, 0.8, 0.2), record(2, 0.5, 0.5)])
    assert found.selected["round"] == 1 and found.last["round"] == 2
    equal = [record(0, 0.1, 0.9), record(1, 0.8, 0.2), record(2, 0.8, 0.9)]
    assert result(method, federation, equal).selected["round"] == 1  # of equal rounds the first


def test_the_server_stores_no_private_row(double):
    method, data = build("rotation", "sgd", "mean"), random_data(random_task())
    engine = Stacked(method, data, 6)
    state = method.init(6)
    for round in (1, 2):
        state = method.round(state, Cohort(engine, ABLE, round))
    assert isinstance(state, State) and set(state.shared) == {"head"} and not state.server
    assert torch.equal(state.private["skew"], torch.zeros_like(state.private["skew"]))
    assert engine.rows.read(ABLE, 2)["skew"].abs().max() > 0


def test_frozen_features_are_computed_once(images, tmp_path, monkeypatch):
    """A second run that shares nothing in memory with the first encodes no image and no text."""
    train_small(images, tmp_path / "first")

    def never(*args):
        raise AssertionError("encoded again")

    monkeypatch.setattr(Clip, "images", never)
    monkeypatch.setattr(Clip, "texts", never)
    train_small(images, tmp_path / "second", seed=7)  # with new Pools
