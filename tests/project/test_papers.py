"""Tables of papers: manifests, a rehearsal of one table of each paper, ours beside theirs, and fair tables."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reproduce
import yaml
from helpers import train_small
from papers import curves, manifest, protocol, published
from papers.data import BACKBONES, Found, locate, other_backbone, vision
from papers.manifest import LAYOUTS, data_sets, find, members, numbers_of, parts, runnable
from papers.measures import half_width, seed_values
from papers.rehearsal import made_up
from papers.run import keys_of, unlike_others
from run_folders import DOMAINS
from run_folders import write as fake_run

from fedvlm import api
from fedvlm.cli import main
from fedvlm.config import catalogue, recipe
from fedvlm.config.config import resolve
from fedvlm.errors import FedvlmError
from fedvlm.report.tables import differences, rule, summarise
from fedvlm.studies import comparison
from fedvlm.training.folder import RunFolder

PAPERS = published.paper_names()


@pytest.mark.parametrize("paper", PAPERS)
def test_every_manifest_can_be_read_and_its_runs_can_be_set_up(paper):
    """Wrong keys, methods, data sets, measures and numbers are errors of `parts`, wrong keys of runs of `resolve`."""
    known = parts(paper)
    assert known and sum(len(row.numbers) for part in known for row in part.rows) > 100
    keys = {k.name for k in catalogue.load().run}
    seen = set()
    for part in known:
        assert set(part.measures) >= {m for row in part.rows for m in row.numbers}
        assert part.missing or part.over or part.data in data_sets(), part.title
        assert not part.missing or not part.able
        titles = [row.title for row in part.rows]
        assert len(set(titles)) == len(titles), (part.title, part.name, titles)
        for row in part.able:
            pairs = {(row.method, row.on, key, str(value)) for key, value in {**part.keys, **row.settings}.items()}
            if not pairs <= seen:
                seen |= pairs
                setup = resolve(row.method, keys_of(part, row, Found("x", {}, ""), {}))
                assert setup.config.rounds == part.keys.get("rounds", setup.config.rounds) or not setup.config.rounds
        assert {"seeds", "protocol", "score"} <= keys


@pytest.mark.parametrize("paper", PAPERS)
def test_a_column_of_a_table_means_the_same_for_every_row(paper):
    """Split, images, model, weights, optimiser and rate agree, or the row says why they do not; nothing is cut short."""
    for part in parts(paper):
        setups = {row.title: resolve(row.method, keys_of(part, row, Found("x", {}, ""), {})) for row in part.able}
        explained = {row.title: set(row.settings) if row.why else set() for row in part.able}
        for title, keys in unlike_others(part, setups).items():
            assert keys.keys() <= explained[title], (part.title, part.name, title)
        assert {s.config.bound for s in setups.values() if s.config.rounds} <= {0}, (part.title, part.name)


@pytest.mark.parametrize(
    ("paper", "stated"),
    [
        ("fedclip", {"unseen_split": "all", "optimiser": "adam", "keep": False, "weights": "size"}),  # Eq. 2, 3.2
        ("fedot", {"keep": False, "weights": "uniform", "epochs": 1, "batch": 32}),  # Table S3, D.2
        ("fft-gp", {"keep": True, "unseen_split": "all", "personal_split": "val"}),  # 4.1.1
        ("focoop", {"keep": False, "epochs": 2}),
        ("feddtl", {"keep": False, "epochs": 2, "batch": 64}),
    ],
)
def test_rows_follow_what_their_paper_states(paper, stated):
    elsewhere = {"fedgh": {"keep"}, "with fine-tuning": {"keep"}}
    for part in parts(paper):
        subject = set.intersection(*(set(r.settings) for r in part.rows), set(stated)) | set(part.keys)
        for row in part.able:
            found = protocol.meaning(resolve(row.method, keys_of(part, row, Found("x", {}, ""), {})))
            free = subject | elsewhere.get(row.method, set()) | elsewhere.get(row.title, set())
            wrong = {k: found[k] for k in stated if k in found and k not in free and found[k] != stated[k]}
            assert not wrong, (part.title, part.name, row.title)


def test_rows_that_differ_are_told_with_their_reason():
    (part,) = find("fedot", "1", "pacs")
    setups = {row.title: resolve(row.method, keys_of(part, row, Found("x", {}, ""), {})) for row in part.able}
    from papers import run

    planned = [run.Planned(row, setups[row.title]) for row in part.able]
    told = run.notes(part, planned, Found("x", {}, ""))
    assert any(
        re.fullmatch(r"FedCLIP differs: optimiser=adam weight_decay=0 lr=0.0005 \(Adam as .*\)", t) for t in told
    )
    assert any("94.23, 94.93 and 94.89" in t for t in told)  # the paper has three values for one run
    rows = {"a": {"lr": 1, "keep": True}, "b": {"lr": 1, "keep": True}, "c": {"lr": 2, "keep": False}}
    assert protocol.unlike(rows, {"lr"}) == {"c": {"keep": "False"}}


def test_rows_name_methods_and_presets_that_exist():
    for path in published.PAPERS.glob("*.yaml"):
        for table in yaml.safe_load(path.read_text(encoding="utf-8").replace("on:", "preset:"))["tables"]:
            for row in table["rows"]:
                known = row.get("method") in recipe.recipe_names()
                assert "over" in table or known or row["missing"]  # over: a mean of other tables
                assert row.get("preset", "") in ("", *recipe.presets())


def test_the_numbers_of_the_papers_are_there():
    (pacs,) = [p for p in find("fedot", "1") if p.data == "pacs"]
    row = next(r for r in pacs.rows if r.method == "fedot")
    assert row.numbers["C"] == (96.64, 0.25) and pacs.keys["rounds"] == 200 and pacs.keys["seeds"] == [50, 77, 98]
    blocks = {p.data: r.settings["blocks"] for p in find("fedot", "1") for r in p.rows if r.method == "fedot-b"}
    assert blocks == {"femnist": 256, "pacs": 1, "office-home": 1, "vlcs": 1, "terra-incognita": 4}
    assert {p.name for p in find("fft-gp", "3")} == {p.name for p in find("fft-gp", "Table 2")} != set()
    faa = [r.numbers["G"].mean for r in find("fft-gp", "15")[0].rows]
    assert faa == [48.68, 49.28, 49.76, 49.94, 51.02, 50.64]
    # means that the papers print are those of their parts: a wrong digit shows
    printed_otherwise = {("pacs", "fedot"), ("pacs", "fedot-b"), ("vlcs", "zero-shot")}  # by 0.42, 0.42 and 0.35
    for part in parts("fedot"):
        cells = [m for m in part.measures if re.fullmatch(r"G@\w+", m)]
        for row in part.rows if len(cells) == 4 else []:
            mean = np.mean([row.numbers[m].mean for m in cells])
            assert (abs(mean - row.numbers["G"].mean) > 0.04) == ((part.data, row.method) in printed_otherwise)


def test_a_table_is_found_by_its_number():
    assert numbers_of("Tables 2 and 3") == {"2", "3"} and numbers_of("Table S5") == {"s5"} == numbers_of("s5")
    assert numbers_of("Figure 3a") == {"fig3a"} == numbers_of("fig-3a") and numbers_of("fig 5") == {"fig5"}
    with pytest.raises(FedvlmError, match="no table '99'"):
        find("fedot", "99")
    with pytest.raises(FedvlmError, match="no paper 'fedto'; did you mean fedot"):
        find("fedto", "1")
    with pytest.raises(FedvlmError, match=r"part=pcas.*did you mean pacs"):
        find("fedot", "1", "pcas")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rouns": 3}, "rouns: no such key; did you mean rounds"),
        ({"data": "pasc"}, "data: pasc; did you mean pacs"),
        ({"measures": ["Q"]}, "measures: Q"),
        ({"figure": "tsen"}, "figure: tsen; did you mean tsne"),
        ({"measures": ["seconds@photo"]}, "measures: seconds@photo"),
        ({"rows": [{"method": "fedto"}]}, "no such recipe; did you mean fedot"),
        ({"rows": [{"method": "promptfl", "on": "resnet"}]}, "depends on its adapter"),
        ({"rows": [{"method": "fedot", "P": 100.2}]}, "P: 100.2 is not between 0 and 100"),
        ({"rows": [{"method": "fedot", "P": [97.0, -1]}]}, "not between"),
        ({"rows": [{"method": "fedot", "P": "97"}]}, r"P: 97; a number, or \[mean, std\]"),
        ({"rows": [{"method": "fedot", "C": 97}]}, "C: no such key"),
    ],
)
def test_a_wrong_manifest_is_an_error_that_names_the_place(change, says):
    good = {
        "table": "Table 1",
        "caption": "x",
        "data": "pacs",
        "measures": ["P"],
        "rows": [{"method": "fedot", "P": 97}],
    }
    manifest._part(Path("x.yaml"), "x", {"paper": "X", "title": "", "tables": []}, good)
    with pytest.raises(FedvlmError, match=says):
        manifest._part(Path("x.yaml"), "x", {"paper": "X", "title": "", "tables": []}, good | change)


@pytest.mark.parametrize(
    ("paper", "table", "rows"),
    [
        ("fedot", "1 part=pacs", "fedot"),
        ("fedclip", "1 part=pacs", "fedclip"),
        ("fft-gp", "10", "fft-gp"),
        ("feddtl", "13 part=caltech101-16-shot-non-iid", "zero-shot"),
        ("focoop", "1 part=cifar100-non-overlap", "promptfl"),
    ],
)
def test_one_table_of_each_paper_is_rehearsed(paper, table, rows, capsys, tmp_path):
    words = [paper, *table.split(), f"methods={rows}", "seeds=1", "jobs=1", f"--csv={tmp_path / 'x.csv'}"]
    assert reproduce.main([*words, "--rehearse"]) == 0
    out = capsys.readouterr().out
    assert "not as published: rounds=1" in out and "same protocol for all rows: " in out
    header, *lines = (tmp_path / "x.csv").read_text().splitlines()
    values = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    assert any(v["ours"] and v["paper"] for v in values)
    if paper == "focoop":  # asked of the finished run
        assert next(v["ours"] for v in values if v["measure"] == "cacc@brightness")
    for v in values:
        if v["ours"] and v["paper"]:
            assert float(v["difference"]) == pytest.approx(float(v["ours"]) - float(v["paper"]))


def test_a_figure_is_drawn(capsys, tmp_path):
    words = ["focoop", "fig-6", "--rehearse", "seeds=1", "jobs=1", f"figure={tmp_path / 'x.png'}"]
    assert reproduce.main(words) == 0
    assert "x.png: similarity of images and prompts" in capsys.readouterr().out
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_curves_by_round_are_drawn(capsys, tmp_path):
    words = [
        "feddtl",
        "fig-12",
        "part=caltech101-16-shot-non-iid",
        "methods=feddtl-decoupled",
        "--rehearse",
    ]
    assert reproduce.main([*words, "seeds=1", "jobs=1", f"figure={tmp_path / 'x.png'}"]) == 0
    assert "x.png: local strategies" in capsys.readouterr().out
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_curves_are_means_over_runs_and_data_sets(images, tmp_path):
    runs = [train_small(images, tmp_path / str(seed), rounds=2, seed=seed) for seed in (1, 2, 3)]
    values = [[r["P"] for r in run.rounds()] for run in runs]
    picture = curves.draw({"one": [runs[:2]], "two sets": [runs[:2], runs[2:]], "none": [[]]}, {"P": 100.0})
    one, two = picture.axes[0].lines  # a row without runs has none
    first = np.mean(values[:2], axis=0)
    assert list(one.get_xdata()) == [0, 1, 2] and one.get_ydata() == pytest.approx(100 * first)
    assert two.get_ydata() == pytest.approx(50 * (first + values[2]))
    assert picture.axes[0].get_title(loc="left") == "P, %"


def test_figures_that_are_means_over_data_sets_have_their_parts():
    assert [len(members(p)) for p in find("feddtl", "fig-2")] == [7] * 4
    assert [len(members(p)) for p in find("feddtl", "fig-3")] == [7] * 2
    assert [len(members(p)) for p in find("feddtl", "fig-4")] == [5] * 4
    for figure in ("fig-2", "fig-3", "fig-4"):
        for part in find("feddtl", figure):
            assert all({r.title for r in part.rows} <= {r.title for r in member.rows} for member in members(part))


@pytest.mark.parametrize("paper", PAPERS)
def test_every_row_of_every_table_can_be_run(paper):
    """By a method of fedvlm or, of a mean over data sets, by the parts that it is the mean of."""
    assert reproduce.reasons(parts(paper)) == {}
    for part in parts(paper):
        assert runnable(part) == len(part.rows), (part.title, part.name)
        assert not part.over or len(members(part)) > 1


def test_a_mean_over_data_sets(tmp_path, capsys):
    for name in ("pacs", "vlcs"):
        made_up(data_sets()[name], tmp_path / name).joinpath(name).rename(tmp_path / f"{name}-images")
    (tmp_path / "data").mkdir()
    for name in ("pacs", "vlcs"):
        (tmp_path / f"{name}-images").rename(tmp_path / "data" / name)
    words = ["fedot", "1", "part=average", f"data={tmp_path / 'data'}", "methods=zero-shot", "seeds=1"]
    assert reproduce.main([*words, "jobs=1", f"out={tmp_path / 'runs'}"]) == 0
    out = capsys.readouterr().out
    first, second, mean = (float(v) for v in re.findall(r"CLIP \(ZS\) +G +([\d.]+)", out))
    assert mean == pytest.approx((first + second) / 2, abs=0.01)
    assert "2 of 5 data sets are there" in out and re.search(r"FEDOT \(Ours\) +G +– +– +76.04", out)


def test_figures_whose_numbers_stand_in_tables_are_found():
    assert {p.table for p in find("focoop", "fig-9")} == {"Table 11", "Table 12"}
    assert {p.table for p in find("focoop", "fig-3")} == {"Table 13", "Table 14"}
    assert {p.table for p in find("feddtl", "fig-5")} == {"Table 26"}
    assert {p.table for p in find("fft-gp", "fig-5")} == {"Figure 5"} and find("fft-gp", "fig-5")[0].figure == "surface"


def test_sets_of_outsiders_are_looked_for_beside_the_data(tmp_path):
    (part,) = find("focoop", "11", "cifar100-non-overlap")
    folder = made_up(data_sets()["cifar100"], tmp_path / "data")
    for name in ("DTD", "iSUN"):
        made_up(replace(data_sets()["cifar10"], name=name), tmp_path / name).joinpath(name).rename(folder / name)
    found = locate(part, str(folder))
    assert found.outsider_sets == {"dtd": str(folder / "DTD"), "isun": str(folder / "iSUN")}
    assert found.names["isun"] == "iSUN" and found.outsiders == str(folder / "DTD")
    from papers import run

    assert "no folder places in or beside the data: its columns are empty" in run.notes(part, [], found)


@pytest.fixture(scope="module")
def pacs(tmp_path_factory) -> Path:
    return made_up(data_sets()["pacs"], tmp_path_factory.mktemp("made") / "data") / "pacs"


def test_costs_runs_and_what_is_there(pacs, tmp_path, capsys):
    words = ["fedot", "1", f"data={pacs}", "methods=fedot,fedlt", "rounds=2", "seeds=1"]
    words += ["values=tuned", "duplicates=keep", "jobs=1", f"out={tmp_path}"]  # made-up domains share their images
    assert reproduce.main([*words, "--dry"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"FEDOT \(Ours\) +4 of 4 +2 ", out) and "8 runs" in out and not list(tmp_path.iterdir())
    assert "with mini-clip, not the paper's CLIP ViT-B/32: the paper's column is no target" in out
    assert reproduce.main(words) == 0
    first = capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 8
    assert reproduce.main(words) == 0
    again = capsys.readouterr().out
    assert "8 of 8 runs are already finished" in again and "runs to do" not in again
    assert first.split("row  ")[-1] == again.split("row  ")[-1]
    table = api.runs(tmp_path).table("selected")  # the same numbers as `bench select=selected` prints
    fedot = next(v for v in table.values if v["method"] == "fedot")
    difference = re.escape(f"{fedot['G'] - 94.53:+.2f}")
    assert re.search(rf"FEDOT \(Ours\) +G +{fedot['G']:.2f} +– +94.53 ± 0.35 +{difference}\n", again)
    by_target = ["fedot", "S5", *words[2:]]
    assert reproduce.main(by_target) == 0  # another table of the same runs
    assert "8 of 8 runs are already finished" in (out := capsys.readouterr().out)
    sketch = next(
        r.record for r in api.runs(tmp_path) if r.record.method.name == "fedot" and r.record.unseen == ["sketch"]
    )
    ours = f"{100 * sketch.finished.at('selected')['G']:.2f}"
    assert re.search(rf"G@sketch +{ours} +– +85.73 ± 1.47", out)


def test_a_row_that_cannot_be_run_says_why(pacs, tmp_path, capsys):
    row = manifest.Row(
        "Ours (other)", "", "", {}, "", "not in fedvlm: it is a test", "", {"G": manifest.Published(50.0)}
    )
    (part,) = find("fedot", "1", "pacs")
    keys = {"rounds": 1, "seeds": "1", "unseen": "photo", "out": str(tmp_path), "jobs": 1}
    from papers import run

    part, found, pools = replace(part, rows=(row,)), locate(part, str(pacs)), api.new_pools()
    planned = run.plan(part, found, keys, pools)
    assert run.execute(planned, 1) == "" and run.costs(planned) == []
    table = run.compared(part, planned, found)
    assert table.rows[0]["paper"] == "50.00" and table.rows[0]["ours"] == "–"
    assert "Ours (other): not in fedvlm: it is a test" in table.notes


def test_what_the_user_has_is_checked(pacs, tmp_path, capsys):
    (part,) = find("fedot", "1", "pacs")
    found = locate(part, str(pacs))
    assert found.names["art_painting"] == "art_painting" and "other classes" in found.differs
    assert locate(part, str(pacs.parent)).path == str(pacs)
    assert reproduce.main(["fedot", "1", "part=vlcs", f"data={pacs}"]) == 1
    assert "is not VLCS: no domain Caltech101 in art_painting, cartoon, photo, sketch" in capsys.readouterr().err
    home = made_up(data_sets()["office-home"], tmp_path / "data") / "office-home"
    (home / "Real").rename(home / "Real World")
    (home / "Art").rename(home / "art")
    (other,) = find("fedot", "1", "office-home")
    assert locate(other, str(home)).names == {
        "Art": "art",
        "Clipart": "Clipart",
        "Product": "Product",
        "Real": "Real World",
    }
    assert "4 classes instead of 65" in locate(other, str(home)).differs
    with pytest.raises(FedvlmError, match="it is domain/class/image, and text is needed"):
        locate(find("fft-gp", "10")[0], str(pacs))
    assert {d.layout for d in data_sets().values()} <= set(LAYOUTS)


def test_a_set_without_domains_is_known_by_its_name_and_classes(tmp_path):
    folder = made_up(data_sets()["caltech101"], tmp_path / "data")
    (part,) = find("feddtl", "13", "caltech101-16-shot-iid")
    assert locate(part, str(folder)).path.endswith("caltech101")
    food = replace(part, data="food101")
    with pytest.raises(FedvlmError, match="is not Food101"):
        locate(food, str(folder / "caltech101"))


def test_the_papers_backbone_is_known_by_its_sizes(tmp_path):
    (part,) = find("fedot", "1", "pacs")
    assert other_backbone(part, resolve("fedot", {})) == "mini-clip"
    assert vision("openai/clip-vit-base-patch32") == BACKBONES["CLIP ViT-B/32"]
    config = {"projection_dim": 512, "vision_config": {"patch_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vision(str(tmp_path)) == BACKBONES["CLIP ViT-B/16"]
    assert other_backbone(part, resolve("fedot", {"backbone": str(tmp_path)})) == str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": {}}))
    assert other_backbone(part, resolve("fedot", {"backbone": str(tmp_path)})) == ""
    stages = {"embed_dim": 1024, "vision_cfg": {"image_size": 224, "layers": [3, 4, 6, 3], "width": 64}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": stages}))
    assert vision(str(tmp_path)) == BACKBONES["CLIP ResNet50"]
    vit = {"embed_dim": 512, "vision_cfg": {"image_size": 224, "layers": 12, "width": 768, "patch_size": 32}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": vit}))
    assert vision(str(tmp_path)) == BACKBONES["CLIP ViT-B/32"]
    resnet = find("fft-gp", "2", "pacs")[0]
    keys = {"on": "resnet", "depth": 50}
    assert "random weights" in other_backbone(resnet, resolve("fedavg", keys))
    assert other_backbone(resnet, resolve("fedavg", keys | {"start": "imagenet.safetensors"})) == ""


def test_the_interval_is_students():
    values = [1.0, 2.0, 4.0]
    assert half_width(values) == pytest.approx(4.303 * np.std(values, ddof=1) / np.sqrt(3), rel=1e-4)
    assert half_width([3.0]) is None
    draws = np.random.default_rng(0).normal(5, 2, (4000, 3))
    covered = [abs(np.mean(d) - 5) <= half_width(list(d)) for d in draws]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.01)


def test_measures_by_target(tmp_path):
    """The test accuracy of client j with seed s in round 3 is 45 + 10 j + s percent (test_report.write)."""
    runs = [fake_run(tmp_path, "fedavg", target, seed) for target in DOMAINS[:2] for seed in (1, 2)]
    names = {"First": DOMAINS[0], "Second": DOMAINS[1]}

    def values(measure: str) -> list[float]:
        return seed_values(measure, runs, names, "last")

    assert len(DOMAINS) == 3
    assert values("G@First") == pytest.approx([46, 47]) and values("G@Second") == pytest.approx([56, 57])
    assert values("P@First") == pytest.approx([61, 62]) and values("P@Second") == pytest.approx([56, 57])
    assert values(f"P@Second/{DOMAINS[2]}") == pytest.approx([66, 67]) and values("C@First") == pytest.approx([56, 57])
    assert values("G") == pytest.approx([51, 52]) and values("mb") == pytest.approx([0.0015] * 2)
    assert values("variance") == pytest.approx([(25 + 100) / 2 * 1.0] * 2)  # of (55, 65) and of (45, 65)
    assert values(f"G@{DOMAINS[2]}") == [] and values("cacc@fog") == []


def test_rows_of_one_table_have_one_rule(tmp_path):
    one, other = (fake_run(tmp_path, method, "art", 1) for method in ("fedavg", "fedclip"))
    for run in (one, other):
        complete = run.record.config | {"score": "own", "shots": 0}
        run.write("run.json", replace(run.record, config=complete).to_json().encode())
    assert "same protocol for all rows: 3 rounds" in " ".join(summarise([one, other], fair=True).notes)
    alone, whole = (
        replace(run.record, config=run.record.config | {"protocol": protocol})
        for run, protocol in ((one, "one"), (other, "leave-one-domain-out"))
    )
    assert rule(alone) | {"data": ""} == rule(whole) | {"data": ""}
    changes: dict[str, object] = {"rounds": 20, "split": [80, 10, 10], "score": "domain", "shots": 16, "seed": 2}
    for key, value in changes.items():
        record = other.record
        odd = RunFolder(Path(shutil.copytree(other.folder, tmp_path / f"odd-{key}")))
        odd.write("run.json", replace(record, config=record.config | {key: value}).to_json().encode())
        with pytest.raises(FedvlmError, match=rf"same protocol, and these differ in .*{key}.*\(fedavg\).*\(fedclip\)"):
            summarise([one, odd], fair=True)
        assert any(n.startswith("rows that follow different protocols") for n in summarise([one, odd]).notes)
        folders = [str(one.folder), str(odd.folder)]
        assert [main(["compare", *folders, *flag]) for flag in ([], ["--fair"])] == [0, 1]
    backbone = RunFolder(tmp_path / "odd-backbone")
    backbone.folder.mkdir()
    changed = replace(other.record, backbone=replace(other.record.backbone, fingerprint="2"))
    backbone.write("run.json", changed.to_json().encode())
    with pytest.raises(FedvlmError, match="backbone tiny@"):
        summarise([one, backbone], fair=True)
    assert differences({"a": [{"rounds": 3}], "zero-shot": [{}]}) == []  # trains nothing
    assert differences({"a": [{"epochs": 1}], "b": [{"epochs": 2}]}, free=("epochs",)) == []


def test_training_that_differs_is_the_methods_own_or_refused(tmp_path):
    """FedOT's uniform weights belong to it; a rank or a number of epochs that was given for one row only does not."""

    def run(method: str, weights: str, epochs: int, given: bool = False) -> RunFolder:
        made = fake_run(tmp_path / f"{method}-{weights}-{epochs}", method, "art", 1)
        record = replace(
            made.record,
            local=replace(made.record.local, settings={"epochs": epochs}),
            merge=replace(made.record.merge, settings={"weights": weights}),
            given=made.record.given | ({"epochs": epochs} if given else {}),
        )
        made.write("run.json", record.to_json().encode())
        return made

    plain, own = run("fedavg", "size", 1), run("fedot", "uniform", 1)
    told = " ".join(summarise([plain, own], fair=True).notes)
    assert "settings that belong to the methods and differ: weights size (fedavg) and uniform (fedot)" in told
    assert "epochs" not in told
    more = run("fedot", "uniform", 2, given=True)
    with pytest.raises(FedvlmError, match=r"differ in epochs 1 \(fedavg\) and 2 \(fedot\)"):
        summarise([plain, more], fair=True)
    assert "belong to the methods and differ: weights" in " ".join(summarise([plain, more]).notes)
    summarise([run("fedavg", "size", 2, given=True), more], fair=True)


def test_bench_refuses_methods_with_different_budgets(capsys):
    """On another backbone than mini-clip FedOT's own 200 rounds stand against FedAvg's 50."""
    with pytest.raises(FedvlmError, match=r"rounds 200 \(fedot\) and 50 \(fedavg\); run them alike"):
        comparison.setups_of(["fedot", "fedavg", "zero-shot"], {"values": "paper", "unseen": "noto"}, api.new_pools())
    setups = comparison.setups_of(
        ["fedot", "fedavg"], {"values": "paper", "unseen": "noto", "rounds": 3}, api.new_pools()
    )
    assert [s.config.rounds for s in setups] == [0, 3, 3]  # zero-shot comes first


def test_lists(capsys):
    assert reproduce.main([]) == 0
    out = capsys.readouterr().out
    assert all(paper in out for paper in PAPERS)
    assert reproduce.main(["fedot"]) == 0
    assert "Table S23" in capsys.readouterr().out
    assert reproduce.main(["fedot", "1"]) == 1
    assert "give data=FOLDER with femnist or pacs" in capsys.readouterr().err


def test_the_shipped_numbers_are_those_of_the_tables():
    """Refresh them with `python benchmarks/reproduce.py --publish`."""
    assert list(recipe._published()) == published.entries()
