"""Ranges of numbers, written beside a part's fields: `trim: Annotated[float, Range(0, 0.5)] = 0.2`."""

from __future__ import annotations

from typing import Annotated, NamedTuple


class Range(NamedTuple):
    """The numbers that a field may hold, written beside it: `trim: Annotated[float, Range(0, 0.5)] = 0.2`."""

    low: float | None = None  # None: no limit
    high: float | None = None
    above: bool = False  # `low` itself is left out
    below: bool = False  # `high` itself is left out

    def holds(self, number: float) -> bool:
        over = self.low is None or number > self.low or (number == self.low and not self.above)
        return over and (self.high is None or number < self.high or (number == self.high and not self.below))

    def __str__(self) -> str:
        if self.low is not None and self.high is not None and not (self.above or self.below):
            return f"between {self.low} and {self.high}"
        low = "" if self.low is None else f"above {self.low}" if self.above else f"of at least {self.low}"
        high = "" if self.high is None else f"below {self.high}" if self.below else f"at most {self.high}"
        return " and ".join(filter(None, (low, high)))


Whole = Annotated[int, Range(0)]
Count = Annotated[int, Range(1)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]
