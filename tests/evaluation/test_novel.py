"""Base-to-novel: who holds what, the measures by hand, the same in every engine and after a stop, and on paper."""

from __future__ import annotations

import csv
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import CLASSES as FIVE
from helpers import example, numbered, scores, small_adapter
from hypothesis import given
from hypothesis import strategies as st

from fedvlm.cli import main
from fedvlm.config.config import Layout, Setup, resolve
from fedvlm.core.adapter import Task
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import SPLITS
from fedvlm.core.records import MEASURES, RoundRecord
from fedvlm.core.state import nbytes, with_client_axis
from fedvlm.core.tasks import CLASSIFICATION
from fedvlm.data.clients import Federation, federate
from fedvlm.data.pool import Pool, Pools, with_novel_classes
from fedvlm.data.source import Item
from fedvlm.engines.rows import Rows
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError, NoQuorum
from fedvlm.evaluation import novel
from fedvlm.evaluation.novel import MACRO
from fedvlm.evaluation.views import evaluate
from fedvlm.parts import registry
from fedvlm.report.lines import gather
from fedvlm.report.page import page
from fedvlm.report.tables import summarise
from fedvlm.rounds import steps
from fedvlm.rounds.method import Method
from fedvlm.training import train
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun

GIVEN = {"protocol": "base-to-novel", "partition": "disjoint", "clients": 2, "rounds": 3, "lr": 0.05, "seed": 7}


def items_of(classes: int, each: int = 10, domains: tuple[str, ...] = ("all",)) -> list[Item]:
    return [
        Item(f"{d}/{c:03d}/{k}", d, f"{c:03d}", "") for d in domains for c in range(classes) for k in range(each)
    ]  # fmt: skip


def pool_of(classes: int, **how) -> Pool:
    return with_novel_classes(numbered(items_of(classes, **how)))


def setup_of(images, name="fedot", **given) -> Setup:
    return resolve(name, GIVEN | {"data": str(images)} | given)


def run_of(images, folder, name="fedot", **given) -> RunFolder:
    setup = setup_of(images, name, **given)
    return train.train(PlannedRun(setup, Pools().load(setup), folder))


def prepared(images, name="fedot", **given) -> tuple[Method, Federation]:
    setup = setup_of(images, name, **given)
    planned = PlannedRun(setup, Pools().load(setup))
    return planned.method, planned.federation


def last_of(run: RunFolder) -> RoundRecord:
    return run.record.finished.last


def rows_by_class(federation: Federation) -> np.ndarray:
    """[clients, classes], over all splits."""
    d = federation.data
    return np.stack([np.bincount(d.y[b[0] : b[3]].numpy(), minlength=len(federation.task.classes)) for b in d.bounds])


@pytest.mark.parametrize("classes,base", [(101, 50), (102, 51), (37, 18), (4, 2), (5, 2)])
def test_classes_are_halved_as_listed(classes, base):
    """FedDTL's Table 5: Food101 has 50 base classes (37,500 of 75,750 images), OxfordPet's 1,785 of 3,680 are 18 of 37."""
    task = pool_of(classes).task
    assert task.novel and len(task.classes) == base and len(task.novel.classes) == classes - base
    assert (*task.classes, *task.novel.classes) == tuple(f"{c:03d}" for c in range(classes))


def test_text_goes_with_its_class():
    whole = numbered(items_of(7))
    text = torch.arange(14.0).view(7, 2)
    task = with_novel_classes(replace(whole, task=whole.task._replace(text=text, dim=2))).task
    assert torch.equal(task.names(), text[:3]) and task.novel and torch.equal(task.novel.names(), text[3:])


