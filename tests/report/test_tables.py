"""Tables that show the shared model, what is best, and each data set by itself; run folders as in run_folders.py."""

from __future__ import annotations

import csv
from dataclasses import fields, replace
from pathlib import Path

import pytest
from helpers import other_values
from rich.console import Console
from run_folders import many, write

from fedvlm import api
from fedvlm.cli import main
from fedvlm.config.config import Config, resolve
from fedvlm.core.records import BackboneRecord, DataRecord, PrivacyRecord
from fedvlm.errors import FedvlmError
from fedvlm.evaluation.protocols import by_seed
from fedvlm.report.gains import above_frozen, against_frozen, gain, outside, quantile, verdict
from fedvlm.report.tables import grouped, privacy_lines, summarise
from fedvlm.report.written import latex
from fedvlm.system import console
from fedvlm.system.table import Table
from fedvlm.training.folder import RunFolder


def with_shared(run: RunFolder, below: float) -> RunFolder:
    """The run with a shared model that is so much worse than the personal ones."""
    record = run.record
    last = record.finished.last
    clients = {n: v | {"shared": {"test": v["personal"]["test"] - below}} for n, v in last["clients"].items()}
    result = replace(record.finished, last=last | {"clients": clients})
    run.write("run.json", replace(record, result=result).to_json().encode())
    return run


def on(run: RunFolder, data: str, backbone: str = "tiny") -> RunFolder:
    """The run on other data."""
    record = run.record
    about = DataRecord(data, f"mark-of-{data}", "accuracy", 90, record.data.domains, record.data.classes)
    encoder = BackboneRecord(backbone, f"mark-of-{backbone}", 4, 1.0)
    run.write("run.json", replace(record, data=about, backbone=encoder).to_json().encode())
    return run


def test_the_shared_model_is_in_the_table_where_nobody_is_held_out(tmp_path: Path) -> None:
    """S by hand: mean over clients; G and C, which need held-out clients, are not columns of dashes."""
    run = with_shared(write(tmp_path, "fedot"), 0.3)
    table = summarise([run])
    assert table.columns[:3] == ["method", "P", "S"]
    assert (table.values[0]["S"], table.values[0]["P"]) == (pytest.approx(26.0), pytest.approx(56.0))
    said = "own clients (P): the clients that train, each with"
    assert any(n.startswith(said) and "own, shared (S): " in n for n in table.notes)
    assert any("the shared model (S 26.0) is far below the personal models (P 56.0)" in n for n in table.notes)
    assert not any("far below" in n for n in summarise([write(tmp_path, "fedavg")]).notes)


def test_the_shared_model_of_many_clients(tmp_path: Path) -> None:
    """Too many to be recorded one by one: the record has their mean."""
    record = write(tmp_path, "fedot").record
    last = record.finished.last | {"clients": {}, "shared": {"test": 0.25}, "P": 0.5}
    scores = by_seed([replace(record, result=replace(record.finished, last=last))])[1]
    assert (scores["S"], scores["P"]) == (0.25, 0.5)


def test_a_held_out_client_is_not_in_the_shared_models_score(tmp_path: Path) -> None:
    (row,) = summarise([write(tmp_path, "fedavg", "sketch")]).values
    assert (row["G"], row["S"]) == (pytest.approx(66.0), pytest.approx(51.0))


def test_the_best_is_marked_from_three_seeds_on(tmp_path: Path) -> None:
    two = summarise(many(tmp_path / "two"))
    assert two.bold == two.level == set() and not any("best:" in n for n in two.notes)
    table = summarise(many(tmp_path / "three", (1, 2, 3)))
    assert table.bold == {("fedot", m) for m in ("G", "S", "P", "C")} and table.level == set()
    assert table.notes[-1].endswith("is above 0; = level with the highest")
    assert table.head == [
        "fedot is best for new and own clients.",
        "new clients  77.0 %  best   fedot, 20.0 above fedavg (20.0 to 20.0), higher on 3 of 3 clients",
        "own clients  77.0 %  best   fedot, 20.0 above fedavg (20.0 to 20.0), higher on 3 of 3 clients",
    ]
    assert "<b>77.00 ± 1.00</b>" in table._repr_html_() and "77.00 ± 1.00 *" in str(table)
    assert r"fedot & \textbf{77.00 $\pm$ 1.00} &" in latex({"": table})


