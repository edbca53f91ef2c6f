"""The figure and the page, from run folders written by hand: no training, and every number known."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib._pylab_helpers import Gcf
from PIL import Image

from fedvlm.core import FedvlmError
from fedvlm.report import fairness
from fedvlm.report.figures import LIGHT, figure, gather, spread
from fedvlm.report.page import page
from fedvlm.report.tables import summarise
from fedvlm.runs import Run

DOMAINS = ("art", "photo", "sketch")


def write(
    root: Path,
    method: str,
    unseen: str | None = None,
    seed: int = 1,
    rounds: int = 3,
    shares: bool = True,
    domains: Any = DOMAINS,
) -> Run:
    """A run folder as `train` leaves it; accuracy grows by 5 points a round from (client + seed) / 100."""
    records = []
    for k in range(rounds + 1):
        clients: dict[str, Any] = {}
        for j, name in enumerate(domains):
            score = {"test": round(0.3 + (10 * j + seed + 5 * k) / 100, 6)}
            clients[name] = {"shared": score} if shares else {}
            clients[name] |= {"personal": score} if name != unseen else {}
        own = float(np.mean([c["personal"]["test"] for c in clients.values() if "personal" in c]))
        g = clients[unseen]["shared"]["test"] if unseen and shares else None
        record = {"round": k, "personal": {"test": own}, "clients": clients, "G": g, "P": own, "asked": 2}
        records.append(record | {"bytes_up": 1500 * (k > 0), "bytes_down": 500 * (k > 0)})
    config = {
        "adapter": {"head": {}},
        "local": {"sgd": {"lr": 0.1}},
        "merge": {"mean": {}},
        "rounds": rounds,
        "seed": seed,
    }
    total = {f"bytes_{way}": sum(r[f"bytes_{way}"] for r in records) for way in ("up", "down")}
    info = {
        "identity": f"{method}-{unseen}-{seed}-{rounds}",
        "method": method,
        "config": config | {"unseen": [unseen] if unseen else [], "split": [60, 20, 20]},
        "data": {"name": "toy", "fingerprint": "f", "images": 90, "domains": list(domains), "classes": ["a", "b"]},
        "backbone": {"name": "tiny@1"},
        "versions": {"fedvlm": "0", "commit": "abc"},
        "result": {"last": records[-1], "selected": records[-1], "unseen": [unseen] if unseen else [], "seconds": 1.0}
        | total
        | {"parameters": {"shared": 4, "private": 0}},
    }
    folder = root / info["identity"].replace("/", "_")
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return Run(folder)


def many(root: Path) -> list[Run]:
    """Three targets × two seeds; methods of different lengths; one that shares nothing."""
    runs = []
    for target in DOMAINS:
        for seed in (1, 2):
            runs += [write(root, "zero-shot", target, seed, 0), write(root, "fedavg", target, seed, 3)]
            runs += [write(root, "fedot", target, seed, 7), write(root, "local-only", target, seed, 3, shares=False)]
    return runs


CASES = {
    "one run, names that are no formula": lambda root: [write(root, "fedavg", "a$^", domains=("a$^", "$b", "c"))],
    "frozen only": lambda root: [write(root, "zero-shot", "art", rounds=0)],
    "many": many,
    "nobody held out": lambda root: [write(root, "zero-shot", rounds=0), write(root, "fedavg")],
    "nothing shared": lambda root: [write(root, "local-only", d, shares=False) for d in DOMAINS],
    "nine methods": lambda root: [write(root, f"method-{k}-of-a-long-name", "art", k) for k in range(9)],
}


@pytest.mark.parametrize("case", CASES)
def test_figure(case: str, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    figure(CASES[case](tmp_path / "runs"), tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as image:
        width, height = image.size
        pixels = np.asarray(image.convert("RGB"), int)
    assert width >= 800 and height >= 900
    assert (pixels.min(2) < 120).sum() > 2000  # axes and words
    assert case == "frozen only" or (np.ptp(pixels, axis=2) > 60).sum() > 200  # marks in a method's colour
    assert dict(matplotlib.rcParams) == before and not Gcf.get_all_fig_managers()


@pytest.mark.parametrize("case", CASES)
def test_fairness_figure(case: str, tmp_path: Path) -> None:
    fairness.figure(CASES[case](tmp_path / "runs"), tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as image:
        pixels = np.asarray(image.convert("RGB"), int)
    assert (pixels.min(2) < 120).sum() > 1000
    assert case == "frozen only" or (np.ptp(pixels, axis=2) > 60).sum() > 200


def test_clients_are_sorted_from_worst_to_best(tmp_path: Path) -> None:
    """Ranks of one run by hand: the clients that trained, own models, held-out ones left out."""
    (line,) = gather([write(tmp_path, "fedavg", "art")], LIGHT)
    last = line.infos[0]["result"]["last"]["clients"]
    own = sorted(100 * v["personal"]["test"] for n, v in last.items() if n != "art")
    curve = fairness.served(line)
    assert curve is not None and curve[0] == pytest.approx(own[0]) and curve[-1] == pytest.approx(own[-1])
    assert (np.diff(curve) >= 0).all()


def test_figure_and_table_say_the_same(tmp_path: Path) -> None:
    runs = many(tmp_path)
    rows = {v["method"]: v for v in summarise(runs).values}
    for line in gather(runs, LIGHT):
        for metric in ("G", "P"):
            wanted = rows[line.label][metric]
            assert line.last(metric)[0] == pytest.approx(np.nan if wanted is None else wanted, nan_ok=True)
    fedot = next(x for x in gather(runs, LIGHT) if x.label == "fedot")
    assert fedot.rounds == list(range(8))
    assert fedot.over("G")[0] == pytest.approx([41.5 + 5 * k for k in range(8)])
    assert fedot.last("G")[1] == pytest.approx(0.5)  # seeds 1 point apart: s.d. 1/√2, s.e. 1/2


def test_labels_keep_apart_and_near() -> None:
    assert spread([5.0, 1.0], 1.0, 0, 10) == [5.0, 1.0]
    assert spread([5.0, 5.0, 5.0], 2.0, 0, 10) == [3.0, 5.0, 7.0]
    assert spread([9.9, 9.8], 1.0, 0, 10) == [10.0, 9.0]


def test_page(tmp_path: Path) -> None:
    page(many(tmp_path), tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    for source in re.findall(r"""(?:src|href|srcset)\s*=\s*["']?([^"'\s>]*)""", html):
        assert source.startswith("data:image/png;base64,")
    assert not re.search(r"<script|<link|@import|url\(", html)
    cells = re.findall(r'<td style="--h:([\d.]+)" class="([^"]*)">([^<]*)</td>', html)
    assert len(cells) == 4 * 9
    framed = [text for _, kind, text in cells if "held" in kind]
    assert framed == ["31.5", "41.5", "51.5", "46.5", "56.5", "66.5", "66.5", "76.5", "86.5", "–", "–", "–"]
    assert "1.5 kB" in html and "4.5 kB" in html  # fedavg: up a round, and in all
    local = next(row for row in re.findall(r"<tr>.*?</tr>", html) if ">local-only<" in row)
    assert "<td>–</td>" in local


def test_page_escapes_what_others_wrote_and_names_what_is_not_finished(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    runs = [write(tmp_path, "fedavg", evil, domains=(evil, 'b" onload="x', "c")), write(tmp_path, "fedot", "art")]
    runs[1].write("run.json", json.dumps({k: v for k, v in runs[1].info.items() if k != "result"}).encode())
    page(runs, tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert "<script" not in html and "&lt;script&gt;" in html and 'b" onload' not in html
    assert "left out (1): fedot-art-1-3" in html


def test_page_without_jinja2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(FedvlmError, match=r'pip install "fedvlm\[report\]"'):
        page([write(tmp_path, "fedavg", "art")], tmp_path / "page.html")