@pytest.mark.parametrize(
    "layout",
    [
        Layout("iid", clients=5),
        Layout("dirichlet", clients=5, alpha=0.1),
        Layout("disjoint", clients=5),
        Layout("disjoint", clients=5, shots=4),
        Layout("pathological", clients=5, per_client=4),
        Layout("domain"),
        Layout("domain-dirichlet", clients=3, alpha=0.3),
        Layout("pooled"),
    ],
    ids=str,
)
def test_nobody_holds_a_novel_image(layout):
    """And everybody's test images are those of the usual split, each half numbered from 0."""
    domains = ("art", "photo") if layout.partition.startswith(("domain", "pool")) else ("all",)
    items = items_of(11, domains=domains)
    whole = numbered(items)
    federation, usual = federate(with_novel_classes(whole), layout, 3), federate(whole, replace(layout, shots=0), 3)
    held = {items[int(k)].label for k in federation.items}
    assert held == {f"{c:03d}" for c in range(5)} == set(federation.task.classes)
    assert [int(v) for v in federation.data.x[:, 0]] == federation.items.tolist()  # a row is the item it says it is
    for row, k in zip(federation.data.y, federation.items, strict=True):
        assert federation.task.classes[int(row)] == items[int(k)].label
    test = {int(usual.items[r]) for low, high in usual.data.bounds[:, 2:] for r in range(low, high)}
    trained = {int(federation.items[r]) for low, high in federation.data.bounds[:, :2] for r in range(low, high)}
    seen = set()
    for half, first in (("base", 0), ("novel", 5)):
        x, y, aligned = federation.data.extras[half]
        assert not aligned and [f"{int(c) + first:03d}" for c in y] == [items[int(k)].label for k in x[:, 0]]
        seen |= {int(k) for k in x[:, 0]}
    assert seen == test and not seen & trained


@pytest.mark.parametrize("clients", [1, 3, 5, 50])
def test_disjoint_gives_each_class_to_one_client(clients):
    federation = federate(pool_of(101), Layout("disjoint", clients=clients), 9)
    cells = rows_by_class(federation)
    assert ((cells > 0).sum(0) == 1).all() and np.ptp((cells > 0).sum(1)) <= 1  # equal category counts
    assert cells.sum() == 50 * 10
    dealt = federate(pool_of(101), Layout("pathological", clients=clients), 9)
    assert (rows_by_class(dealt) == cells).all()


def test_what_cannot_be_halved_says_so():
    with pytest.raises(FedvlmError, match=r"needs four or more, and data=numbered has 3: 000, 001, 002"):
        pool_of(3)
    with pytest.raises(FedvlmError, match=r"no test image of a base class; give split="):
        federate(pool_of(6), Layout("iid", clients=2, split=(80, 20, 0)), 0)
    with pytest.raises(FedvlmError, match=r"per_client=2: partition=disjoint deals each class to one client"):
        federate(pool_of(6), Layout("disjoint", clients=2, per_client=2), 0)
    with pytest.raises(FedvlmError, match=r"deals 3 classes to clients=4"):
        federate(pool_of(6), Layout("disjoint", clients=4), 0)


def test_data_without_classes_is_refused(tmp_path):
    (tmp_path / "roles.jsonl").write_text('{"role": "a", "text": "' + "to be or not " * 40 + '"}\n')
    data = str(tmp_path / "roles.jsonl")
    setup = resolve("fedavg", {"on": "lstm", "data": data, "protocol": "base-to-novel", "domains": 0})
    with pytest.raises(FedvlmError, match=r"protocol=base-to-novel is for classes, and data=.* is text"):
        Pools().load(setup)


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_harmonic_mean_lies_between_and_nearer_the_smaller(one, other):
    found = novel.harmonic(one, other)
    assert found is not None and found == novel.harmonic(other, one)
    assert min(one, other) - 1e-9 <= found <= (one + other) / 2 + 1e-9
    assert novel.harmonic(None, one) is None and novel.harmonic(one, None) is None


def test_the_harmonic_mean_by_hand():
    assert novel.harmonic(0.5, 1.0) == pytest.approx(2 / 3)
    assert novel.harmonic(0.0, 0.0) == 0.0 and novel.harmonic(0.0, 0.9) == 0.0