def test_best_and_level_by_hand() -> None:
    """Differences of 1, 2, 3 have the mean 2 and the error 0.577; t(97.5 %, 2) = 4.303 makes it 2 ± 2.48: level. 2, 2.5, 3
    make it 2.5 ± 1.24: best."""
    b = {"P": {1: 50.0, 2: 50.0, 3: 50.0}}
    found = verdict({"a": {"P": {1: 51.0, 2: 52.0, 3: 53.0}}, "b": b}, "P")
    assert found and not found.best and found.level == ["a", "b"]
    assert found.gain and found.gain.interval == (pytest.approx(-0.484, abs=1e-3), pytest.approx(4.484, abs=1e-3))
    clear = {"a": {"P": {1: 52.0, 2: 52.5, 3: 53.0}}, "b": b}
    by_client = {"a": {"P": {"x": 3.0, "y": 1.0, "z": 2.0}}, "b": {"P": {"x": 1.0, "y": 1.0}}}
    found = verdict(clear, "P", by_client)
    assert (
        found and found.best and found.level == [] and (found.highest, found.rival, found.clients) == ("a", "b", (1, 2))
    )
    for seeds in ((1, 2), (1,)):  # nothing is said with fewer than three seeds
        few = {name: {"P": {s: row["P"][s] for s in seeds}} for name, row in clear.items()}
        found = verdict(few, "P")
        assert found and not found.best and found.level == [] and found.highest == "a"
    alone = verdict({"a": b, "c": {"P": {}}}, "P")
    assert alone and not alone.best and alone.rival == "" and verdict({"a": b}, "G") is None


def test_a_third_row_can_keep_the_first_from_being_the_best() -> None:
    rows = {"a": {"P": {1: 52.0, 2: 52.5, 3: 53.0}}, "b": {"P": {1: 50.0, 2: 50.0, 3: 50.0}}}
    found = verdict(rows | {"c": {"P": {1: 52.5, 2: 51.5, 3: 52.0}}}, "P")
    assert found and not found.best and found.level == ["a", "c"]


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30])
def test_students_distribution(freedom: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)
    assert outside(-1.3, freedom) == pytest.approx(2 * stats.t.sf(1.3, freedom), rel=1e-9)


def test_two_equal_methods_are_seldom_called_different() -> None:
    """Within two standard errors of 5 % in 10,000 draws (0.44); the rule before, two standard errors, named 18 % at 3."""
    import best

    for seeds in best.SEEDS:
        found = best.drawn(seeds, best.DRAWS, better=0.0, spread=1.0)
        assert found["a"] + found["b"] <= 544 * (seeds > 2)


def test_above_the_frozen_model_is_corrected_for_many_methods() -> None:
    """Holm: chances of 0.020 and 0.030 of two methods; 0.020 is above 0.05/2 only with one more method beside them."""
    frozen = {"G": {1: 50.0, 2: 50.0, 3: 50.0}}

    def method(t: float) -> dict[str, dict[int, float]]:
        """Differences of mean t and standard error 1."""
        return {"G": {1: 50 + t - 3**0.5, 2: 50 + t, 3: 50 + t + 3**0.5}}

    t = {"a": 7.0, "b": 5.7, "c": 0.1}  # two-sided chances at 2 degrees of freedom: 0.020, 0.029, 0.93
    assert [round(outside(v, 2), 3) for v in t.values()] == [0.02, 0.029, 0.929]
    few = above_frozen({"zero-shot": frozen, "a": method(7.0), "b": method(5.7)}, "G")
    assert {n: yes for n, (_, yes) in few.items()} == {"a": True, "b": True}
    more = above_frozen({"zero-shot": frozen} | {n: method(v) for n, v in t.items()}, "G")
    assert {n: yes for n, (_, yes) in more.items()} == {"a": False, "b": False, "c": False}
    below = above_frozen({"zero-shot": frozen, "a": method(-9.0)}, "G")
    assert below["a"][0].below and not below["a"][1]


def test_a_gain_is_told_with_its_interval() -> None:
    """By hand: 1, 2, 5 have the mean 8/3 and the deviation 2.08 (over n − 1), so the error is 2.08/√3, times 4.303 5.17."""
    found = gain({1: 11.0, 2: 22.0, 3: 35.0, 9: 0.0}, {1: 10.0, 2: 20.0, 3: 30.0})
    assert found == (pytest.approx(8 / 3), pytest.approx(1.2019, abs=1e-4), 3)
    assert found and str(found) == "+2.7, -2.5 to 7.8" and not found.above and not found.below
    assert str(gain({1: 1.0}, {1: 2.0})) == "-1.0, one seed"


def test_the_worst_tenth_is_that_of_the_personal_models(tmp_path: Path) -> None:
    run = write(tmp_path, "fedot")
    last = run.record.finished.last
    views = {"shared": {"test": 0.3, "worst": 0.1, "best": 0.5}, "personal": {"test": 0.6, "worst": 0.4, "best": 0.8}}
    run.write(
        "run.json", replace(run.record, result=replace(run.record.finished, last=last | views)).to_json().encode()
    )
    table = summarise([run])
    assert table.rows[0]["worst"] == "40.00" and table.values[0]["best"] == pytest.approx(80)


