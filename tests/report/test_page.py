"""The page: charts, tables, details and images. Run folders as in run_folders.py."""

from __future__ import annotations

import base64
import hashlib
import html as escaping
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from run_folders import CASES, DOMAINS, many, with_outputs, write
from safetensors.numpy import save

from fedvlm import cli
from fedvlm.config.config import resolve
from fedvlm.data.pool import Pools
from fedvlm.errors import FedvlmError
from fedvlm.predict.finished import Finished
from fedvlm.predict.finished import test_rows as rows_of_tests
from fedvlm.report import axes, charts, outsiders, svg
from fedvlm.report.answers import answers, softmax
from fedvlm.report.details import calibration, confusion, details, mirrored, most_confused, principal
from fedvlm.report.lines import gather
from fedvlm.report.page import PageOptions, code, html
from fedvlm.report.svg import colour
from fedvlm.report.tables import summarise
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.train import train

EVIL = '<img src=x onerror="alert(1)">'


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    return many(tmp_path_factory.mktemp("runs"))


def figures(page: str) -> list[ElementTree.Element]:
    """The charts of a page; each must be well-formed XML."""
    return [ElementTree.fromstring(one) for one in re.findall(r"<svg viewBox=\"0 0 380.*?</svg>", page)]


def tips(page: str) -> list[str]:
    return [mark.get("data-tip", "") for one in figures(page) for mark in one.iter() if mark.get("data-tip")]


@pytest.mark.parametrize("case", CASES)
def test_charts_are_well_formed_and_named(case: str, tmp_path: Path) -> None:
    page = html(CASES[case](tmp_path))
    drawn = figures(page)
    assert all(one.get("role") == "img" and one.get("aria-label") for one in drawn)
    assert "nan" not in re.sub(r"data-tip=\"[^\"]*\"", "", "".join(re.findall(r"<svg.*?</svg>", page)))
    assert max(b - a for a, b in zip(levels(page), levels(page)[1:], strict=False)) <= 1


def levels(page: str) -> list[int]:
    return [int(n) for n in re.findall(r"<h([1-6])", page)]


def test_hover_values_are_those_of_the_table(runs: list[RunFolder]) -> None:
    rows = {str(v["method"]): v for v in summarise(runs).values}
    shown = tips(html(runs))
    for name in ("zero-shot", "fedavg", "fedot"):
        assert f"{name}: new clients {rows[name]['G']:.1f} %, own clients {rows[name]['P']:.1f} %" in shown


def test_the_policy_allows_this_style_and_this_script_only(runs: list[RunFolder]) -> None:
    page = html(runs)
    policy = escaping.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])  # type: ignore[index]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy


def test_tables_are_described_for_screen_readers(runs: list[RunFolder]) -> None:
    page = html(runs)
    tables = re.findall(r"<table.*?</table>", page, re.DOTALL)
    assert all('scope="col"' in t and 'scope="row"' in t for t in tables)
    assert all("<caption>" in t for t in tables if "sortable" in t)
    heads = set(re.findall(r'<th scope="col"([^>]*)>(own, shared S %|all cells C %|seconds ↓|sent MB ↓)</th>', page))
    assert {name for _, name in heads} == {"own, shared S %", "all cells C %", "seconds ↓", "sent MB ↓"}
    assert all("title=" in attributes for attributes, _ in heads)
    assert 'href="#main"' in page


def test_everything_in_a_run_folder_is_text(tmp_path: Path) -> None:
    run = write(tmp_path, "fedavg", EVIL.replace("/", "|"), domains=(EVIL.replace("/", "|"), "b", "c"))
    record = run.record
    bad = replace(
        record, method=replace(record.method, name=EVIL), data=replace(record.data, name=EVIL, classes=[EVIL, "b"])
    )
    run.write("run.json", bad.to_json().encode())
    with_outputs(run)
    page = html([run], PageOptions(details=True))
    assert "<img src=x" not in page and "&lt;img src=x" in page


def test_the_front_is_what_nothing_dominates() -> None:
    rng = np.random.default_rng(0)
    costs, scores = rng.integers(0, 6, 20).tolist(), rng.integers(0, 6, 20).tolist()
    found = charts.front(costs, scores)
    for k in range(20):
        better = [
            j for j in range(20)
            if costs[j] <= costs[k] and scores[j] >= scores[k] and (costs[j], scores[j]) != (costs[k], scores[k])
        ]  # fmt: skip
        same = [j for j in found if (costs[j], scores[j]) == (costs[k], scores[k])]
        assert bool(same) == (not better)