def test_measures_by_hand():
    """Two clients, three base classes of 2, 4 and 0 test images, one novel class of 5. The first trains on classes 0 and 2,
    the second on 1 and 2; the model of the first knows class 0 only, of the second all."""
    right = {"base": np.array([[2.0, 0, 0], [2, 4, 0]]), "novel": np.array([[1.0], [4]])}
    held = np.array([[True, False, True], [False, True, True]])
    sizes = {"base": np.array([2, 4, 0]), "novel": np.array([5])}
    assert novel.measures(right, held, sizes) == {
        "local": 1.0,
        "base": round((2 / 6 + 1) / 2, 6),
        "novel": 0.5,
        "hm": round(2 * (2 / 3) * 0.5 / (2 / 3 + 0.5), 6),
        "base_macro": 0.75,  # (1 + 0 + 1 + 1)/4: the class without test images does not count
        "novel_macro": 0.5,
        "hm_macro": 0.6,
    }
    alone = novel.measures({"base": right["base"]}, held, sizes)
    assert alone["novel"] is None and alone["hm"] is None and alone["base"] == round(2 / 3, 6)
    nothing = np.array([[False, False, True]] * 2)  # nobody's classes have a test image
    assert novel.measures(right, nothing, sizes)["local"] is None


@pytest.mark.parametrize("partition", ["disjoint", "iid", "dirichlet"])
def test_zero_shot_by_hand(images, tmp_path, partition):
    """From embeddings and class names alone: base among base names, novel among novel names."""
    record = last_of(run_of(images, tmp_path / "run", "zero-shot", partition=partition))
    setup = setup_of(images, "zero-shot", partition=partition)
    pool = Pools().load(setup)
    federation = federate(pool, setup.config, 7)
    text = {"base": pool.task.text, "novel": pool.task.novel.text}
    assert (pool.task.classes, pool.task.novel.classes) == (FIVE[:2], FIVE[2:])
    right = {}
    assert federation.data.extras.keys() == {"base", "novel"}
    for half, (x, y, _) in federation.data.extras.items():
        assert len(y) == 3 * 2 * len(text[half])  # domains × test images × classes
        right[half] = ((x @ text[half].mT).argmax(-1) == y).double()
        assert record[half] == pytest.approx(float(right[half].mean()), abs=1e-6)
    assert record["hm"] == pytest.approx(2 / (1 / record["base"] + 1 / record["novel"]), abs=1e-5)
    y, local = federation.data.extras["base"].y, []
    for low, high, *_ in federation.data.bounds:
        mine = torch.isin(y, federation.data.y[low:high])
        local += [float(right["base"][mine].mean())] if high > low else []
    assert record["local"] == pytest.approx(np.mean(local), abs=1e-6)
    if partition == "iid":
        assert record["local"] == record["base"]
    if partition == "disjoint":  # a client holds every image of its classes
        assert record["local"] == pytest.approx(record["P"], abs=1e-6)


def test_own_models_by_hand(images, tmp_path):
    """FedOT, from the rows it left: each client's map on everybody's base test images, then the mean."""
    run = run_of(images, tmp_path / "run", engine="serial")
    method, federation = prepared(images, engine="serial")
    state, round = run.load()
    rows = Rows(state.private, len(federation.names), run.folder / "rows.bin")
    x, y, _ = federation.data.extras["base"]
    base, local = [], []
    for i, (low, high, *_) in enumerate(federation.data.bounds):
        params = method.local.personal(rows.read(np.array([i]), round), with_client_axis(state.shared))
        right = (method.model.logits(params, x[None])[0].argmax(-1) == y).double()
        base.append(float(right.mean()))
        local.append(float(right[torch.isin(y, federation.data.y[low:high])].mean()))
    shared_model = method.shared_model(state.message())
    shared = (method.model.logits(shared_model, x[None])[0].argmax(-1) == y).double().mean()
    last = last_of(run)
    assert last["base"] == pytest.approx(np.mean(base), abs=1e-6)
    assert last["local"] == pytest.approx(np.mean(local), abs=1e-6)
    assert last["base_to_novel"]["shared"]["base"] == pytest.approx(float(shared), abs=1e-6)
    assert last["base_to_novel"]["personal"] == {m: last[m] for m in (*MEASURES, *MACRO)}
    assert last["base_to_novel"]["shared"] != last["base_to_novel"]["personal"]  # disjoint: own maps know own classes


