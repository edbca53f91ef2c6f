"""What an engine is: it carries steps to clients and brings back their replies. One file, one engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedvlm.core.data import Data
from fedvlm.core.state import Message, Params, Reply, State
from fedvlm.errors import FedvlmError
from fedvlm.privacy.secure.settings import Summation, Summed
from fedvlm.rounds.method import Method

if TYPE_CHECKING:
    from fedvlm.config.config import Setup
    from fedvlm.data.clients import Federation
    from fedvlm.rounds.guard import Guard


@dataclass(frozen=True)
class Job:
    """All that an engine may need of a run."""

    setup: Setup
    method: Method
    federation: Federation
    data: Data  # of every client, at position = id
    folder: Path  # the run's: private rows go here
    log: Callable[[str], None]
    guard: Guard  # is told of clients that fail or offend
    device: str = "cpu"
    run: str = ""  # what ledgers call it


class Engine(ABC):
    """An engine moves messages and keeps private rows; it knows nothing of steps or metrics. A client that fails is
    absent from the reply, and the guard is told why; replies are checked by the guard, too (fedvlm/rounds/guard.py)."""

    @classmethod
    @abstractmethod
    def open(cls, job: Job) -> Engine: ...

    @abstractmethod
    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
        """Replies, a few clients at a time. `exchange` counts the exchanges of a round: training in exchange 0 starts from
        the private rows of the round before, so that a round can be repeated after a crash."""

    @abstractmethod
    def outputs(self, message: Message, round: int) -> Params:
        """Logits and features on every test example, by view; {} where they stay with the clients."""

    def placed(self, state: State) -> State:
        """The state, with its shared parameters where this engine computes, if the merge can work there, too."""
        return state

    def sums(self, ids: np.ndarray, message: Message, round: int, exchange: int, wanted: Summation) -> Summed:
        """Train, and add up the clients' contributions as integers (secure=true). Where clients are apart, an engine
        overrides this by the four exchanges of fedvlm/privacy/secure: masks cancel exactly, so the sum is the same to
        the bit, and no single contribution is seen."""
        total, found = wanted.zero(), [np.empty(0, np.int64)]
        for reply in self.run("train", ids, message, round, exchange):
            total += wanted.contributions(reply).sum(0, dtype=total.dtype)
            found.append(reply.ids)
        return Summed(total, np.sort(np.concatenate(found)))

    def close(self) -> None:  # noqa: B027 – most engines have nothing to close
        """Release what the engine holds; it is called once, also after an error."""


def finite(rows: Params, clients: int) -> np.ndarray:
    """Which clients' tensors are all finite: a sum is not finite if any of its terms is not."""
    good = torch.ones(clients, dtype=torch.bool)
    for v in rows.values():
        good &= v.reshape(clients, -1).sum(1).isfinite().cpu()
    return good.numpy()


def device_of(setup: Setup) -> str:
    """The device for client steps: training on stored features runs on the CPU, networks and prompts use a GPU."""
    wanted, available = setup.config.device, torch.cuda.is_available()
    if wanted == "mps":
        if not torch.backends.mps.is_available():
            raise FedvlmError("device=mps: torch finds no Apple GPU here; give device=cpu, or cuda for NVIDIA's")
        return "mps"
    if wanted == "cuda" and not available:
        raise FedvlmError("device=cuda: torch finds no GPU here; give device=cpu")
    if wanted == "cpu" or not available or (wanted == "auto" and not setup.adapter.limits.gpu):
        return "cpu"
    torch.backends.cudnn.allow_tf32 = False  # the same numbers as elsewhere, as far as a GPU allows
    torch.backends.cudnn.deterministic = True
    return "cuda"
