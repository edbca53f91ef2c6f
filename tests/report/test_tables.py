"""Tables that show the shared model, what is best, and each data set by itself; run folders as in run_folders.py."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import many, write

from fedvlm import api
from fedvlm.cli import main
from fedvlm.core.records import BackboneRecord, DataRecord, PrivacyRecord
from fedvlm.evaluation.protocols import by_seed
from fedvlm.report.gains import against, best, gain
from fedvlm.report.tables import WORST, privacy_lines, summarise
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
    assert table.columns[:3] == ["method", "S", "P"]
    assert (table.values[0]["S"], table.values[0]["P"]) == (pytest.approx(26.0), pytest.approx(56.0))
    assert any(n.startswith("S: shared model on the clients that train; P: ") for n in table.notes)
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


def test_the_best_is_bold_only_beyond_the_spread(tmp_path: Path) -> None:
    table = summarise(many(tmp_path))
    assert table.bold == {("fedot", m) for m in ("G", "S", "P", "C")}
    assert table.notes[-1] == (
        "best by more than two standard errors of the paired difference over seeds (bold): fedot (G, S, P, C)"
    )
    close = {"a": {"P": {1: 50.0, 2: 60.0, 3: 55.0}}, "b": {"P": {1: 51.0, 2: 52.0, 3: 56.0}}}
    assert best(close, "P") == ""  # a is 2 better on average, with a standard error of 3
    assert best(close | {"a": {"P": {1: 59.0, 2: 60.0, 3: 64.1}}}, "P") == "a"
    assert best({"a": {"P": {1: 90.0}}, "b": {"P": {1: 10.0}}}, "P") == ""  # one seed has no spread
    assert best({"a": {"P": {1: 90.0, 2: 80.0}}}, "P") == ""
    assert "<b>76.50 ± 0.71</b>" in table._repr_html_()


def test_a_gain_is_told_with_its_standard_error() -> None:
    """By hand: 1, 2, 5 have the mean 8/3 and the deviation 2.08 (over n − 1), so the error is 2.08/√3."""
    found = gain({1: 11.0, 2: 22.0, 3: 35.0, 9: 0.0}, {1: 10.0, 2: 20.0, 3: 30.0})
    assert found == (pytest.approx(8 / 3), pytest.approx(1.2019, abs=1e-4), 3) and found.clear
    less = gain({1: 10.0, 2: 22.0, 3: 35.0}, {1: 10.0, 2: 20.0, 3: 30.0})  # 0, 2, 5: 1.6 standard errors
    assert 1 < less.mean / less.error < 2 and not less.clear


def test_the_worst_tenth_is_that_of_the_personal_models(tmp_path: Path) -> None:
    run = write(tmp_path, "fedot")
    last = run.record.finished.last
    views = {"shared": {"test": 0.3, "worst": 0.1, "best": 0.5}, "personal": {"test": 0.6, "worst": 0.4, "best": 0.8}}
    run.write(
        "run.json", replace(run.record, result=replace(run.record.finished, last=last | views)).to_json().encode()
    )
    table = summarise([run])
    assert table.rows[0][WORST] == "40.00" and table.values[0]["best"] == pytest.approx(80)


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
    assert "\x1b[1m9\x1b[0m" in text and "\x1b[1m8" not in text and "[b]" in text


def test_without_held_out_clients_the_frozen_model_is_compared_on_both(tmp_path: Path) -> None:
    runs = [write(tmp_path, m, seed=s, rounds=r) for m, r in (("zero-shot", 0), ("fedavg", 3)) for s in (1, 2)]
    assert [line.split(" (")[1][:1] for line in against(summarise(runs))] == ["S", "P"]


@pytest.fixture
def two_sets(tmp_path: Path) -> Path:
    for data, rounds in (("pacs", 3), ("flowers", 5)):
        for seed in (1, 2):
            on(write(tmp_path / data, "zero-shot", "art", seed, 0), data)
            on(write(tmp_path / data, "fedavg", "art", seed, rounds), data)
    return tmp_path


def test_compare_has_a_block_for_each_data_set(two_sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its own baseline, and names instead of fingerprints."""
    out = two_sets / "t.csv"
    assert main(["compare", str(two_sets), "--csv", str(out), "--latex", str(two_sets / "t.tex")]) == 0
    text = capsys.readouterr().out
    first, second = text.split("pacs with tiny")
    assert first.startswith("flowers with tiny\nmethod") and "mark-of" not in text
    assert "fedavg beats zero-shot" in first and "C +25.0" in first and "C +15.0" in second
    with out.open() as file:
        rows = [(r["data"], r["method"], r["seeds"]) for r in csv.DictReader(file)]
    assert rows[1] == ("flowers with tiny", "fedavg", "2") and rows[3][0] == "pacs with tiny"
    assert (two_sets / "t.tex").read_text().count(r"\begin{tabular}") == 2
    assert str(api.runs(two_sets)).count("zero-shot") == 2


def test_the_page_has_a_block_for_each_data_set(two_sets: Path) -> None:
    assert main(["report", str(two_sets), "--out", str(two_sets / "page.html")]) == 0
    html = (two_sets / "page.html").read_text()
    assert "<b>56.50 ± 0.71</b>" in html
    assert html.count("<h1>") == 1 and html.count("<h3>Summary</h3>") == 2
    assert html.index(">flowers with tiny</h2>") < html.index("C +25.0") < html.index(">pacs with tiny</h2>")


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


def test_ls_runs_names_data_and_scores(two_sets: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("FEDVLM_RUNS", str(two_sets))
    write(two_sets, "fedot", "art").write("run.json", unfinished(two_sets))
    assert main(["ls", "runs"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["method", "data", "backbone"]
    (one,) = [line.split() for line in lines if line.endswith("fedavg-art-1-5")]
    assert one == ["fedavg", "flowers", "tiny", "art", "1", "5", "56.0", "–", "71.0", "fedavg-art-1-5"]
    assert any("not finished" in line for line in lines)


def unfinished(root: Path) -> bytes:
    return replace(write(root / "other", "fedot", "art").record, result=None).to_json().encode()