def test_a_classifier_of_its_own_classes_has_no_novel(images, tmp_path):
    last = last_of(run_of(images, tmp_path / "run", "fedavg"))
    assert last["novel"] is None and last["hm"] is None and last["base"] > 0.5
    assert last["base_to_novel"]["shared"] == last["base_to_novel"]["personal"]


def test_what_shares_nothing_has_no_shared_view(images, tmp_path):
    last = last_of(run_of(images, tmp_path / "run", "fedot-all-local"))
    assert set(last["base_to_novel"]) == {"personal"} and last["local"] > last["base"]


CLASSIFIERS = [n for n in registry.names("adapter") if registry.find("adapter", n).task_type is CLASSIFICATION]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_vocabulary_is_open_just_where_no_parameter_is_a_class(name, double):
    """An open vocabulary answers among names it never saw, as many as they are; a closed one has parameters by class."""
    task, data = example(name)
    adapter = small_adapter(name)
    few, strange = (task.subset(k) for k in (slice(3), slice(3, None)))
    params = adapter.init(few, 1)
    same = {k: v.shape for k, v in params.items()} == {k: v.shape for k, v in adapter.init(task, 1).items()}
    assert adapter.open_vocabulary == same, f"adapter={name}: set `open_vocabulary`, or why not"
    if adapter.open_vocabulary:
        found = adapter.logits(strange, with_client_axis(params), data.x[None, :4])
        assert found.shape == (1, 4, 2) and found.isfinite().all()
        assert not torch.equal(found, adapter.logits(few, with_client_axis(params), data.x[None, :4])[..., :2])


def test_class_specific_prompts_have_a_closed_vocabulary():
    prompt = registry.find("adapter", "prompt")
    assert prompt().open_vocabulary and not prompt(specific=True).open_vocabulary


@pytest.mark.parametrize(
    ("name", "on"), [("fedot", ""), ("fedclip", ""), ("perfedavg", "attention"), ("promptfolio", "")]
)
def test_side_by_side_as_one_after_the_other(images, tmp_path, name, on):
    short = {"rounds": 1, "epochs": 1} if name == "promptfolio" else {"rounds": 2, "on": on}
    serial = run_of(images, tmp_path / "serial", name, engine="serial", **short)
    beside = run_of(images, tmp_path / "stacked", name, engine="stacked", chunk=2, **short)
    for one, other in zip(scores(serial), scores(beside), strict=True):
        for view, found in one["base_to_novel"].items():
            assert other["base_to_novel"][view] == pytest.approx(found, abs=0.06)  # one of 18 images may fall otherwise
    assert scores(beside)[0]["base_to_novel"] == scores(serial)[0]["base_to_novel"]


def test_what_is_agreed_is_a_number_per_class(images):
    setup = setup_of(images, "fedclip")
    planned = PlannedRun(setup, Pools().load(setup))
    method, federation = planned.method, planned.federation
    for step in ("novel.shared", "novel.personal"):
        schema = steps.step_of(step).schema(method, federation.data.extras)
        assert {k: f.shape for k, f in schema.values.items()} == {"base": (2,), "novel": (3,)} and not schema.shared
        assert all(f.whole and f.low == 0 and f.high <= 60 for f in schema.values.values())


