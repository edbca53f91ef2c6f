"""Families of methods: lists and charts group by them."""

from __future__ import annotations

from collections import Counter

from fedvlm.config import catalogue
from fedvlm.config.families import FAMILIES, IN_ONE_ROUND, PAPERS, REFERENCES
from fedvlm.parts import registry


def test_each_adapter_is_of_one_family() -> None:
    named = Counter(name for found in FAMILIES.values() for name in found.adapters)
    assert sorted(named) == sorted(catalogue.load().parts["adapter"]) and set(named.values()) == {1}


def test_what_is_named_exists() -> None:
    methods = {method.name for method in catalogue.load().methods}
    assert {*REFERENCES, *PAPERS, "tip-adapter"} <= methods
    once = {name for name in catalogue.load().parts["local"] if registry.find("local", name).one_round}
    parts = [m.parts.split(" × ") for m in catalogue.load().methods]
    assert {local for _, local, merge in parts if merge in IN_ONE_ROUND} == once
