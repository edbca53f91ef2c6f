"""What a server may ask a client to do; nothing else crosses between them. One file, one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from fedvlm.core.data import Data
from fedvlm.core.state import Message, Params
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
    """An error of a part of the user's own in this step names the clients that were computed together, and the one that
    fails, if one fails alone: each of a few is tried again. `client`: the name of a client."""
    try:
        with explained(doing(name, data, client), *method.parts):
            yield
    except OwnPartFailed as error:
        if len(data) == 1:
            raise
        for i in range(min(len(data), TRIED)):
            one = replace(data, bounds=data.bounds[[i]], ids=data.ids[[i]])
            with explained(doing(name, one, client), *method.parts):
                STEPS[name].run(method, {k: v[i : i + 1] for k, v in own.items()}, message, one, prepared)
        raise OwnPartFailed(f"{error}\n{SIDE_BY_SIDE}" if len(data) <= TRIED else str(error)) from error.__cause__


def doing(step: str, data: Data, client: Callable[[int], str]) -> str:
    """What is computed, in an error's words."""
    told = [client(i) for i in data.ids[:SHOWN].tolist()]
    more = f" and {len(data) - SHOWN} more" if len(data) > SHOWN else ""
    return f"step {step}, round {data.round}, client{'s' * (len(data) > 1)} {', '.join(told)}{more}"
