"""benchmarks/claims.py: what was measured stays from one session to the next, for the claim that it was measured for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers import small_setup, train_small

from fedvlm.config.config import resolve

ROOT = Path(__file__).parents[2]


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import claims  # benchmarks/claims.py

    yield claims


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import claim_record  # benchmarks/claim_record.py

    yield claim_record


def entry(record, **changes):
    figures = {"left": 2.0, "right": 1.0, "difference": 1.0, "half": 0.5}
    made = record.Entry(
        "d", "2026-01-01", "abc", (1, 2), 0, "mini-clip", "60 / 20 / 20", (figures,), (("x", 1.0),), True
    )
    return replace(made, **changes)


def test_the_document_is_what_the_record_says(claims, record):
    assert claims.DOCUMENT.read_text(encoding="utf-8") == claims.document(record.load(claims.RECORD))


def test_a_claim_has_a_row_where_it_was_measured_and_is_listed_with_the_reason_elsewhere(claims, record):
    sides = {"left": {"method": "fedot"}, "right": {"method": "fedclip", "settings": {"keep": True}}}
    content = {"data": "emoji", "claim": "Better.", "source": "", "compare": {**sides, "measure": "C", "relation": ">"}}
    tried = claims.Claim("fedot", {"id": "tried", **content}, [claims.Outcome(2, 1, 1, 0.1)], acted=True)
    page = claims.claim_document.document([tried, claims.Claim("fedot", {"id": "other", **content})], ["b"], ["s"])
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == 1 and "`tried` Better." in rows[0] and "**holds**" in rows[0]
    assert "C: `fedot` 2.00; against `fedclip keep=true` 1.00: +1 ± 0.1 |" in rows[0]
    assert "Not tested (not run): other." in page


def test_a_claim_is_said_in_twenty_words(claims):
    long = [c.name for c in claims.claims(claims.PAPERS, []) if len(str(c.content["claim"]).split()) > 20]
    assert long == []


def test_a_left_side_that_several_comparisons_share_stands_once(claims):
    rivals = [{"left": {"method": "fedot"}, "right": {"method": m}, "measure": "C", "relation": ">"} for m in "ab"]
    content = {"id": "x", "data": "emoji", "claim": "", "source": "", "compare": rivals}
    claim = claims.Claim("fedot", content, [claims.Outcome(2, 1, 1, 0.1), claims.Outcome(2, 3, -1, 0.2)], acted=True)
    told = claims.claim_document.compared(claim)
    assert told == "C: `fedot` 2.00; against `a` 1.00: +1 ± 0.1; `b` 3.00: -1 ± 0.2"
    paper = [{"left": 5, "right": 4}, {"left": 5, "right": 3}, {"left": 6, "right": 3}]
    assert claims.claim_document.numbers_of_paper(paper) == "5 and 4; 3; 6 and 3"


def test_what_the_seeds_find_is_told_where_nothing_is_decided(claims):
    content = {"id": "x", "data": "emoji", "claim": "", "source": "", "mechanism": []}
    content["compare"] = {"left": {"method": "fedot"}, "right": {"method": "a"}, "measure": "C", "relation": ">"}
    for difference, told in ((0.5, "1.00; found: 1.3"), (5, "1.00")):
        claim = claims.Claim("fedot", content, [claims.Outcome(2, 1, difference, 1.0)], acted=True, seeds=5)
        assert claims.claim_document.of_interest(claim) == told


def test_every_entry_is_of_a_claim_as_it_is_defined_now(claims, record):
    now = {c.name: record.digest(c.content) for c in claims.claims(claims.PAPERS, [])}
    assert {name: e.definition for name, e in record.load(claims.RECORD).items()}.items() <= now.items()


def test_a_record_is_read_as_it_was_written(record, tmp_path):
    kept = {"fedot/bytes": entry(record), "fedot/b": entry(record, seen=(("x", None),), reason="why")}
    record.save(tmp_path / "r.json", kept)
    assert record.load(tmp_path / "r.json") == kept
    assert record.load(tmp_path / "none.json") == {}


def test_figures_of_other_claims_stay(record):
    kept = {"a": entry(record), "b": entry(record)}
    now = {"b": entry(record, date="2026-02-02"), "c": entry(record)}
    assert record.merged(kept, now) == {"a": kept["a"], "b": now["b"], "c": now["c"]}


@pytest.mark.parametrize(
    ("changes", "replaces"),
    [
        ({"seeds": (1, 2, 3)}, True),
        ({"seeds": (1,)}, False),
        ({"outcomes": ()}, False),
        ({"rounds": 5}, False),
        ({"rounds": 5, "definition": "another"}, True),
    ],
)
def test_a_smaller_measurement_replaces_none(record, changes, replaces):
    kept, now = {"a": entry(record)}, {"a": entry(record, date="2026-02-02", **changes)}
    assert (record.merged(kept, now) == now) == replaces


def test_figures_of_another_definition_are_not_taken(claims, record):
    claim = claims.claims(["fedot"], ["bytes"])[0]
    changed = claims.Claim("fedot", {**claim.content, "keys": {**claim.content["keys"], "rounds": 2}})
    reworded = claims.Claim("fedot", {**claim.content, "claim": "In other words.", "paper": {}})
    kept = entry(
        record,
        definition=record.digest(claim.content),
        outcomes=({"left": 1, "right": 2, "difference": -1, "half": 0},),
    )
    for one in (claim, changed, reworded):
        one.recall(kept)
    assert (claim.verdict, reworded.verdict, changed.verdict) == (claims.HOLDS, claims.HOLDS, claims.UNTESTED)
    assert "definition was changed" in changed.why and "2026-01-01" in claim.measured


def test_both_sides_of_a_comparison_mean_the_same(claims):
    """They differ in what a side's settings name, in what the paper says that the method has, and in lr (one grid)."""
    from papers import protocol, published

    for claim in claims.claims(claims.PAPERS, []):
        own = published.paper(claim.paper).get("own", {}) if claim.paper in published.paper_names() else {}
        for one in claim.compared:
            meant, named = {}, {"lr"}
            for name, side in zip(("left", "right"), claim.sides(one), strict=False):
                keys = dict(side.keys) | {"data": "emoji", "outsiders": "", "bound": 0}
                meant[name] = protocol.meaning(resolve(side.method, keys))
                named |= set(one[name].get("settings", {})) | set(own.get(side.method, {}).get("settings", {}))
            assert protocol.differing(meant).keys() <= named, (claim.name, one)


