"""Detection measures: compared with scikit-learn, computed by hand, and with the two sides swapped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from fedvlm.config.config import resolve
from fedvlm.core.detection import SCORES, auroc, energy, fpr_at, max_logit, mcm, scores_of
from fedvlm.data.pool import Pools
from fedvlm.engines.rows import Rows
from fedvlm.errors import FedvlmError
from fedvlm.training import train
from fedvlm.training.planned_run import PlannedRun

levels = st.lists(
    st.integers(-3, 3).map(float), min_size=1, max_size=30
)  # few distinct values, so that there are many ties


def truth_and_scores(inside, outside):
    return np.r_[np.ones(len(inside)), np.zeros(len(outside))], np.r_[inside, outside]


@settings(max_examples=100, deadline=None)
@given(levels, levels)
def test_auroc_equals_scikit_learn_with_ties(inside, outside):
    metrics = pytest.importorskip("sklearn.metrics")
    assert auroc(inside, outside) == pytest.approx(metrics.roc_auc_score(*truth_and_scores(inside, outside)), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_auroc_equals_scikit_learn_on_many_scores(seed):
    metrics = pytest.importorskip("sklearn.metrics")
    draw = np.random.default_rng(seed)
    inside, outside = draw.normal(0.5, 1, 3000), draw.normal(0, 1, 4000).round(1)
    assert auroc(inside, outside) == pytest.approx(metrics.roc_auc_score(*truth_and_scores(inside, outside)), abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(levels, levels, st.sampled_from([0.05, 0.07, 0.5, 0.8, 0.95, 1.0]))
def test_fpr_is_the_first_point_of_scikit_learns_curve_that_keeps_enough(inside, outside, keep):
    metrics = pytest.importorskip("sklearn.metrics")
    fpr, tpr, _ = metrics.roc_curve(*truth_and_scores(inside, outside), drop_intermediate=False)
    assert fpr_at(inside, outside, keep) == pytest.approx(fpr[np.argmax(tpr >= keep - 1e-9)], abs=1e-12)


def test_by_hand():
    """Twenty insiders 1 … 20: 19 of them (95 %) score 2 or more, and so do 3 of the 4 outsiders."""
    inside, outside = list(range(1, 21)), [0.0, 2.0, 10.5, 30.0]
    assert fpr_at(inside, outside) == 0.75
    assert fpr_at(inside, outside, keep=1.0) == 0.75
    assert fpr_at(inside, outside, keep=0.5) == 0.25  # 11 and more
    assert auroc(inside, outside) == (20 + 18.5 + 10 + 0) / 80
    assert (
        fpr_at(range(1, 101), [93.5, 94.5], keep=0.07) == 0.5
    )  # seven, although 0.07 × 100 is slightly more in floating point


def test_swapping_the_sides_changes_the_result():
    inside, outside = [2.0, 3.0, 4.0, 5.0], [0.0, 1.0, 1.5, 4.5]
    assert fpr_at(inside, outside) == 0.25 and fpr_at(outside, inside) == 1.0
    assert auroc(inside, outside) == 0.8125 and auroc(outside, inside) == 0.1875


@settings(max_examples=100, deadline=None)
@given(levels, levels, st.floats(0.01, 1), st.floats(0.01, 1))
def test_ranges_and_directions(inside, outside, one, other):
    area = auroc(inside, outside)
    assert area is not None and 0 <= area <= 1
    assert area + auroc(outside, inside) == pytest.approx(1)
    assert 0 <= fpr_at(inside, outside, min(one, other)) <= fpr_at(inside, outside, max(one, other)) <= 1
    assert auroc(np.exp(inside), np.exp(outside)) == area  # only the order matters
    assert auroc([x + 10 for x in inside], outside) == 1 and fpr_at([x + 10 for x in inside], outside) == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.floats(0.01, 1))
def test_the_threshold_keeps_the_wanted_share(count, keep):
    """Measured on the insiders themselves: at least the share `keep`, and at most one insider more."""
    inside = np.random.default_rng(count).permutation(count)
    assert keep - 1e-9 <= fpr_at(inside, inside, keep) < keep + 1 / count


def test_empty_sides_give_none_and_invalid_values_are_errors():
    assert auroc([], [1.0]) is None and auroc([1.0], []) is None
    assert fpr_at(torch.empty(0), [1.0]) is None and fpr_at([1.0], np.empty(0)) is None
    with pytest.raises(FedvlmError, match="outside: 1 of 2 scores"):
        auroc([1.0], [np.nan, 2.0])
    with pytest.raises(FedvlmError, match="keep=95"):
        fpr_at([1.0], [2.0], keep=95)
    assert auroc([np.inf], [-np.inf]) == 1.0


def test_arrays_tensors_and_lists_give_the_same():
    inside, outside = np.array([[0.3, 0.9]], np.float32), np.array([0.3, 0.1], np.float32)
    convert = (np.asarray, torch.from_numpy, lambda v: v.reshape(-1).tolist())
    assert [auroc(f(inside), f(outside)) for f in convert] == [0.875] * 3
    assert fpr_at(torch.from_numpy(inside).requires_grad_(), outside) == 0.5


def test_scores_by_hand():
    logits = torch.tensor([[0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    assert mcm(logits, 1.0).tolist() == pytest.approx([np.exp(2) / (1 + np.exp(2)), 0.5])
    assert mcm(logits, 2.0).tolist() == pytest.approx([np.e / (1 + np.e), 0.5])
    assert max_logit(logits).tolist() == [2.0, 1.0]
    assert energy(logits).tolist() == pytest.approx([np.log(1 + np.exp(2)), 1 + np.log(2)])


def test_all_scores_of_the_same_logits():
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))
    found = scores_of(logits)
    assert list(found) == list(SCORES) == ["mcm", "max-logit", "energy"]
    for score, own in zip(found.values(), (mcm, max_logit, energy), strict=True):
        assert torch.equal(score, own(logits)) and score.shape == (3, 4)


def test_outsider_prompts_take_part_in_the_softmax_but_are_not_classes():
    logits = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    assert float(mcm(logits, classes=2)) == pytest.approx(np.e / (1 + np.e + np.exp(5)))
    assert float(mcm(logits)) > 0.9


def test_scores_stay_finite_at_any_scale():
    logits = torch.tensor([[1e4, -1e4], [0.0, 0.0]])
    for score in (mcm(logits), mcm(logits, 1e-3), max_logit(logits), energy(logits)):
        assert score.isfinite().all()
    assert max_logit(torch.empty(0, 3)).shape == (0,)


def test_invalid_arguments_are_errors():
    for score in (mcm, max_logit, energy):
        with pytest.raises(FedvlmError, match="no class"):
            score(torch.empty(4, 0))
    with pytest.raises(FedvlmError, match="temperature=0"):
        mcm(torch.zeros(2, 3), 0)
    with pytest.raises(FedvlmError, match="classes=4"):
        mcm(torch.zeros(2, 3), classes=4)


@pytest.fixture
def outsiders(tmp_path):
    """Images that are no emoji, in two folders; one cannot be read."""
    draw = np.random.default_rng(5)
    for k in range(12):
        folder = tmp_path / "outsider-images" / ("deep/er" if k % 2 else ".")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(folder / f"{k}.png")
    (tmp_path / "outsider-images" / "torn.png").write_bytes(b"no")
    return tmp_path / "outsider-images"


@pytest.mark.parametrize("name", ["fedot", "fedclip", "zero-shot"])
def test_a_run_records_detection(name, images, outsiders, tmp_path, bytes_only):
    """Compared with scikit-learn on the logits that the run saved, client by client, for all engines."""
    metrics = pytest.importorskip("sklearn.metrics")
    given = {"data": str(images), "outsiders": str(outsiders), "rounds": 2, "unseen": "noto"}
    setup = resolve(name, given | {"engine": "serial"})
    pool = Pools().load(setup)
    outside = pool.extras["outsiders"].x
    assert len(outside) == 12 and list(pool.skipped) == ["outsiders/torn.png"]
    run = train.train(PlannedRun(setup, pool, tmp_path / "run"))
    last, out = run.record.finished.last, load_file(run.folder / "outputs.safetensors")
    view = "personal" if "personal.logits" in out else "shared"
    planned = PlannedRun(setup, pool)
    method, federation = planned.method, planned.federation
    rows = Rows(method.newcomer, len(federation.names), run.folder / "rows.bin")
    state, round = run.load()
    each = []
    for i in (i for i in range(3) if i not in federation.unseen):
        mine = out[f"{view}.logits"][out["client"] == i]
        own = rows.read(np.array([i]), round)
        params = method.local.personal(own, {k: v[None] for k, v in state.shared.items()})
        theirs = method.model.logits(params, outside[None])[0]
        scores = torch.cat([mine, theirs]).softmax(-1).amax(-1)
        truth = [1] * len(mine) + [0] * len(theirs)
        each.append(metrics.roc_auc_score(truth, scores.double().numpy()))
    assert last["auroc"] == pytest.approx(np.mean(each), abs=1e-6)
    assert last["detection"]["personal"]["auroc"] == last["auroc"] and 0 <= last["fpr95"] <= 1
    assert {"auroc", "fpr95", "energy.auroc", "max-logit.fpr95"} <= set(last["detection"]["newcomer"])
    loop = resolve(name, given | {"engine": "loopback"})
    again = train.train(PlannedRun(loop, Pools().load(loop), tmp_path / "loop")).record.finished.last
    assert again["detection"] == last["detection"]
    many = resolve(name, given | {"engine": "stacked", "chunk": 3})
    beside = train.train(PlannedRun(many, Pools().load(many), tmp_path / "many")).record.finished.last
    for view, found in last["detection"].items():
        assert beside["detection"][view] == pytest.approx(found, abs=0.01)


def test_a_missing_folder_of_outsiders_is_an_error(images, tmp_path):
    with pytest.raises(FedvlmError, match="no such folder"):
        Pools().load(resolve("fedclip", {"data": str(images), "outsiders": str(tmp_path / "none")}))
