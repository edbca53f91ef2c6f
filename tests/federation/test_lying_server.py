"""A lying server gets nothing from a site: the short form of `python benchmarks/attacks.py server`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("dp_accounting")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import lying_server
from lying_server import ATTEMPTS, Attempt

LONG = ("512 questions", "400 noisy", "hundred times", "head of 200 MiB", "second federation")
SHORT = [one for one in ATTEMPTS if not one.name.startswith(LONG) and not any(word in one.name for word in LONG)]


@pytest.fixture(scope="module")
def images():
    with lying_server.emoji() as made:
        yield made


@pytest.mark.parametrize("one", SHORT, ids=lambda one: one.name)
def test_a_server_that_lies_gets_nothing_unseen(one: Attempt, images, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVLM_DATA_HOME", str(tmp_path / "kept"))
    found = lying_server.played(tmp_path, images, one)
    assert found.how, f"{one.name}: {found.said}"


def test_all_eighteen_are_among_the_attempts():
    assert {one.trust for one in ATTEMPTS} == set(range(19)) and len(ATTEMPTS) >= 45
