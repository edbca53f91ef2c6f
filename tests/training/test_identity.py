"""Which keys make another run: one that is found finished must have been run with the same."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

from fedvlm.config.config import Config, resolve
from fedvlm.training.planned_run import PlannedRun

# keys that change no number: where and how fast it runs, and what is told of it
WITHOUT_EFFECT = {
    "federation",
    "out",
    "seeds",
    "jobs",
    "launcher",
    "launch",
    "workers",
    "timeout",
    "grace",
    "start_timeout",
    "device",
    "log",
}
# keys for which a fingerprint stands, and those of which some values count (tested where these values are)
ELSEWHERE = {"data", "duplicates", "columns", "names", "split_file", "backbone", "encode", "protocol"}


def test_another_value_of_a_key_is_another_run():
    setup, pool = resolve("fedavg", {}), SimpleNamespace(fingerprint="f", backbone="b@1")
    before = PlannedRun(setup, pool).identity
    other = {f.name: PlannedRun(setup.with_(**{f.name: "other"}), pool).identity for f in fields(Config)}
    same = {name for name, identity in other.items() if identity == before}
    assert same == WITHOUT_EFFECT | ELSEWHERE