def test_clients_apart_do_not_get_each_others_test_images(images, tmp_path):
    """The protocol scores every model on everybody's test images, so it is for simulations."""
    with pytest.raises(FedvlmError, match="everybody's test images"):
        run_of(images, tmp_path / "run", "fedclip", engine="loopback")
    assert not (tmp_path / "run" / "clients").exists()


class Spy:
    """Counts what is asked of whom; some never answer."""

    def __init__(self, engine, deaf=()):
        self.engine, self.deaf, self.asked = engine, deaf, []

    def run(self, step, ids, message, round, exchange):
        self.asked.append((step, ids.tolist()))
        yield from self.engine.run(step, np.array([i for i in ids if i not in self.deaf], np.int64), message, round, 0)


@pytest.mark.parametrize("name", ["fedclip", "fedot"])
def test_the_shared_model_is_asked_about_once(images, name):
    """Of one client, and of the next where that one is silent; what it costs is counted beside training."""
    method, federation = prepared(images, name, clients=2, partition="iid")
    message = method.init(2).message()
    spy = Spy(Stacked(method, federation.data, 2))
    cohort = Cohort(spy, np.arange(2), 1)
    whole = evaluate(method, federation, cohort, message)
    own = [("novel.personal", [0, 1])] if method.has_personal_models else []
    assert spy.asked == [("score", [0, 1]), ("novel.shared", [0]), *own]
    assert cohort.bytes_down == nbytes(method.initial) * (2 + 1 + 2 * len(own))
    without = replace(method, task=method.task._replace(novel=None))
    bare = Cohort(Stacked(without, replace(federation.data, extras={}), 2), np.arange(2), 1)
    evaluate(without, replace(federation, data=replace(federation.data, extras={})), bare, message)
    numbers = sum(len(t.classes) for t in method.base_and_novel.values())
    assert cohort.bytes_up == bare.bytes_up + 4 * numbers * (1 + 2 * len(own))
    spy = Spy(Stacked(method, federation.data, 2), deaf=(0,))
    part = evaluate(method, federation, Cohort(spy, np.arange(2), 1), message)
    assert spy.asked[1:3] == [("novel.shared", [0]), ("novel.shared", [1])]
    assert part["base_to_novel"]["shared"] == whole["base_to_novel"]["shared"]
    with pytest.raises(NoQuorum):
        novel.base_to_novel(method, federation, Cohort(Spy(spy.engine, (0, 1)), np.arange(2), 1), message)


def test_training_costs_what_it_always_did(images, tmp_path):
    last = run_of(images, tmp_path / "run", "fedclip").rounds()[-1]
    assert last["bytes_down"] == 2 * 131584 * 4 and last["score_bytes_down"] == 3 * 131584 * 4


def test_who_is_held_out_has_no_say(images, tmp_path):
    """Domains as clients; the held-out one trains nothing, and its own model is nobody's."""
    run = run_of(images, tmp_path / "run", partition="domain", unseen="noto")
    last = last_of(run)
    method, federation = prepared(images, partition="domain", unseen="noto")
    spy = Spy(Stacked(method, federation.data, 2))
    novel.base_to_novel(method, federation, Cohort(spy, np.arange(3), 1), method.init(3).message())
    assert spy.asked[1] == ("novel.personal", [1, 2]) and federation.names[0] == "noto"
    assert last["G"] is not None and last["local"] == last["base"]  # both domains have both base classes


@pytest.mark.parametrize("engine", ["serial", "stacked"])
def test_stopped_and_resumed_it_says_the_same(images, tmp_path, engine, monkeypatch):
    whole = run_of(images, tmp_path / "whole", "fedclip", engine=engine)
    inner, saves = RunFolder.save, []

    class Stop(Exception):
        pass

    def stopping(self, state, round):
        inner(self, state, round)
        saves.append(round)
        if round == 1:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", stopping)
        with pytest.raises(Stop):
            run_of(images, tmp_path / "cut", "fedclip", engine=engine)
    assert saves == [0, 1] and not RunFolder(tmp_path / "cut").done
    assert main(["resume", str(tmp_path / "cut")]) == 0
    assert scores(RunFolder(tmp_path / "cut")) == scores(whole) and scores(whole)[-1]["novel"] is not None
    assert last_of(RunFolder(tmp_path / "cut"))["hm"] == last_of(whole)["hm"]