def test_of_several_budgets_the_largest_epsilon_is_told_first(tmp_path: Path) -> None:
    runs = []
    for seed, epsilon in ((1, 2.0), (2, 7.0), (3, 4.0)):
        record = write(tmp_path, "fedavg", seed=seed).record
        spent = PrivacyRecord("client", epsilon, 1e-5, None, 1.0, 1.0, 0.0, "server", "all", "added or removed")
        runs.append(replace(record, result=replace(record.finished, privacy=spent)))
    assert [line.split(",")[0] for line in privacy_lines(runs)] == ["ε = 7", "ε = 4", "ε = 2"]


def test_a_terminal_prints_it_bold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Console(force_terminal=True, width=100, highlight=False, markup=False, color_system="standard")
    monkeypatch.setattr(console, "out", terminal)
    console.show(Table(["method", "P"], [{"method": "a", "P": "9"}, {"method": "[b]", "P": "8"}], bold={("a", "P")}))
    text = capsys.readouterr().out
    assert "\x1b[1m9 *\x1b[0m" in text and "\x1b[1m8" not in text and "[b]" in text


def test_without_held_out_clients_the_frozen_model_is_compared_on_own_clients(tmp_path: Path) -> None:
    runs = [write(tmp_path, m, seed=s, rounds=r) for m, r in (("zero-shot", 0), ("fedavg", 3)) for s in (1, 2)]
    assert against_frozen(summarise(runs)) == [
        "own clients: not shown to be above zero-shot: fedavg (+15.0, 15.0 to 15.0)"
    ]


@pytest.fixture
def two_sets(tmp_path: Path) -> Path:
    for data, rounds in (("pacs", 3), ("flowers", 5)):
        for seed in (1, 2, 3):
            on(write(tmp_path / data, "zero-shot", "art", seed, 0), data)
            on(write(tmp_path / data, "fedavg", "art", seed, rounds), data)
    return tmp_path


