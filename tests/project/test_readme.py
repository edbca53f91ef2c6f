"""The README's promises that a test can hold."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ci_runs_exactly_the_readmes_test_command():
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert command.endswith("pytest -n auto") and command in (ROOT / "README.md").read_text().splitlines()


def test_the_readme_is_short_and_has_both_commands_first():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    blocks = [k for k, line in enumerate(lines) if line.startswith("```")]
    assert "fedvlm demo" in lines[blocks[0] + 1] and "pytest -n auto" in lines[blocks[2] + 1]


def test_links_of_the_examples_lead_somewhere():  # those of all other pages: test_docs.py
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "examples" / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / "examples" / target).exists(), target


def test_the_model_is_shipped_once_and_whole():
    folder = ROOT / "fedvlm" / "backbones" / "assets" / "mini-clip"
    assert {p.name for p in folder.iterdir()} >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert (ROOT / "fedvlm" / "data" / "assets" / "emoji.zip").stat().st_size < 15e6


def test_the_federation_page_names_every_example_and_promises_what_is_tested():
    page = (ROOT / "docs" / "federation.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "examples" / "deploy").iterdir()):
        assert f"(../examples/deploy/{path.name})" in page
    tests = {p.name: p.read_text(encoding="utf-8") for p in (ROOT / "tests" / "federation").glob("test_*.py")}
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)…?`|`…(\w+)…?`", page)
    file = ""
    assert len(named) > 10
    for home, whole, part in named:
        file = home or file
        assert re.search(rf"def {whole}" if whole else rf"def test_\w*{part}", tests[file]), (file, whole or part)