def test_megabytes_are_the_sum_of_all_rounds_so_far(runs: list[RunFolder]) -> None:
    """Each round of these runs sends 2,000 bytes."""
    spent = charts.megabytes(runs, gather(runs))
    assert spent["fedot"] == pytest.approx([0.002 * k for k in range(8)])


@pytest.mark.parametrize(("low", "high"), [(0, 1), (31.2, 48.9), (0.001, 0.0012), (-3, 250)])
def test_ticks_are_round_numbers_inside(low: float, high: float) -> None:
    found = svg.round_steps(low, high)
    assert 2 <= len(found) <= 8 and all(low - 1e-9 <= v <= high + 1e-9 for v in found)
    assert np.ptp(np.diff(found)) < 1e-9


def test_logarithmic_axes_have_a_place_for_zero() -> None:
    scale = svg.logarithmic([0, 1, 100], 0, 300)
    assert scale(0) == 0 < scale(1) < scale(10) < scale(100) < 300
    assert scale(10) - scale(1) == pytest.approx(scale(100) - scale(10), abs=0.2)


@pytest.mark.parametrize(("low", "high"), [(0.0003, 0.002), (1.5, 9), (0.02, 300), (1e-6, 1e6)])
def test_logarithmic_axes_have_ticks(low: float, high: float) -> None:
    found = [value for value, _ in svg.Scale(low, high, 0, 300, log=True).ticks()]
    assert 2 <= len(found) <= 7 and all(low <= v <= high for v in found)
    assert all(v >= 0.9 for v, _ in svg.logarithmic([0, 1, 100], 0, 300).ticks())  # nothing between 0 and the first


def chart_called(page: str, title: str) -> str:
    return str(re.search(rf"<h3>{re.escape(title)}</h3>(<svg.*?</svg>)", page)[1])  # type: ignore[index]


def test_curves_have_names_at_their_ends(runs: list[RunFolder], tmp_path: Path) -> None:
    page = html(runs)
    for title in ("New clients by round", "Own clients by round"):
        assert {"zero-shot", "fedavg", "fedot"} <= set(re.findall(r">([^<>]+)</text>", chart_called(page, title)))
    many = html([write(tmp_path, f"method-{k}", "art", rounds=2) for k in range(9)])
    drawn = chart_called(many, "New clients by round")
    assert "method-" not in "".join(re.findall(r">([^<>]+)</text>", drawn))


