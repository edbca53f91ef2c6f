"""What goes into the wheel and the sdist: what a user needs and nothing else. Nothing is built here."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

builders = pytest.importorskip("hatchling.builders.wheel")

from hatchling.builders.sdist import SdistBuilder  # noqa: E402

ROOT = Path(__file__).parents[2]
KINDS = {".py", ".json", ".yaml", ".css", ".js", ".j2", ".safetensors", ".txt", ".zip", ".typed", ".gz", ".md"}
BESIDE = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "NOTICE", "README.md", "SECURITY.md", "pyproject.toml"}
GENERATED = {".gitignore"}  # hatchling always adds it to an sdist


def tracked() -> set[str]:
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout")
    return set(listed.stdout.splitlines())


def test_the_wheel_has_the_package_and_nothing_else() -> None:
    files = {f.distribution_path for f in builders.WheelBuilder(str(ROOT)).recurse_included_files()}
    package = {name for name in tracked() if name.startswith("fedvlm/") and (ROOT / name).is_file()}
    assert files >= package and all(name.startswith("fedvlm/") for name in files)
    assert files <= package, f"not in git: {sorted(files - package)[:5]}"
    kinds = Counter(Path(name).suffix for name in files)
    assert set(kinds) <= KINDS, f"kinds of files that no rule knows: {sorted(set(kinds) - KINDS)}"
    assert sum((ROOT / name).stat().st_size for name in files) < 70e6  # PyPI takes 100 MB


def test_the_sdist_has_the_package_and_what_is_said_about_it() -> None:
    files = {f.relative_path for f in SdistBuilder(str(ROOT)).recurse_included_files()}
    beside = {name for name in files if not name.startswith("fedvlm/")}
    assert beside - GENERATED == BESIDE
    assert {name for name in files if name.startswith("fedvlm/")} <= tracked()