@pytest.mark.parametrize(
    ("relation", "mean", "half", "margin", "verdict"),
    [
        (">", 2.0, 1.0, 1.0, "holds"),
        (">", 0.5, 0.4, 1.0, "does not hold"),  # above 0, and surely less than of interest
        (">", 0.5, 0.6, 1.0, "not decided"),
        ("<", -2.0, 1.0, 1.0, "holds"),
        ("<", 1.0, 0.5, 1.0, "does not hold"),
        (">=", 0.2, 1.8, 1.0, "not decided"),  # it could be 1.6 below
        (">=", -0.2, 0.5, 1.0, "holds"),
        (">=", -2.0, 0.5, 1.0, "does not hold"),
        ("~", 0.2, 0.5, 1.0, "holds"),
        ("~", 0.2, 1.5, 1.0, "not decided"),
        ("~", 3.0, 1.5, 1.0, "does not hold"),
    ],
)
def test_three_verdicts_by_interval_and_smallest_effect_of_interest(claims, relation, mean, half, margin, verdict):
    assert claims.verdict_of(relation, mean, half, margin) == verdict


def test_the_smallest_effect_of_interest_is_the_papers_where_that_is_smaller(claims):
    one = {"measure": "G", "relation": ">"}
    assert claims.interest(one, {"left": 97.5, "right": 97.38}) == pytest.approx(0.12)
    assert claims.interest(one, {"left": 90, "right": 80}) == claims.interest(one, {}) == 1.0
    assert claims.interest(one | {"margin": 3}, {"left": 97.5, "right": 97.38}) == 3.0