def test_names_cover_neither_markers_nor_each_other() -> None:
    """Three markers in a row, closer to each other than their names are long."""
    points = [(300.0, 100.0), (330.0, 101.0), (345.0, 99.0)]
    markers = [axes.Box(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    names: list[axes.Box] = []
    for x, y in points:
        names.append(axes.name_place(x, y, 60.0, [*markers, *names])[1])
    for k, name in enumerate(names):
        assert all(name.shared(other) == 0 for other in [*markers, *names[:k]])
        assert name.left >= svg.LEFT and name.right <= svg.WIDTH and name.top >= svg.TOP


def test_notes_that_explain_columns_are_not_repeated(runs: list[RunFolder]) -> None:
    page, said = html(runs), "own, shared (S): the clients that train"
    assert any(said in note for note in summarise(runs).notes) and said not in page and "What the columns mean" in page


def test_cost_is_one_goal_over_megabytes(runs: list[RunFolder], tmp_path: Path) -> None:
    drawn = chart_called(html(runs), "New clients and cost")
    assert (
        "fedot: 76.5 % at 0.014 MB" in drawn and "fedavg: 56.5 % at 0.006 MB" in drawn and 'class="front"' not in drawn
    )
    more = [write(tmp_path, m, d, s, r) for m, r in (("ditto", 1), ("fedclip", 5)) for d in DOMAINS for s in (1, 2)]
    assert 'class="front"' in chart_called(html(runs + more), "New clients and cost")  # from four methods with G on


def test_many_clients_and_methods_stay_small(tmp_path: Path) -> None:
    """500 clients: the weakest have rows, and all are ranked; 20 methods: colours of families, marks of methods."""
    domains = tuple(f"client {k}" for k in range(500))
    big = [write(tmp_path / "a", "fedavg", "client 0", rounds=1, domains=domains)]
    page = html(big)
    assert len(page) < 150_000 and "the 10 weakest of 499" in page and "Clients ranked" in page
    assert "Clients ranked" not in html([write(tmp_path / "few", "fedavg", "art")])
    methods = ("fedavg", "fedprox", "ditto", "scaffold", "fedclip", "fedot", "moments", "promptfl", "fedlora")
    page = html([write(tmp_path / "b", m, "art", rounds=2) for m in methods])
    assert page.count('<button type="button"') == len(methods)
    styles = {m: re.search(rf'class="nm (f-\w+)"[^>]*>(?:(?!</button>).)*<b>{m}</b>', page)[1] for m in methods}  # type: ignore[index]
    assert styles["fedavg"] == styles["ditto"] == "f-head" and styles["moments"] == "f-one"
    assert (styles["fedot"], styles["promptfl"], styles["fedlora"]) == ("f-adapt", "f-prompt", "f-tower")


def test_a_method_looks_the_same_on_every_page(tmp_path: Path) -> None:
    """Its colour and mark do not depend on what else is there; two rows of one method have different marks."""
    alone = gather([write(tmp_path / "a", "ditto", "art")])
    among = gather([write(tmp_path / "b", m, "art") for m in ("scaffold", "fedavg", "ditto", "fedot")])
    (ditto,) = (x for x in among if x.label == "ditto")
    assert alone[0].number == ditto.number and colour(ditto.number) == "f-head"
    assert len({x.number for x in among}) == 4
    twice = gather([write(tmp_path / "c", "ditto", "art", lr2=v) for v in (1.0, 2.0)])
    assert len({x.number for x in twice}) == 2 and len({colour(x.number) for x in twice}) == 1


def test_the_first_screen_has_the_answer(tmp_path: Path) -> None:
    """What stands before the table of clients: sentence, cards, command, both goals at once, ranking, warnings."""
    page = html(many(tmp_path, (1, 2, 3)))
    first = page[page.index("<main") : page.index("Which client gains")]
    assert '<h1 class="headline"><b class="f-adapt">fedot</b> is best for new and own clients.</h1>' in first
    for words in ("New clients<span", "Own clients<span", "Weakest client", "Cost of fedot", "fedvlm run fedot"):
        assert words in first
    assert "20.0 above fedavg (20.0 to 20.0); higher on 3 of 3 clients." in first
    assert "No client is below zero-shot." in first and "7 rounds, 0.014 MB" in first
    ranking = re.findall(r'<tr><th scope="row".*?</tr>', first)
    assert [re.search(r"<b>([^<]+)</b></button>", row)[1] for row in ranking] == [  # type: ignore[index]
        "fedot",
        "fedavg",
        "zero-shot",
        "local-only",
    ]
    assert ranking[0].count('pill best">best') == 2 and "-20.0" in ranking[1] and ranking[1].count('class="iv"') == 2
    assert first.index("headline") < first.index("Weakest") < first.index("<figure>") < first.index("Methods</h2>")


def test_a_client_below_zero_shot_is_said(tmp_path: Path) -> None:
    runs = [write(tmp_path, m, d, 1, r, budget=3) for m, r in (("zero-shot", 3), ("fedavg", 2)) for d in DOMAINS]
    page = html(runs)
    assert '<dd class="warns">' in page and "3 clients below zero-shot: " in page and 'class="l1"' in page


def test_pages_keep_their_budget(tmp_path: Path) -> None:
    """8 methods × 21 runs: at most 150 kB and 2,500 elements."""
    names = tuple(f"domain-{k}" for k in range(7))
    methods = ("zero-shot", "fedavg", "fedclip", "fedot", "fedlt", "fft-gp", "moments", "ditto")
    runs = [
        write(tmp_path, m, d, s, 10 * (m != "zero-shot"), domains=names)
        for m in methods
        for d in names
        for s in (1, 2, 3)
    ]
    page = html(runs)
    assert len(page) <= 150_000 and len(re.findall(r"<[a-z]", page)) <= 2_500


def test_weights_that_differ_are_drawn(tmp_path: Path) -> None:
    run = write(tmp_path, "ga", "art")
    rounds = [r | {"weights": {"photo": 0.2 + r["round"] / 10, "sketch": 0.5}} for r in run.rounds()]
    for one in rounds:
        run.append(one)  # type: ignore[arg-type]
    page = html([run])
    assert "photo, round 2: 0.4" in tips(page)
    assert {"photo", "sketch"} <= set(re.findall(r">([^<>]+)</text>", chart_called(page, "ga: weights")))
    assert "ga: weights" not in html([write(tmp_path, "fedavg", "art")])


# what the models said of test images


def test_confusions_count_every_image_once(tmp_path: Path) -> None:
    run = write(tmp_path, "fedavg", "art")
    with_outputs(run)
    found = answers(run)
    assert found is not None
    said = softmax(found.logits["shared"]).argmax(1)
    table = confusion([found], "shared")
    for truth in range(2):
        for answer in range(2):
            assert table[truth, answer] == ((found.label == truth) & (said == answer)).sum()
    held = found.held_out
    own = np.where(held, said, found.logits["personal"].argmax(1))  # held-out clients have no model of their own
    assert (found.probabilities("personal").argmax(1) == own).all()  # type: ignore[union-attr]
    assert confusion([found], "shared", "art (held out)").sum() == 12


def test_calibration_against_a_loop() -> None:
    rng = np.random.default_rng(1)
    sure = rng.random(200)
    right = rng.random(200) < sure
    bins, error = calibration(sure, right)
    wanted = 0.0
    for b in range(10):
        inside = [(s, r) for s, r in zip(sure, right, strict=True) if b / 10 <= s < (b + 1) / 10]
        wanted += abs(sum(s for s, _ in inside) - sum(r for _, r in inside))
    assert error == pytest.approx(100 * wanted / 200) and sum(n for *_, n in bins) == 200


def test_principal_components_against_svd() -> None:
    x = np.random.default_rng(2).normal(size=(30, 4)) * [5, 3, 1, 0.1]
    found = principal(x)
    centred = x - x.mean(0)
    wanted = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    assert np.abs(found) == pytest.approx(np.abs(wanted))


def test_components_have_the_signs_of_those_before() -> None:
    before = np.random.default_rng(3).normal(size=(20, 2))
    assert mirrored(before * [-2, 3], before) == pytest.approx(before * [2, 3])


def test_tsne_is_drawn_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    run = write(tmp_path / "runs", "fedavg", "art")
    with_outputs(run)
    assert cli.main(["report", str(run.folder), "--tsne"]) == 1 and "give both" in capsys.readouterr().err
    assert cli.main(["report", str(run.folder), "--details", "--tsne", "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert chart_called(page, "Image features, fedavg, t-SNE").count("<circle") == 24  # the held-out client has crosses
    assert "t-SNE" not in html([run], PageOptions(details=True))


def test_the_confusion_matrix_is_a_picture_of_the_best_method(tmp_path: Path) -> None:
    """One pixel per cell: the darker, the larger the share of its row; blue on the diagonal, else orange."""
    runs = [write(tmp_path, "zero-shot", "art", rounds=0), write(tmp_path, "fedavg", "art")]
    for run in runs:
        with_outputs(run)
    said = [answers(run) for run in runs]
    found = details([(-1, "zero-shot", [said[0]]), (100, "fedavg", [said[1]])], "fedavg")  # type: ignore[list-item]
    assert found is not None
    (drawn,) = found.matrices
    with Image.open(BytesIO(base64.b64decode(drawn.png))) as picture:
        pixels = np.asarray(picture, int)
    counts = confusion([said[1]], "personal")  # type: ignore[list-item]
    share = counts / counts.sum(1, keepdims=True)
    assert pixels.shape == (2, 2, 3) and drawn.title == "fedavg, personal models"
    assert pixels[0, 0, 0] == pytest.approx(255 - share[0, 0] ** 0.5 * 245, abs=1.1)
    assert pixels[0, 1, 2] == pytest.approx(255 - share[0, 1] ** 0.5 * 235, abs=1.1)
    assert {c["method"] for c in found.confusions} == {"fedavg"} and set(found.off) == {"zero-shot", "fedavg"}
    assert "Expected calibration error, %: zero-shot" in found.reliability[0].caption


def test_the_share_of_a_mistake_is_of_the_images_of_its_class_and_client() -> None:
    """One of two cats at a is called a dog; b, and the dog at a, do not count."""
    run = SimpleNamespace(client=[0, 0, 0, 1], label=[0, 0, 1, 0], said={"shared": [1, 0, 1, 0]}, names=["a", "b"])
    run.logits = {"shared": None}
    (found,) = most_confused([(0, "fedavg", [run])], ["cat", "dog"])  # type: ignore[list-item]
    mistake = {"client": "a", "true class": "cat", "predicted": "dog", "count": "1", "share": "50"}
    assert found == {"method": "fedavg", "view": "shared"} | mistake


def test_notes_have_commands_as_code() -> None:
    assert code("a <b> `c & d` e") == "a &lt;b&gt; <code>c &amp; d</code> e"


def test_the_comparison_comes_first_and_details_are_folded(tmp_path: Path) -> None:
    run = write(tmp_path, "fedavg", "art")
    with_outputs(run)
    page = html([run], PageOptions(details=True))
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == ["Methods", "Which client gains, which loses", "By round", "All columns", "More"]
    summaries = re.findall(r"<details[^>]*><summary>(.*?)</summary>", page)
    assert any(re.fullmatch(r"Calibration – off by [\d.]+ % with fedavg", s) for s in summaries)
    assert page.index("Calibration –") > page.index("<h2>More</h2>")


def test_details_are_shown_when_asked_for(tmp_path: Path) -> None:
    runs = [write(tmp_path, "zero-shot", "art", rounds=0), write(tmp_path, "fedavg", "art")]
    for k, run in enumerate(runs):
        with_outputs(run, shift=float(k))
    assert "Confusion matrix" not in html(runs)
    page = html(runs, PageOptions(details=True))
    for words in (
        "Reliability, shared",
        "Confusion matrix: fedavg",
        "Accuracy by class",
        "Mistakes – most often",
        "crosses: art",
    ):
        assert words in page
    assert details([(0, "none", [])]) is None
    (runs[0].folder / "outputs.safetensors").unlink()
    (runs[1].folder / "outputs.safetensors").unlink()
    assert "kept no outputs" in html(runs, PageOptions(details=True))


@pytest.mark.parametrize("damage", ["label", "shape", "bytes", "nan"])
def test_outputs_that_do_not_fit_are_refused(damage: str, tmp_path: Path) -> None:
    run = write(tmp_path, "fedavg", "art")
    good = {
        "client": np.zeros(2, int),
        "label": np.zeros(2, int),
        "item": np.zeros(2, int),
        "shared.logits": np.zeros((2, 2)),
    }
    bad = {
        "label": save(good | {"label": np.array([0, 7])}),
        "shape": save(good | {"shared.logits": np.zeros((3, 2))}),
        "bytes": b"not safetensors",
        "nan": save(good | {"shared.logits": np.full((2, 2), np.nan)}),
    }
    run.write("outputs.safetensors", bad[damage])
    with pytest.raises(FedvlmError, match=r"outputs.safetensors .*--details"):
        answers(run)


@pytest.fixture
def pictured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run on a folder of images, with outputs; item k is the k-th image."""
    data = tmp_path / "data"
    labels = []
    for domain in DOMAINS:
        for k in range(12):
            labels.append(k >= 6)
            path = data / domain / ("b" if k >= 6 else "a") / f"{k:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (300, 200), (20 * k, 0, 0)).save(path)
    run = write(tmp_path / "runs", "fedavg", "art")
    setup = resolve("fedavg", {"data": str(data), "unseen": "art", "rounds": "3"})
    monkeypatch.setattr(RunFolder, "setup", lambda self, uses=(): setup)
    label = np.array(labels, int)
    logits = np.eye(2)[label] * np.linspace(0, 3, 36)[:, None]
    where = {"client": np.repeat(np.arange(3), 12), "label": label, "item": np.arange(36)}
    run.write("outputs.safetensors", save(where | {"shared.logits": logits, "personal.logits": logits * 2}))
    return run


def test_images_only_when_asked_for_and_said_so(pictured: RunFolder) -> None:
    assert "data:image" not in html([pictured], PageOptions(details=True))
    page = html([pictured], PageOptions(images=True))
    thumbnails = re.findall(r'src="data:image/jpeg;base64,([^"]*)"', page)
    assert len(thumbnails) == 3 * 6 and "This page contains images of the data" in page
    assert page.index("contains images") < page.index('class="headline')
    assert page.count("personal: ") == 12 and page.count("✓") >= 18  # the held-out client has the shared model only


def test_images_that_are_not_the_runs_are_refused(pictured: RunFolder, tmp_path: Path) -> None:
    for path in (tmp_path / "data" / "art" / "a").iterdir():
        path.unlink()
    with pytest.raises(FedvlmError, match="not what it was trained on"):
        html([pictured], PageOptions(images=True))


def test_outsiders_are_drawn_as_the_run_scored_them(images: Path, tmp_path: Path) -> None:
    """How sure the frozen model is of the test images is also in the run's outputs."""
    rng = np.random.default_rng(5)
    (tmp_path / "others").mkdir()
    for k in range(8):
        noise = rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "others" / f"{k}.png")
    given = {"data": str(images), "outsiders": str(tmp_path / "others"), "rounds": "0", "unseen": "noto"}
    setup = resolve("zero-shot", given)
    pools = Pools()
    run = train(PlannedRun(setup, pools.load(setup), tmp_path / "run"))
    said = answers(run)
    assert said is not None
    model = Finished.of(run, setup, pools.load(setup))
    data = model.tested.data
    own = outsiders.sure(model, data.x[torch.from_numpy(rows_of_tests(data))])
    assert np.sort(own) == pytest.approx(np.sort(said.probabilities("shared").max(1)), abs=1e-5)  # type: ignore[union-attr]
    page = html([run], PageOptions(details=True))
    assert "Outsiders, zero-shot" in page and any(tip.startswith("outsiders: ") for tip in tips(page))
