"""What a server may ask a client to do; nothing else crosses between them. One file, one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from fedvlm.core.data import Data
from fedvlm.core.state import Answer, Message, Params
from fedvlm.errors import FedvlmError, nearest
from fedvlm.parts.failures import OwnPartFailed, explained
from fedvlm.rounds.steps.adjust import Adjust
from fedvlm.rounds.steps.base import Step
from fedvlm.rounds.steps.diagnose import Diagnose
from fedvlm.rounds.steps.novel import Novel
from fedvlm.rounds.steps.score import ScoreStep
from fedvlm.rounds.steps.train import Train
from fedvlm.rounds.steps.validate import Validate

if TYPE_CHECKING:
    from fedvlm.rounds.method import Method

SHOWN = 3  # clients that an error names
TRIED = 16  # clients that are tried alone after an error
SIDE_BY_SIDE = "each of these clients works alone, so it is about axis 0: that of every tensor is the client"
STEPS: dict[str, Step] = {
    "train": Train(),
    "adjust": Adjust(),
    "validate": Validate(),
    "score": ScoreStep(),
    "novel.shared": Novel("shared"),
    "novel.personal": Novel("personal"),
    "diagnose": Diagnose(),
}


def step_of(name: str) -> Step:
    if name not in STEPS:
        raise FedvlmError(f"unknown step '{name}'; {nearest(name, STEPS)}")
    return STEPS[name]


@contextmanager
def explained_by_client(
    name: str,
    method: Method,
    own: Params,
    message: Message,
    data: Data,
    prepared: Params,
    client: Callable[[int], str] = str,
) -> Iterator[None]:
    """Runs a step of these clients. Where a part of the user's own fails in it, the error says with which client: each of a
    few is tried alone. `client`: the name of a client."""
    told = [client(i) for i in data.ids[:SHOWN].tolist()]
    more = f" and {len(data) - SHOWN} more" if len(data) > SHOWN else ""
    who = f"client{'s' * (len(data) > 1)} {', '.join(told)}{more}"
    try:
        with explained(f"step {name}, round {data.round}, {who}", *method.parts):
            yield
    except OwnPartFailed as error:
        if len(data) == 1:
            raise
        for i in range(min(len(data), TRIED)):
            one = replace(data, bounds=data.bounds[[i]], ids=data.ids[[i]])
            run(name, method, {k: v[i : i + 1] for k, v in own.items()}, message, one, prepared, client)
        raise OwnPartFailed(f"{error}\n{SIDE_BY_SIDE}" if len(data) <= TRIED else str(error)) from error.__cause__


def run(
    name: str,
    method: Method,
    own: Params,
    message: Message,
    data: Data,
    prepared: Params,
    client: Callable[[int], str] = str,
) -> Answer:
    """What these clients answer."""
    with explained_by_client(name, method, own, message, data, prepared, client):
        return step_of(name).run(method, own, message, data, prepared)
