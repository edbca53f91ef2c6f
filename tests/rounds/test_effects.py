"""What mechanisms did is recorded: of local rules the median over clients, of merges as they say it."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers import example, train_small

from fedvlm.cli import main
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data
from fedvlm.core.records import UPDATE, PartRecord
from fedvlm.engines.stacked import Stacked
from fedvlm.federation import ledger
from fedvlm.federation.wire import Header, pack
from fedvlm.parts.adapters.attention import Attention
from fedvlm.parts.adapters.head import Head
from fedvlm.parts.adapters.rotation import diagnose_map
from fedvlm.parts.local.means import Means
from fedvlm.parts.local.sgd import Sgd
from fedvlm.parts.merge.mean import Mean
from fedvlm.report.effects import effects
from fedvlm.report.page import page
from fedvlm.rounds.method import Method
from fedvlm.rounds.steps.diagnose import few_examples
from fedvlm.training.train import relative_change


@dataclass(frozen=True)
class Told(Sgd):
    effects: ClassVar = {"order": "its place among all clients, as a check"}

    def fit(self, model, params, message, own, data):
        return super().fit(model, params, message, own, data) | {"order": 1.0 * torch.from_numpy(data.ids)}


@dataclass(frozen=True)
class Counted(Mean):
    effects: ClassVar = {"merged": "how many clients"}

    def round(self, model, state, cohort):
        after = super().round(model, state, cohort)
        cohort.acted(merged=3.0)
        return after


def test_effects_of_local_rules_and_merges_are_recorded():
    task, data = example("head")
    method = Method.build(Head(), Told(lr=0.1), Counted(), task)
    cohort = Cohort(Stacked(method, data), np.arange(len(data)), 1)
    method.round(method.init(len(data)), cohort)
    assert sorted(cohort.effects["order"]) == list(range(len(data)))
    assert cohort.effects["merged"] == [3.0]


def test_means_over_steps_know_who_still_trains():
    data = Data(
        torch.zeros(6, 2), torch.zeros(6, dtype=torch.long), np.array([[0, 3, 3, 3], [3, 6, 6, 6]]), np.arange(2)
    )
    means = Means(data)
    means.add(a=torch.tensor([1.0, 4.0]))
    means.add(a=torch.tensor([3.0]))
    assert means.found("a", "b")["a"].tolist() == [2.0, 4.0] and means.found("b")["b"].tolist() == [0.0, 0.0]


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    return train_small(images, tmp_path_factory.mktemp("effects") / "run", method="fft-gp", rounds=1)


def test_a_run_shows_what_its_mechanisms_did(run, capsys):
    assert main(["show", str(run.folder)]) == 0
    told = capsys.readouterr().out
    assert "fft-gp" in told and "G" in told and "records no numbers" not in told
    assert [e.name for e in effects(run)] and all(e.meaning for e in effects(run))


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("fedavg", {"update"}),
        ("fedclip", {"update", "mask_contrast", "mask_variation"}),
        ("fedot", {"update", "condition", "map_change"}),
        ("fedlt", {"update", "condition", "map_change"}),
    ],
)
def test_a_run_shows_what_its_adapter_and_server_did(images, tmp_path, capsys, method, expected):
    run = train_small(images, tmp_path / "run", method=method, rounds=2)
    found = {e.name: e for e in effects(run)}
    assert expected <= found.keys() and all(e.meaning for e in found.values())
    assert 0 < found["update"].last < 10 and all(r["effects"]["update"] > 0 for r in run.rounds()[1:])
    if method == "fedot":
        assert found["condition"].last == pytest.approx(1, abs=1e-3) and found["map_change"].last > 0
        assert found["condition"].last == pytest.approx(np.median(list(run.rounds()[-1]["condition"].values())))
    assert main(["show", str(run.folder)]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in expected) and "records no numbers" not in told


@pytest.mark.parametrize(
    "keys", [{"dp": "client", "noise_multiplier": 1.0, "delta": 0.01}, {"secure": True, "unseen": ()}]
)
def test_diagnostics_stay_on_the_clients_where_replies_are_protected(images, tmp_path, keys):
    if "dp" in keys:
        pytest.importorskip("dp_accounting")
    run = train_small(images, tmp_path / "run", method="fedclip", rounds=1, **keys)
    assert "mask_variation" not in run.rounds()[-1] and [e.name for e in effects(run)] == ["update"]


def test_what_fedclips_mask_does():
    adapter = Attention()
    task, data = example(adapter)
    params = {k: torch.zeros(2, *v.shape) for k, v in adapter.init(task, 0).items()}
    x = data.x[:6].view(2, 3, -1)
    assert all(v.abs().max() < 1e-5 for v in adapter.diagnose(task, params, x).values())
    params["b2"][1, 0] = 1.0  # the second client's mask prefers a coordinate, in all images
    found = adapter.diagnose(task, params, x)
    mask = torch.softmax(params["b2"][1], 0)
    assert found["mask_contrast"][1] == pytest.approx(float(mask.std(correction=0) / mask.mean()))
    assert found["mask_contrast"][0] < 1e-5 and found["mask_variation"].abs().max() < 1e-5
    params |= {k: torch.randn(params[k].shape, generator=torch.Generator().manual_seed(1)) for k in ("w1", "w2")}
    masks = torch.softmax(torch.tanh(x @ params["w1"].mT) @ params["w2"].mT + params["b2"][:, None], -1)
    expected = (masks.std(1, correction=0) / masks.mean(1)).mean(-1)
    torch.testing.assert_close(adapter.diagnose(task, params, x)["mask_variation"], expected)


def test_few_examples_are_a_clients_own():
    bounds = np.array([[0, 20, 22, 24], [24, 26, 28, 30], [30, 30, 30, 30]])
    data = Data(torch.arange(30.0)[:, None], torch.zeros(30, dtype=torch.long), bounds, np.arange(3))
    found = few_examples(data)[..., 0]
    assert found[0].tolist() == list(range(16)) and found[1].tolist() == [24.0, 25.0] * 8


def test_the_servers_change_is_relative_and_ignores_running_statistics():
    before = {"w": torch.tensor([3.0, 4.0]), "norm.running_mean": torch.zeros(2)}
    after = {"w": torch.tensor([3.0, 9.0]), "norm.running_mean": torch.full((2,), 100.0)}
    assert relative_change(before, after) == pytest.approx(1.0)
    assert relative_change({}, {}) is None and relative_change({"w": torch.zeros(2)}, {"w": torch.ones(2)}) is None


def test_the_change_of_a_map_is_its_distance_from_the_identity():
    flip = torch.diag(torch.tensor([1.0, 1.0, 1.0, -1.0]))
    whole = diagnose_map(flip[None, None])
    assert whole["map_change"].tolist() == [pytest.approx(2 / 4**0.5)] and whole["condition"].tolist() == [1.0]
    in_blocks = torch.stack([torch.eye(2), flip[2:, 2:]])[None]
    assert diagnose_map(in_blocks)["map_change"].tolist() == whole["map_change"].tolist()


def test_a_run_shows_where_its_time_went(run, capsys):
    phases = run.record.finished.phases
    assert {"rounds", "evaluate", "write"} <= phases.keys() and all(seconds >= 0 for seconds in phases.values())
    assert main(["show", str(run.folder)]) == 0
    told = capsys.readouterr().out
    assert "time: " in told and "rounds " in told.partition("time: ")[2]


def test_the_page_shows_mechanisms_and_what_left_the_clients(run, tmp_path):
    frame = pack(Header("train", 1), {"shared": {"w1": torch.zeros(2, 3)}})
    received = ledger.Ledger(run.folder / ledger.RECEIVED)
    for clipped in (1.0, 2.0):
        line = ledger.Sent("run", "<north>", "train", 1, 0, clipped=clipped)
        received.append(ledger.line_of(frame, line))
    page([run], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "What the mechanisms did" in text and "What left the clients" in text
    assert "&lt;north&gt;" in text and "w1[2×3]" in text and "clipped" in text


def test_effects_are_shown_from_the_first_round_to_the_last():
    rounds = [{"round": k, "effects": {UPDATE: 10.0 * k}} for k in (1, 2, 3)]
    record = SimpleNamespace(adapter=PartRecord("head"), local=PartRecord("sgd"), merge=PartRecord("mean"))
    (found,) = effects(SimpleNamespace(rounds=lambda: [{"round": 0}, *rounds], record=record))
    assert (found.name, found.first, found.last) == (UPDATE, 10, 30)