def test_a_claim_is_not_tested_where_its_mechanism_did_not_act(claims):
    content = {"id": "x", "data": "emoji", "claim": "", "source": ""}
    content["mechanism"] = [{"method": "fedot", "diagnostic": "condition", "relation": "<", "value": 1}]
    content["compare"] = {"left": {"method": "fedot"}, "right": {"method": "fedclip"}, "measure": "C", "relation": ">"}
    for difference, verdict in ((-1, claims.FAILS), (1, claims.HOLDS)):
        claim = claims.Claim(
            "fedot", content, [claims.Outcome(1, 2, difference, 0.1)], [("condition", 1.5)], acted=True
        )
        assert claim.verdict == verdict
        claim.acted = False
        missed = "the mechanism did not act: condition 1.5, not < 1"
        assert (claim.verdict, claim.why) == (claims.UNTESTED, missed)


def test_a_claim_whose_loser_did_not_learn_is_not_tested(claims, record):
    content = {"id": "x", "data": "emoji", "claim": "", "source": "", "mechanism": []}
    content["compare"] = {"left": {"method": "fedot"}, "right": {"method": "fedclip"}, "measure": "C", "relation": ">"}
    claim = claims.Claim("fedot", content, [claims.Outcome(2, 1, 1, 0.1)], acted=True)
    assert claim.verdict == claims.HOLDS
    outcomes = tuple(o._asdict() for o in claim.outcomes)
    claim.recall(entry(record, definition=record.digest(content), outcomes=outcomes, lacking="fedclip"))
    assert (claim.verdict, claim.why) == (claims.UNTESTED, "fedclip did not learn")
    assert record.digest({**content, "needs": [{"method": "fedclip"}]}) != record.digest(content)


@pytest.mark.parametrize(
    ("tried", "next_ones"),
    [
        ({0.3: 0.5, 1.0: 0.6, 3.0: 0.5}, set()),
        ({0.3: 0.5, 1.0: 0.6, 3.0: 0.7}, {10.0}),
        ({0.3: 0.8, 1.0: 0.6, 3.0: 0.7}, {0.1}),
        ({0.3: 0.5, 1.0: 0.6, 3.0: 0.7, 10.0: 0.8}, {30.0}),
        ({0.3: 0.5, 1.0: 0.6, 3.0: 0.7, 10.0: 0.8, 30.0: 0.9}, set()),  # no more
        ({0.01: 0.9, 0.03: 0.8, 0.1: 0.7, 0.3: 0.6, 1.0: 0.5}, {0.003}),
    ],
)
def test_a_best_lr_at_the_end_of_the_grid_is_tried_further(claims, tried, next_ones):
    import claim_runs  # benchmarks/claim_runs.py

    assert claim_runs.beyond(tried) == next_ones


@pytest.mark.parametrize("measure", ["local", "base", "novel", "hm"])
def test_scores_of_base_to_novel_are_of_personal_models_and_so_is_what_chooses_the_lr(claims, measure):
    """evaluation/novel.py writes the personal models' into the record."""
    import claim_runs  # benchmarks/claim_runs.py

    assert claim_runs.criterion(measure) == "P"


def test_what_must_have_learned_is_read_from_the_side_that_is_meant(claims, monkeypatch):
    content = {"id": "x", "data": "emoji", "claim": "", "source": "", "keys": {}, "mechanism": []}
    sides = [{"method": "fedavg", "on": "tower"}, {"method": "fedavg", "on": "alexnet"}]
    content["compare"] = {"left": sides[0], "right": sides[1], "measure": "C", "relation": ">"}
    content["needs"] = [{**sides[1], "field": "learned", "relation": ">", "value": 0.02}]
    claim = claims.Claim("fedclip", content)
    study = argparse.Namespace(runs={s: [dict(s.keys)["on"]] for s in claim.sides(content["compare"])})
    monkeypatch.setattr(claims, "recorded", lambda runs, _: {"tower": 0.5, "alexnet": 0.0}[runs[0]])
    assert claims.untrained(claim, study) == "fedavg on=alexnet"
    content["needs"][0]["on"] = "tower"
    assert claims.untrained(claim, study) == ""


