"""A bench and a comparison never call rows with other clients, or another protocol, alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedvlm import api
from fedvlm.cli import main
from fedvlm.config.config import POOL
from fedvlm.errors import FedvlmError
from fedvlm.report.gains import against_frozen
from fedvlm.studies import comparison


@pytest.mark.parametrize(
    "runs, differing",
    [
        (
            {
                "fedavg": ["partition=dirichlet", "alpha=0.1", "clients=5"],
                "fedprox": ["partition=iid", "clients=6"],
                "ditto": ["partition=dirichlet", "alpha=0.1", "clients=5", "participation=0.2"],
            },
            [
                "partition dirichlet (ditto, fedavg) and iid (fedprox)",
                "clients 5 (",
                "alpha 0.1 (",
                "participation 0.2 (ditto) and 1 (fedavg, fedprox)",
            ],
        ),
        (
            {"fedavg": ["centre=own"], "fedprox": ["template=a drawing of a {}"]},
            ["template ", "centre own (fedavg) and none (fedprox)"],
        ),
    ],
)
def test_compare_names_what_differs(
    runs: dict[str, list[str]], differing: list[str], images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method, keys in runs.items():
        place = tmp_path / "runs" / method
        assert main(["run", method, f"data={images}", "rounds=1", f"out={place}", *keys]) == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "runs")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "same protocol" not in told and "rows that follow different protocols and do not compare methods: " in told
    assert [words for words in differing if words not in told] == [], told
    assert main(["compare", "--fair", str(tmp_path / "runs")]) == 1
    refused = " ".join(capsys.readouterr().err.split())
    assert [words for words in differing if words not in refused] == []
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), "--out", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "rows that follow different protocols" in text
    for key in (words.partition("=")[0] for given in runs.values() for words in given):
        assert f"<dt>{key}</dt>" in text


@pytest.mark.parametrize("setting", ["participation: 0.2", "dropout: 0.5", "partition: iid", "clients: 50"])
def test_bench_refuses_a_recipe_with_a_protocol_of_its_own(setting: str, tmp_path: Path) -> None:
    recipe = tmp_path / "half.yaml"
    recipe.write_text(f"like: fedavg\nsettings: {{{setting}}}\n", encoding="utf-8")
    given = {"data": "emoji", "protocol": "one", "rounds": 2}
    with pytest.raises(FedvlmError, match=rf"differ in {setting.partition(':')[0]} "):
        comparison.setups_of([str(recipe), "fedavg"], given, api.new_pools())


def test_a_method_may_have_settings_of_its_own(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("like: fedavg\nsettings: {lr: 0.5, epochs: 2, bound: 0, values: paper}\n", encoding="utf-8")
    given = {"data": "emoji", "protocol": "one", "rounds": 2}
    assert len(comparison.setups_of([str(recipe), "fedavg", "centralised"], given, api.new_pools())) == 4


@pytest.mark.parametrize("partition, alike", [("auto", True), ("dirichlet", False)])
def test_training_on_all_images_is_a_reference(partition: str, alike: bool, images: Path, tmp_path: Path) -> None:
    """It is scored by domain, as other methods are where each domain is a client; else nothing is said of a difference."""
    both = [
        api.run(m, data=str(images), rounds=1, seed=s, out=str(tmp_path / f"{m}-{s}"), **keys)
        for m, keys in (
            ("zero-shot", {"partition": partition}),
            ("fedavg", {"partition": partition}),
            ("centralised", {}),
        )
        for s in (1, 2)
    ]
    assert {POOL, *both[0].record.clients} == {*both[-1].record.clients} if alike else POOL in both[-1].record.clients
    table = api.Runs(both).table(fair=True)
    assert ("centralised" in table.by_seed) == alike == any("centralised" in v for v in against_frozen(table))
    assert any(n.startswith("centralised: trains and is scored on other clients") for n in table.notes) != alike
    assert alike or "centralised" not in {row for row, _ in table.bold}
