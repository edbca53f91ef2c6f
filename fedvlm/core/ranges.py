"""What a key says of itself beside its field: the range of its numbers, `trim: Annotated[float, Range(0, 0.5)] = 0.2`, and
what it is not like other keys in, `out: str = default("", "unbound")`."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal, NamedTuple, TypeVar

T = TypeVar("T")


# what a key of a run is for: the purpose of the class (`purpose = …`) that it stands in
Purpose = Literal["data", "clients", "evaluation", "training", "privacy", "secure aggregation", "engine", "output"]
# What a key says of itself, or a class (`traits = …`) of all its keys. One that says nothing changes the numbers of a run,
# is the same in all rows of a fair table and at all sites of a federation, and holds for every kind of data.
Trait = Literal[
    "unbound",  # does not change the numbers of a run, or only through the data's fingerprint
    "varies",  # the runs of one row of a table may differ in it
    "free",  # rows of a fair table may differ in it; of data and backbone they agree in the fingerprints
    "selection",  # rows may differ in it where the last round is reported: it says which other rounds are scored
    "tuned",  # a sweep may choose it on validation, for each method
    "effort",  # of a part: how much is computed; methods have their own, but a value that is given holds for all rows
    "path",  # a place on this machine
    "asker",  # with federation=: concerns who starts the run, and is not sent to the sites
    "site",  # with federation=: each site has its own
    "central",  # with federation=: only the default makes sense
    "classes",  # for data with classes only
]


def default(value: T, *traits: Trait, decisive: tuple[str, ...] = ()) -> T:
    """A field with this default and these traits. decisive: the only values that change the numbers of a run; (): all."""
    return field(default=value, metadata={"traits": traits, "decisive": decisive})


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
