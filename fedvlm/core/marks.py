"""Declarations about single methods of a part, written as decorators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

M = TypeVar("M", bound=Callable[..., object])


class Mark:
    """A declaration that belongs to a function: a subclass inherits it with the method, and an override starts without."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, method: M) -> M:
        setattr(method, self.name, True)
        return method

    def is_on(self, method: Callable[..., object]) -> bool:
        return bool(getattr(method, self.name, False))
