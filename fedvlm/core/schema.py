"""What a client may answer: the name, shape and range of every value. The server checks each reply against it (guard.py)."""

from __future__ import annotations

import math
from typing import NamedTuple

INFINITE = math.inf


class Field(NamedTuple):
    """One value of a client's reply."""

    shape: tuple[int, ...] = ()  # () is a number; −1 an axis of any length up to the client's training examples
    low: float = -INFINITE
    high: float = INFINITE
    per: str = ""  # low and high are per example of "train", "val" or "test", or of each "split" along the first axis
    whole: bool = False  # whole numbers only
    update: bool = False  # moves the shared model as the shared parameters do, and is shortened with them (bound=)


Fields = dict[str, Field]

SIZE = Field(low=1e-9, high=1, per="train", whole=True)  # a number of training examples, at least one
SHARE = Field(low=0, high=1)
LOSS = Field(low=-1e6, high=1e6)  # of training: objectives may have any sign
VALIDATION = Field(low=0, high=1e4)  # of a task type's own loss


class Schema(NamedTuple):
    """What one client may answer to a step: anything else is refused."""

    values: Fields
    shared: bool = False  # the shared parameters come back, too

    @property
    def ragged(self) -> list[str]:
        """Values with an axis of any length, which is the same for all of them."""
        return [k for k, field in self.values.items() if -1 in field.shape]