def test_what_training_taught_is_read_from_the_records_of_a_run(claims, images, tmp_path):
    """On validation images: training images are not scored."""
    run = train_small(images, tmp_path / "run", rounds=3)
    first, *_, last = [r["shared"]["val"] for r in run.rounds()]
    assert last != first
    assert claims.recorded([run], "untrained") == first
    assert claims.recorded([run], "learned") == pytest.approx(last - first)
    assert claims.recorded([run], "fitted") is None


def test_runs_of_another_machine_are_found_by_what_was_decided_in_them(claims, images, tmp_path):
    """Also where some of the domains are left out in turn, not all."""
    import study  # benchmarks/study.py

    asked = {"protocol": "leave-one-domain-out", "unseen": ("openmoji", "noto")}
    for unseen in asked["unseen"]:
        assert study.Shelf(tmp_path).of({"it": small_setup(images, **asked)}) == {}
        train_small(images, tmp_path / unseen, **(asked | {"unseen": unseen}))
    (found,) = study.Shelf(tmp_path).of({"it": small_setup(tmp_path / images.name, **asked)}).values()
    assert {run.folder.name for run in found} == {"noto", "openmoji"}


def test_a_mechanism_is_read_from_the_side_with_these_settings(claims, monkeypatch):
    content = {"id": "x", "data": "emoji", "claim": "", "source": "", "keys": {}}
    content["compare"] = {"left": {"method": "fedclip", "settings": {"keep": True}}, "right": {"method": "fedclip"}}
    content["compare"] |= {"measure": "P", "relation": ">"}
    content["mechanism"] = [{"method": "fedclip", "settings": {"keep": True}, "field": "fitted"}]
    content["mechanism"][0] |= {"relation": ">", "value": 0.5}
    claim = claims.Claim("fedclip", content)
    study = argparse.Namespace(runs={s: [dict(s.keys).get("keep", False)] for s in claim.sides(content["compare"])})
    monkeypatch.setattr(claims, "recorded", lambda runs, _: float(np.median(runs)))
    assert claims.mechanism(claim, study) and claim.seen == [("fitted", 1.0)]


def test_the_twenty_classes_are_those_of_the_other_benchmarks(claims):
    import outsiders  # benchmarks/outsiders.py

    found = [c for c in claims.claims(["focoop"], []) if "classes" in c.content["keys"]]
    assert found and all(tuple(c.content["keys"]["classes"]) == outsiders.SMALL_CLASSES for c in found)


def test_what_is_run_is_recorded_with_what_it_was_cut_to(claims, tmp_path):
    """A claim on three emoji styles: seconds."""
    args = argparse.Namespace(data=[], seeds=[50, 77], rounds=1, jobs=1, out=tmp_path, read=False)
    study, claim = claims.Study(args), claims.claims(["fedot"], ["bytes"])[0]
    content = {**claim.content, "keys": {"unseen": ["noto"], "rounds": 2, "lr": 0.01, "domains": 3}}
    claim = claims.Claim("fedot", content)
    study.play([side for one in claim.compared for side in claim.sides(one)])
    claims.check(claim, study)
    found = claims.measured(claim, study)
    assert (found.rounds, found.seeds, found.backbone, claim.verdict) == (1, (50, 77), "mini-clip", claims.HOLDS)
    again = claims.Claim("fedot", content)
    again.recall(found)
    assert again.outcomes == claim.outcomes and "at most 1 rounds" in again.measured
