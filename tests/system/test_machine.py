"""The number of cores on every kind of system: with and without Python 3.13's function and CPU affinity."""

from __future__ import annotations

import os

import pytest

from fedvlm.system.machine import cores


@pytest.fixture
def bare(monkeypatch):
    """A system without CPU affinity, such as Windows or macOS, and a Python before 3.13."""
    monkeypatch.delattr(os, "process_cpu_count", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    return monkeypatch


def test_cores_of_this_machine():
    assert 1 <= cores() <= (os.cpu_count() or 1)


def test_python_313_decides_where_it_can(bare):
    bare.setattr(os, "process_cpu_count", lambda: 3, raising=False)
    bare.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert cores() == 3
    bare.setattr(os, "process_cpu_count", lambda: None)
    assert cores() == 1


def test_affinity_limits_the_count(bare):
    bare.setattr(os, "cpu_count", lambda: 8)
    bare.setattr(os, "sched_getaffinity", lambda pid: {1, 5}, raising=False)
    assert cores() == 2


@pytest.mark.parametrize(("count", "expected"), [(8, 8), (None, 1)])
def test_without_affinity_all_cores_count(bare, count, expected):
    bare.setattr(os, "cpu_count", lambda: count)
    assert cores() == expected