def test_it_is_another_run_than_without(images, tmp_path):
    run_of(images, tmp_path / "run", "fedavg")
    with pytest.raises(FedvlmError, match=r"holds another run \(it differs in protocol\)"):
        run_of(images, tmp_path / "run", "fedavg", protocol="one")
    here, there = (setup_of(images, "fedavg", protocol=p) for p in ("base-to-novel", "one"))
    assert PlannedRun(here, Pools().load(here)).folder != PlannedRun(there, Pools().load(there)).folder
    data = RunFolder(tmp_path / "run").record.data
    assert tuple(data.classes) == FIVE[:2] and tuple(data.novel) == FIVE[2:]


@pytest.fixture(scope="module")
def bench(images, tmp_path_factory):
    """Three methods × two seeds, with what was printed and written."""
    out = tmp_path_factory.mktemp("novel")
    words = ["bench", "zero-shot", "fedclip", "fedavg", f"data={images}", "seeds=1,2", "rounds=2", "jobs=1", "lr=0.01"]
    words += ["protocol=base-to-novel", "partition=disjoint", "clients=2", "shots=4", f"out={out / 'runs'}"]
    assert main([*words, "--csv", str(out / "t.csv"), "--latex", str(out / "t.tex")]) == 0
    return out


def test_bench_prints_the_four_columns(bench, capsys):
    assert main(["compare", str(bench / "runs")]) == 0
    text = capsys.readouterr().out
    head, *lines = text[text.index("\nmethod ") + 1 :].splitlines()
    assert [w for w in head.split() if w in MEASURES] == [*MEASURES] and " G " not in head
    rows = {line.split()[0]: line for line in lines}
    assert rows["fedavg"].count("–") >= 2 and rows["fedclip"].count("±") == 4
    assert any(line.startswith("own classes (local): own models") for line in lines)


def test_files_have_them_too(bench):
    found = [RunFolder(p.parent) for p in sorted((bench / "runs").glob("*/run.json"))]
    assert len(found) == 6
    with (bench / "t.csv").open() as file:
        rows = {r["method"]: r for r in csv.DictReader(file)}
    assert list(rows["fedclip"])[:5] == ["method", *MEASURES] and rows["fedavg"]["novel"] == ""
    for m in MEASURES:
        values = [100 * last_of(r)[m] for r in found if r.record.method.name == "fedclip"]
        assert float(rows["fedclip"][m]) == pytest.approx(np.mean(values))
        assert float(rows["fedclip"][f"{m}_std"]) == pytest.approx(np.std(values, ddof=1))
    tex = (bench / "t.tex").read_text()
    assert r"Method & local & base & novel & hm \\" in tex and r"{lrrrr}" in tex and "fedavg & " in tex