def test_compare_has_a_block_for_each_data_set(two_sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its own baseline, and names instead of fingerprints."""
    out = two_sets / "t.csv"
    assert main(["compare", str(two_sets), "--csv", str(out), "--latex", str(two_sets / "t.tex")]) == 0
    text = capsys.readouterr().out
    first, second = text.split("pacs with tiny")
    assert first.startswith("flowers with tiny\nfedavg is best for new and own clients.\n") and "mark-of" not in text
    assert (
        "new clients: above zero-shot: fedavg" in first and "25.0 above zero-shot" in first and "15.0 above" in second
    )
    with out.open() as file:
        rows = [(r["data"], r["method"], r["seeds"]) for r in csv.DictReader(file)]
    assert rows[0] == ("flowers with tiny", "fedavg", "3") and rows[3][0] == "pacs with tiny"
    assert (two_sets / "t.tex").read_text().count(r"\begin{tabular}") == 2
    assert str(api.runs(two_sets)).count("\nzero-shot ") == 2


def test_the_page_has_a_block_for_each_data_set(two_sets: Path) -> None:
    assert main(["report", str(two_sets), "--out", str(two_sets / "page.html")]) == 0
    html = (two_sets / "page.html").read_text()
    assert "<b>57.00 ± 1.00 *</b>" in html
    assert html.count("<h1>") == 1 and html.count("<h3>All columns</h3>") == 2
    assert html.index("flowers · tiny") < html.index("25.0 above zero-shot") < html.index("pacs · tiny")


def test_data_of_one_name_are_told_apart_by_fingerprint(tmp_path: Path) -> None:
    runs = [write(tmp_path / "a", "fedavg", "art"), on(write(tmp_path / "b", "fedavg", "art"), "toy")]
    runs.append(on(write(tmp_path / "c", "fedavg", "art"), "pacs"))
    names = list(api.Runs([api.Run(r) for r in runs]).tables())
    assert names == [
        "toy with tiny (data f, backbone 1)",
        "toy with tiny (data mark-of-, backbone mark-of-)",
        "pacs with tiny",
    ]
    labels = [str(v["method"]) for v in summarise(runs).values]
    assert labels[2].startswith("fedavg data=pacs ") and labels[0].startswith("fedavg data=toy@f ")


def altered(run: RunFolder, key: str, value: object) -> RunFolder:
    """A copy of the run with another value of a key; all of its keys are recorded."""
    complete = resolve("fedavg", {}).settings() | run.record.config
    value = list(value) if isinstance(value, tuple) else value
    copied = RunFolder(run.folder.parent / f"{run.folder.name}-{len(list(run.folder.parent.iterdir()))}")
    copied.write("run.json", replace(run.record, config=complete | {key: value}).to_json().encode())
    return copied


# keys in which the runs of one row may differ: over what they are means, where and how fast they were computed, what was
# measured beside, and what is compared by other things than the key's value
ONE_ROW = {"seed", "seeds", "unseen", "protocol", "metrics"}
ONE_ROW |= {"federation", "engine", "device", "chunk", "workers", "threads", "timeout", "grace", "jobs", "launcher"}
ONE_ROW |= {"start_timeout"}
ONE_ROW |= {"launch", "log", "out"}
ONE_ROW |= {"data", "backbone", "names", "split_file", "duplicates", "columns"}  # by the fingerprints of what they hold


@pytest.mark.parametrize("key", sorted(f.name for f in fields(Config)))
def test_runs_that_differ_are_two_rows(tmp_path: Path, key: str) -> None:
    run = write(tmp_path, "fedavg", "art")
    rows = grouped([altered(run, "out", "here"), altered(run, key, other_values()[key])])
    if key in ONE_ROW:
        assert [len(records) for records in rows.values()] == [2]
    else:
        assert len(rows) == 2 and any(f"{key}=" in label for label in rows)


@pytest.mark.parametrize("value", ["base-to-novel", "leave-one-domain-out"])
def test_what_a_protocol_removes_is_a_row_of_its_own(tmp_path: Path, value: str) -> None:
    run = write(tmp_path, "fedavg", "art")
    groups = grouped([altered(run, "out", "here"), altered(run, "protocol", value)])
    assert len(groups) == (2 if value == "base-to-novel" else 1)


# keys that a fair table need not name: which examples are used (by fingerprint) and where it was computed; and those of the
# training that only "settings that belong to the methods" tells of
UNNAMED = ONE_ROW - {"seed", "unseen"} | {"domains", "classes", "stride", "broken", "values", "evaluate_every"}
UNNAMED |= {"bound", "clip_norm", "clip_quantile"}


@pytest.mark.parametrize("key", sorted({f.name for f in fields(Config)} - UNNAMED))
def test_a_fair_table_names_what_its_rows_differ_in(tmp_path: Path, key: str) -> None:
    one, two = (write(tmp_path, method, "art") for method in ("fedavg", "fedclip"))
    alike = [altered(run, "out", "here") for run in (one, two)]
    assert len(summarise(alike, fair=True).values) == 2
    with pytest.raises(FedvlmError, match=rf"these differ in {key} .*\(fedavg\) and .*\(fedclip\)"):
        summarise([alike[0], altered(two, key, other_values()[key])], fair=True)


EFFORT = {"local": ("epochs", "batch", "budget"), "merge": ("weights",), "adapter": ("rank", "layers", "projections")}


@pytest.mark.parametrize(("part", "key"), [(part, key) for part, keys in EFFORT.items() for key in keys])
def test_a_fair_table_names_the_effort_that_was_given_for_one_row(tmp_path: Path, part: str, key: str) -> None:
    """What a recipe sets itself belongs to the method, and is told in a note."""

    def run(method: str, value: int, given: bool) -> RunFolder:
        made = write(tmp_path / f"{method}-{value}-{given}", method, "art")
        found = replace(getattr(made.record, part), settings={key: value})
        told = {key: value} if given else {}
        made.write("run.json", replace(made.record, **{part: found}, given=told).to_json().encode())
        return made

    plain = run("fedavg", 1, False)
    assert f"{key} 1 (fedavg) and 2 (fedclip)" in " ".join(
        summarise([plain, run("fedclip", 2, False)], fair=True).notes
    )
    with pytest.raises(FedvlmError, match=rf"differ in {key} 1 \(fedavg\) and 2 \(fedclip\)"):
        summarise([plain, run("fedclip", 2, True)], fair=True)


def test_ls_runs_names_data_and_scores(two_sets: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("FEDVLM_RUNS", str(two_sets))
    write(two_sets, "fedot", "art").write("run.json", unfinished(two_sets))
    assert main(["ls", "runs"]) == 0
    _, head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["#", "method", "new", "clients", "G"]
    (one,) = [line.split() for line in lines if "fedavg-art-1-5" in line]
    assert one[1:] == ["fedavg", "56.0", "71.0", "–", "5", "fedavg-art-1-5", "art", "1", "flowers", "tiny"]
    assert any("not finished" in line for line in lines)


def unfinished(root: Path) -> bytes:
    return replace(write(root / "other", "fedot", "art").record, result=None).to_json().encode()
