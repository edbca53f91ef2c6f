"""Public names that are imported when they are first used, so that the package that has them does not import torch."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The package's `__getattr__` and `__dir__`; `homes`: module → the names that come from it."""
    home_of = {name: home for home, names in homes.items() for name in names}
    known = vars(sys.modules[package])

    def get(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        known[name] = getattr(import_module(home_of[name]), name)
        return known[name]

    return get, lambda: [*known, *home_of]
