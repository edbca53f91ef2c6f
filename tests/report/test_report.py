"""Tables, figures and the page, from run folders written by hand, so that every number is known without training."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib._pylab_helpers import Gcf
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from run_folders import CASES, many, write

from fedvlm.cli import demo
from fedvlm.core.records import MetricRecord, PartRecord
from fedvlm.errors import FedvlmError
from fedvlm.report import fairness
from fedvlm.report.figures import drawn, figure
from fedvlm.report.gains import against_frozen
from fedvlm.report.lines import gather, spaced
from fedvlm.report.page import page
from fedvlm.report.tables import settings, summarise
from fedvlm.report.written import write_csv
from fedvlm.system import console
from fedvlm.system.table import Table


@pytest.mark.parametrize("case", CASES)
def test_figure(case: str, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    figure(CASES[case](tmp_path / "runs"), tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as image:
        width, height = image.size
        pixels = np.asarray(image.convert("RGB"), int)
    assert width >= 700 and height >= 350
    assert (pixels.min(2) < 120).sum() > 2000  # axes and text
    grey = case in ("frozen only", "nothing shared")  # references
    assert grey or (np.ptp(pixels, axis=2) > 60).sum() > 200  # markers in a method's colour
    assert dict(matplotlib.rcParams) == before and not Gcf.get_all_fig_managers()


def test_clients_are_ranked_from_worst_to_best(tmp_path: Path) -> None:
    """Compared with the personal models of one run, without the held-out client."""
    (line,) = gather([write(tmp_path, "fedavg", "art")])
    last = line.records[0].finished.last["clients"]
    own = sorted(100 * v["personal"]["test"] for n, v in last.items() if n != "art")
    curve = fairness.ranked_scores(line)
    assert curve is not None and curve[0] == pytest.approx(own[0]) and curve[-1] == pytest.approx(own[-1])
    assert (np.diff(curve) >= 0).all()


def test_figure_and_table_agree(tmp_path: Path) -> None:
    runs = many(tmp_path)
    rows = {v["method"]: v for v in summarise(runs).values}
    for line in gather(runs):
        for metric in ("G", "P"):
            wanted = rows[line.label][metric]
            assert line.last(metric)[0] == pytest.approx(np.nan if wanted is None else wanted, nan_ok=True)
    fedot = next(x for x in gather(runs) if x.label == "fedot")
    assert fedot.rounds == list(range(8))
    assert fedot.over("G")[0] == pytest.approx([41.5 + 5 * k for k in range(8)])
    assert fedot.last("G")[1] == pytest.approx(0.5)  # seeds 1 point apart: s.d. 1/√2, s.e. 1/2


def test_labels_do_not_overlap_and_stay_near() -> None:
    assert spaced([5.0, 1.0], 1.0, 0, 10) == [5.0, 1.0]
    assert spaced([5.0, 5.0, 5.0], 2.0, 0, 10) == [3.0, 5.0, 7.0]
    assert spaced([9.9, 9.8], 1.0, 0, 10) == [10.0, 9.0]


def test_page(tmp_path: Path) -> None:
    page(many(tmp_path), tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    for source in re.findall(r"""(?:src|href|srcset)\s*=\s*["']?([^"'\s>]*)""", html):
        assert source.startswith(("data:", "#"))
    assert html.count("<script") == 1 and not re.search(r"@import|url\(|\sstyle=|\son\w+=", html)
    cells = re.findall(r'<td class="h(\d+)([^"]*)">([^<]*)</td>', html)
    assert len(cells) == 4 * 9
    held_out = [text for _, style, text in cells if "held" in style]
    assert held_out == ["31.5", "41.5", "51.5", "46.5", "56.5", "66.5", "66.5", "76.5", "86.5", "–", "–", "–"]
    assert "1.5 kB" in html and "4.5 kB" in html  # fedavg: up per round, and in total
    local = next(row for row in re.findall(r"<tr>.*?</tr>", html) if ">local-only<" in row)
    assert "<b>–</b>" in local


def test_page_escapes_names_and_lists_unfinished_runs(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    runs = [write(tmp_path, "fedavg", evil, domains=(evil, 'b" onload="x', "c")), write(tmp_path, "fedot", "art")]
    runs[1].write("run.json", replace(runs[1].record, result=None).to_json().encode())
    page(runs, tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert html.count("<script") == 1 and "&lt;script&gt;" in html and 'b" onload' not in html
    assert "left out (1)" in html and "fedot-art-1-3 (round 3 of 3)" in html


def test_page_without_jinja2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(FedvlmError, match=r'pip install "fedvlm\[report\]"'):
        page([write(tmp_path, "fedavg", "art")], tmp_path / "page.html")


def test_methods_on_presets_have_rows_of_their_own(tmp_path: Path) -> None:
    runs = [write(tmp_path, "ga", "art"), write(tmp_path, "ga", "art", on="unet")]
    assert [v["method"] for v in summarise(runs).values] == ["ga", "ga on=unet"]
    page(runs, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count(">ga on=unet</th>") >= 2


def test_runs_with_different_settings_are_separate_rows(tmp_path: Path) -> None:
    runs = [write(tmp_path, "fedavg", "art", seed, lr=lr) for lr in (0.1, 0.5) for seed in (1, 2)]
    table = summarise(runs)
    assert [(v["method"], v["runs"]) for v in table.values] == [("fedavg lr=0.1", 2), ("fedavg lr=0.5", 2)]
    assert [v["runs"] for v in summarise(runs[:2], apart=False).values] == [2]
    (one,) = summarise([runs[0], runs[2]], apart=False).values
    assert one["method"] == "fedavg" and one["runs"] == 2


def test_settings_of_the_same_name_in_two_parts_are_both_compared(tmp_path: Path) -> None:
    record = write(tmp_path, "fedavg", "art").record
    both = replace(record, merge=PartRecord("own.py", {"lr": 0.7}))
    assert settings(both)["lr"] == 0.1 and settings(both)["merge.lr"] == 0.7
    assert (
        settings(both)["data"] == "toy@f"
        and settings(both)["backbone"] == "tiny@1"
        and settings(both)["merge"] == "own.py"
    )


def test_published_numbers_come_from_the_record(tmp_path: Path) -> None:
    runs = [write(tmp_path, "fedavg", "art"), write(tmp_path, "fedot", "art")]
    assert not any("paper" in c for c in summarise(runs).columns)
    numbers = {"G": 90.5, "P": 91, "hm": 3.0, "source": "Someone 2025, Table 1"}
    runs[1].write("run.json", replace(runs[1].record, published=numbers).to_json().encode())
    table = summarise(runs)
    assert table.rows[1]["paper G/P/C"] == "90.50 / 91.00 / –" and "paper G/P/C" not in table.rows[0]
    assert table.values[1]["paper_G"] == 90.5 and "paper_hm" not in table.values[1]
    assert table.notes[-1].endswith("are not comparable: Someone 2025, Table 1")
    write_csv({"": table}, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["paper_G"], second["paper_G"], second.get("paper_C", "")) == ("", "90.5", "")


def test_further_metrics_are_columns(tmp_path: Path) -> None:
    """After the goals; in CSV also of all examples together. A run that lacks a metric has no mean."""
    recorded = {"ece": 0.125, "seconds": 0.5}  # a name that the table already has
    runs = [write(tmp_path, "fedavg", "art", 1, metrics=recorded), write(tmp_path, "fedot", "art", 1)]
    runs.append(write(tmp_path, "fedavg", "art", 2, metrics={"ece": 0.375}))
    table = summarise(runs)
    assert table.columns[1:5] == ["G", "P", "ece", "metrics.seconds"] and table.title("ece") == "ece %"
    assert [(r["ece"], r["metrics.seconds"], r["seconds"]) for r in table.rows] == [
        ("25.00", "–", "1"),
        ("–", "–", "1"),
    ]
    assert table.values[0]["ece"] == 25 and table.values[0]["ece_pooled"] == 12.5 and table.values[1]["ece"] is None
    assert any(n.startswith("ece, metrics.seconds: personal models") for n in table.notes)
    write_csv({"": table}, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open() as file:
        first, second = csv.DictReader(file)
    assert (first["ece"], first["ece_pooled"], second["ece"], second["ece_pooled"]) == ("25.0", "12.5", "", "")
    assert list(first)[-4:] == ["ece", "ece_pooled", "metrics.seconds", "metrics.seconds_pooled"]
    page(runs, tmp_path / "page.html")
    assert ">ece %</th>" in (tmp_path / "page.html").read_text()


def test_only_shares_are_in_percent(tmp_path: Path) -> None:
    """A metric whose class says percent = False, such as a Brier score."""
    run = write(tmp_path, "fedavg", "art", metrics={"ece": 0.125, "brier": 0.86})
    about = [MetricRecord("ece", percent=True), MetricRecord("brier", percent=False)]
    run.write("run.json", replace(run.record, metrics=about).to_json().encode())
    table = summarise([run])
    assert (table.rows[0]["ece"], table.rows[0]["brier"]) == ("12.50", "0.86")
    told = [n for n in table.notes if "personal models, mean over clients and runs" in n]
    assert told == [
        "ece: personal models, mean over clients and runs, in %",
        "brier: personal models, mean over clients and runs",
    ]


def test_without_further_metrics_nothing_is_added(tmp_path: Path) -> None:
    table = summarise([write(tmp_path, "fedavg", "art")])
    assert table.columns == ["method", "G", "P", "S", "C", "rounds", "MB", "seconds", "shared", "private"]
    assert len(table.notes) == 4 and not any("pooled" in k for k in table.values[0])
    write_csv({"": table}, tmp_path / "t.csv")
    names = "method,G,S,P,C,G_std,S_std,P_std,C_std,seeds,runs,rounds,mb,up_mb,down_mb,shared,private,seconds"
    names += ",worst,best,gap_variance"
    head, row = (tmp_path / "t.csv").read_text().splitlines()
    assert head == names and row.split(",")[-12:] == [
        "1",
        "1",
        "3.0",
        "0.006",
        "0.0015",
        "0.0005",
        "4",
        "0",
        "1.0",
        "",
        "",
        "",
    ]


def test_methods_are_compared_with_the_frozen_model(tmp_path: Path) -> None:
    assert against_frozen(summarise(many(tmp_path, (1, 2, 3)))) == [
        "new clients: above zero-shot: fedavg, fedot",
        "own clients: above zero-shot: fedavg, fedot, local-only",
    ]
    assert against_frozen(summarise([write(tmp_path / "one", "fedavg", "art")])) == []


EXAMPLE = Table(
    ["method", "G", "settings"],
    [{"method": "a<b", "G": "9.00 ± 1.00", "settings": "x"}, {"method": "fedot", "G": "–"}],
    ["C & D: <all>"],
    [{"method": "a<b", "G": 9.0, "G_std": 1}, {"method": "fedot", "G": None, "G_std": None}],
)


def test_a_table_as_text() -> None:
    """Numbers are aligned to the right, text to the left; no spaces at the end of a line."""
    assert str(EXAMPLE).splitlines() == [
        "method            G  settings",
        "a<b     9.00 ± 1.00  x",
        "fedot             –",
        "C & D: <all>",
    ]
    assert str(Table(["a"], [])) == "a"


def test_a_table_as_html_is_escaped() -> None:
    html = EXAMPLE._repr_html_()
    cells = re.findall(r'<t[hd] style="text-align: (\w+)">([^<]*)</t[hd]>', html)
    assert cells[:3] == [("left", "method"), ("right", "G"), ("left", "settings")]
    assert cells[3:] == [
        ("left", "a&lt;b"), ("right", "9.00 ± 1.00"), ("left", "x"), ("left", "fedot"), ("right", "–"), ("left", ""),
    ]  # fmt: skip
    assert "C &amp; D: &lt;all&gt;" in html and html.count("<tr>") == 3 and "<all>" not in html


def test_a_table_as_a_data_frame() -> None:
    pytest.importorskip("pandas")
    frame = EXAMPLE.to_pandas()
    assert list(frame.index) == ["a<b", "fedot"] and list(frame.columns) == ["G", "G_std"]
    assert frame.loc["a<b", "G"] == 9 and np.isnan(frame.loc["fedot", "G"]) and frame["G"].dtype == float
    assert Table(["a", "b"], []).to_pandas().empty


def test_a_data_frame_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FedvlmError, match="pip install pandas"):
        EXAMPLE.to_pandas()


def test_a_figure_is_an_object_without_global_state(tmp_path: Path) -> None:
    """It can be saved later, by whom it was given to, and looks as the file that the command writes."""
    runs, before = CASES["one run, names with $"](tmp_path / "runs"), dict(matplotlib.rcParams)
    made = drawn(runs)
    assert isinstance(made, Figure) and not list(tmp_path.glob("*.png"))
    assert dict(matplotlib.rcParams) == before and not Gcf.get_all_fig_managers()
    made.savefig(tmp_path / "later.png", dpi=200)
    figure(runs, tmp_path / "at once.png")
    with Image.open(tmp_path / "later.png") as one, Image.open(tmp_path / "at once.png") as other:
        assert one.size == other.size
        assert np.abs(np.asarray(one.convert("RGB"), int) - np.asarray(other.convert("RGB"), int)).max() == 0
    assert made._repr_png_().startswith(b"\x89PNG")


def test_figures_do_not_import_pyplot() -> None:
    code = "import sys, fedvlm.report.figures, fedvlm.report.fairness; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_console_imports_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "matplotlib", "PIL", "transformers")
    code = f"import sys, fedvlm.system.console, fedvlm.cli.demo; assert not set({heavy}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"zero-shot", "fedavg", "fedot"} < set(demo.METHODS) and demo.DEFAULTS["data"] == "emoji"


def test_a_shown_table_prints_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console.show(Table(["class"], [{"class": "[red]cat[/]"}], ["see [bold]here[/]"]))
    console.note("[dim]")
    console.warn("[x]")
    shown = capsys.readouterr()
    assert [line.strip() for line in shown.out.splitlines()] == ["class", "[red]cat[/]", "see [bold]here[/]", "[dim]"]
    assert shown.err.strip() == "[x]"


@pytest.mark.parametrize("widgets", [True, False])
def test_notebooks_show_a_progress_bar(widgets: bool, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """rich draws it in an ipywidgets output; where there are no widgets, lines are printed instead."""
    displayed: list[object] = []

    class Output:
        def __enter__(self) -> Output:
            return self

        def __exit__(self, *error: object) -> None: ...

        def clear_output(self, wait: bool) -> None: ...

        def close(self) -> None: ...

    modules = {name: types.ModuleType(name) for name in ("IPython", "IPython.display", "ipywidgets")}
    modules["IPython.display"].display = displayed.append  # type: ignore[attr-defined]
    modules["ipywidgets"].Output = Output  # type: ignore[attr-defined]
    for name, module in modules.items():
        module.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
        if widgets or name != "ipywidgets":
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(console, "out", Console(force_jupyter=True, force_terminal=False))
    with console.progress("training", 3) as update:
        update(3, "loss 0.1")
    assert any(isinstance(x, Output) for x in displayed) == widgets