def test_the_page_draws_them_by_round(bench, tmp_path):
    found = [RunFolder(p.parent) for p in sorted((bench / "runs").glob("*/run.json"))]
    line = next(x for x in gather(found) if x.label == "fedclip")
    for m in MEASURES:
        fedclip = [run for run in found if run.record.method.name == "fedclip"]
        by_round = np.mean([[100 * r[m] for r in run.rounds()] for run in fedclip], 0)
        assert line.over(m)[0] == pytest.approx(by_round)
    page(found, tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert "new classes novel %" in html and "new clients G" not in html
    assert (
        set(MEASURES) <= set(re.findall(r"<th[^>]*>(?:<[^>]*>)*([^<]+)<", html))
        and "2 classes trained on and 3 kept from everybody" in html
    )
    assert (
        "fedclip" in html and "new classes: not shown to be above" in html and "classes trained on: not shown" in html
    )


def test_both_protocols_in_one_table(bench, images, tmp_path):
    """Side by side, each with its own columns, and a method's two rows told apart."""
    setup = resolve("fedclip", {"data": str(images), "unseen": "noto", "rounds": 1})
    usual = train.train(PlannedRun(setup, Pools().load(setup), tmp_path / "usual"))
    found = [RunFolder(p.parent) for p in sorted((bench / "runs").glob("fedclip*/run.json"))]
    table = summarise([usual, *found])
    assert table.columns[1:9] == ["G", "P", *MEASURES, "S", "C"]
    one, other = sorted(table.rows, key=lambda r: "base-to-novel" in r["method"])
    assert one["novel"] == "–" and one["G"] != "–" and other["novel"] != "–" and other["G"] == "–"
    assert "protocol=base-to-novel" in other["method"] and "protocol" not in one["method"]


def test_published_numbers_stand_beside(bench, tmp_path):
    numbers = {"local": 80.0, "base": 79.5, "novel": 82.0, "hm": 80.7, "G": 1.0, "source": "a table"}
    found = []
    for path in sorted((bench / "runs").glob("fedclip*")):
        shutil.copytree(path, tmp_path / path.name)
        found.append(RunFolder(tmp_path / path.name))
        record = replace(found[-1].record, published=numbers)
        (tmp_path / path.name / "run.json").write_text(record.to_json())
    table = summarise(found)
    assert table.rows[0]["paper local/base/novel/hm"] == "80.00 / 79.50 / 82.00 / 80.70"
    assert "paper G/P/C" not in table.columns


def test_dry_says_what_is_kept(images, capsys):
    words = [f"{k}={v}" for k, v in (GIVEN | {"data": images}).items()]
    assert main(["run", "fedot", *words, "--dry"]) == 0
    text = capsys.readouterr().out
    assert "nobody trains on 3 novel classes, which adapter=rotation cannot be asked about" in text
    assert "12 of base and 18 of novel classes" in text


def test_it_predicts_among_base_classes(images, tmp_path, capsys):
    run_of(images, tmp_path / "run", "fedavg")
    picture = sorted((images / "noto" / "train").iterdir())[0]
    assert main(["predict", str(tmp_path / "run"), str(picture)]) == 0
    out = capsys.readouterr().out
    assert any(name in out for name in FIVE[:2])


def test_on_a_gpu_the_tower_is_copied_once():
    """`to` moves both halves, and they share the backbone's own tower as before."""
    tower = torch.nn.Linear(2, 2)
    inner = Task(("c",), torch.ones(1, 2), 2, 1.0, tower)
    moved = Task(("a",), torch.zeros(1, 2), 2, 1.0, tower, novel=inner).to(torch.device("meta"))
    assert moved.novel and moved.tower is moved.novel.tower and moved.tower is not tower
    assert moved.names().is_meta and moved.novel.names().is_meta and moved.novel.classes == ("c",)


def test_splits_are_those_of_every_protocol():
    """Taking classes away moves no image of the others between train and test."""
    items = items_of(9)
    whole = numbered(items)
    for seed in (0, 1):
        found = []
        for pool in (whole, with_novel_classes(whole)):
            federation = federate(pool, Layout("iid", clients=1), seed)
            low, *ends = federation.data.bounds[0]
            parts_of = dict(zip(SPLITS, np.split(federation.items, [e - low for e in ends[:-1]]), strict=True))
            found.append({s: {int(k) for k in v if int(items[int(k)].label) < 4} for s, v in parts_of.items()})
        assert found[0] == found[1]


def test_methods_without_the_protocol_answer_nothing():
    task, data = example("head")
    method = Method.build(
        registry.find("adapter", "none")(), registry.find("local", "sgd")(), registry.find("merge", "mean")(), task
    )
    assert method.base_and_novel == {} and not data.extras
