"""The sentence that answers a comparison: one test for each outcome, with numbers for which the rule is known."""

from __future__ import annotations

import pytest

from fedvlm.report.headline import answers, headline
from fedvlm.system.table import SeedScores, Table


def table(rows: dict[str, dict[str, float]], seeds: int = 3, **more: object) -> Table:
    """A table of these means by row and measure; seeds shift all rows alike but for 0.01, so that a difference of 1 is
    clear and one of 0 is level."""
    by_seed: dict[str, SeedScores] = {
        name: {m: {s: v + 3 * s + 0.01 * (s == k % 3) for s in range(seeds)} for m, v in values.items()}
        for k, (name, values) in enumerate(rows.items())
    }
    numbers: list[dict[str, float | str | None]] = [{"method": name, **values} for name, values in rows.items()]
    return Table(["method"], [], values=numbers, by_seed=by_seed, **more)  # type: ignore[arg-type]


def gp(g: float, p: float) -> dict[str, float]:
    return {"G": g, "P": p}


FROZEN = {"zero-shot": gp(10, 10)}
OUTCOMES = {
    "moments is best for new and own clients.": table(FROZEN | {"moments": gp(50, 60), "fedavg": gp(40, 50)}),
    "moments is best for own clients. For new clients it is level with ditto and fedavg.": table(
        FROZEN | {"moments": gp(50, 60), "ditto": gp(50, 50), "fedavg": gp(50, 40)}
    ),
    "ditto is best for own clients. For new clients a, b and 2 others are level.": table(
        FROZEN | {n: gp(50, 20) for n in "abcd"} | {"ditto": gp(20, 60)}
    ),
    "moments is best for new clients, ditto for own clients.": table(
        FROZEN | {"moments": gp(60, 50), "ditto": gp(50, 60)}
    ),
    "moments and ditto are level for new and own clients. moments needs the fewest rounds.": table(
        FROZEN | {"moments": gp(50, 60) | {"rounds": 1}, "ditto": gp(50, 60) | {"rounds": 10}}
    ),
    "a and b are level for new clients. b and c are level for own clients.": table(
        FROZEN | {"a": gp(50, 20), "b": gp(50, 60), "c": gp(20, 60)}
    ),
    "moments is best for own clients; new clients were not tested.": table({"moments": {"P": 50}, "fedavg": {"P": 40}}),
    "cocoop is best for new classes, promptfl for classes trained on.": table(
        {"cocoop": {"novel": 60, "base": 50, "P": 1}, "promptfl": {"novel": 50, "base": 60, "P": 2}}
    ),
    "a is highest for new and own clients. Two seeds cannot tell whether that is chance.": table(
        {"a": gp(60, 60), "b": gp(50, 50)}, seeds=2
    ),
    "a is highest for new clients, b for own clients. One seed cannot tell whether that is chance.": table(
        {"a": gp(60, 50), "b": gp(50, 60)}, seeds=1
    ),
    "fedot: 49.4 % on new clients, 48.1 % on own clients. Nothing to compare with.": table({"fedot": gp(49.4, 48.1)}),
    "These rows were not run alike (rounds 3 (a) and 10 (b)); no winner is named.": table(
        {"a": gp(60, 60), "b": gp(50, 50)}, unlike=["rounds 3 (a) and 10 (b)"]
    ),
}


@pytest.mark.parametrize("sentence", OUTCOMES)
def test_each_outcome_has_its_sentence(sentence: str) -> None:
    assert headline(OUTCOMES[sentence]) == sentence


def test_where_nothing_is_above_zero_shot_no_method_is_named_the_winner() -> None:
    rows = {"zero-shot": gp(50, 10), "fedlt": gp(50.8, 60), "fedot": gp(45, 40)}
    noisy = table(rows)
    noisy.by_seed["fedlt"]["G"] = {s: v + 2 * (s - 1) for s, v in noisy.by_seed["fedlt"]["G"].items()}
    sentence = headline(noisy)
    assert sentence.startswith("No method is above zero-shot for new clients (highest: fedlt, +0.8, -4.2 to 5.8). ")
    assert sentence.endswith("fedlt is best for own clients.")


def test_evidence_has_the_gap_its_interval_and_the_clients() -> None:
    made = table({"a": {"P": 60}, "b": {"P": 50}})
    made.by_client = {"a": {"P": {"x": 3.0, "y": 2.0}}, "b": {"P": {"x": 1.0, "y": 2.5}}}
    assert answers(made) == ["own clients  63.0 %  best   a, 10.0 above b (10.0 to 10.0), higher on 1 of 2 clients"]
    assert answers(table({"a": {"P": 60}})) == []
