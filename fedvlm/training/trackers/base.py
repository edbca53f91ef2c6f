"""What a tracker gets: the numbers of each round's record. rounds.jsonl has them in any case."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, cast

from fedvlm.core.records import RoundRecord
from fedvlm.errors import FedvlmError
from fedvlm.training.folder import RunFolder

NESTED = ("shared", "personal", "newcomer", "effects", "metrics", "detection", "base_to_novel")  # not by client


class Sink(Protocol):
    """An open tracker. A module of this folder has a function `open(run)` that gives one."""

    def write(self, round: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check(names: Sequence[str]) -> None:
    """An error where a tracker's package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise FedvlmError(f'log={name} needs {name}; install it with `pip install "fedvlm[tracking]"`')


@contextlib.contextmanager
def opened(names: Sequence[str], run: RunFolder) -> Iterator[Callable[[RoundRecord], None]]:
    """A function that writes a round's record to these trackers."""
    check(names)
    with contextlib.ExitStack() as stack:
        sinks = [cast(Sink, importlib.import_module(f"fedvlm.training.trackers.{name}").open(run)) for name in names]
        for sink in sinks:
            stack.callback(sink.close)

        def write(record: RoundRecord) -> None:
            for sink in sinks:
                sink.write(record["round"], numbers(record))

        yield write


def numbers(record: RoundRecord) -> dict[str, float]:
    """The record's numbers by name, nested ones as a path: P, loss, shared/test, metrics/ece/personal/test."""
    found: dict[str, float] = {}

    def collect(entry: Mapping[str, object], path: str) -> None:
        for key, value in entry.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and (path or key != "round"):
                found[path + key] = float(value)
            elif isinstance(value, dict) and (path or key in NESTED):
                collect(value, f"{path}{key}/")

    collect(record, "")
    return found
