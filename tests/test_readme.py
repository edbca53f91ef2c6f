"""The README's promises that a test can hold."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_ci_runs_exactly_the_readmes_test_command():
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert command.endswith("pytest -n auto") and command in (ROOT / "README.md").read_text().splitlines()


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for part in text.split("](")[1:]:
        target = part.split(")")[0].split("#")[0]
        if target and "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


def test_the_model_is_shipped_once_and_whole():
    folder = ROOT / "fedvlm" / "backbones" / "assets" / "mini-clip"
    assert {p.name for p in folder.iterdir()} >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert (ROOT / "fedvlm" / "data" / "assets" / "emoji.zip").stat().st_size < 15e6


def test_the_federation_page_has_the_examples_as_they_are():
    page = (ROOT / "docs" / "federation.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "examples" / "deploy").iterdir()):
        assert path.read_text(encoding="utf-8").rstrip() in page, path.name
