"""The types everything else uses: parameters, state, messages and replies.

Every tensor that a client step sees has a leading client axis, so that the same code serves one client (serial, loopback)
and many side by side (stacked): `params[name]` is [clients, ...], `batch.x` is [clients, examples, ...].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Params = dict[str, Tensor]  # flat, so that a safetensors file can hold it
Note = float | str | dict[int, float] | list[int]  # what is recorded of a round: a number, a word, or by client

EFFECT = "effect."  # name prefix of a local rule's diagnostics (Local.effects) in a reply


class State(NamedTuple):
    """The server's state between rounds; together with the clients' private rows it resumes bit for bit."""

    shared: Params  # parameters that every client may read
    private: Params  # the row a new client starts from; a client's own row never travels
    server: Params  # server-only state, never sent
    task: Params = {}  # class embeddings that the server trains and sends: "text", "novel"; empty: the frozen ones

    def message(self, stage: str = "", reference: Params | None = None, extra: Params | None = None) -> Message:
        return Message(self.shared, self.task, reference or {}, extra or {}, stage)


@dataclass(frozen=True)
class Message:
    """What the server sends down with a step."""

    shared: Params  # the shared model
    task: Params = field(default_factory=dict)  # class embeddings that replace the frozen ones: "text", "novel"
    reference: Params = field(default_factory=dict)  # another model, for objectives that stay near one
    extra: Params = field(default_factory=dict)  # what a merge tells its own local rule (SCAFFOLD's control variate)
    stage: str = ""  # of a schedule, by name; "" where there is none

    def parts(self) -> dict[str, Params]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "stage"}

    def to(self, device: torch.device) -> Message:
        moved = {k: on_device(v, device) for k, v in self.parts().items()}
        return Message(**moved, stage=self.stage)

    @property
    def nbytes(self) -> int:
        return sum(nbytes(p) for p in self.parts().values())


class Reply(NamedTuple):
    """What some clients answer, [clients, ...] each."""

    ids: np.ndarray
    values: Params  # by the names of the step's schema
    shared: Params = {}  # the shared parameters as trained, where the step trains

    @property
    def nbytes(self) -> int:
        return nbytes(self.values) + nbytes(self.shared)


def is_running_statistic(name: str) -> bool:
    """Whether a parameter is a running statistic (batch norm): it is averaged like any other, but follows the batches
    instead of the loss; excluded from proximal terms, control variates and meta-steps."""
    return name.rpartition(".")[2].startswith("running_")


def nbytes(params: Params) -> int:
    return sum(v.numel() * v.element_size() for v in params.values())


ALIGNMENT = 64  # bytes: torch's own tensors begin at a multiple of it


def aligned(x: Tensor) -> Tensor:
    """x, copied if need be to where torch itself would have put it. A library may round a product of the same numbers
    otherwise where they begin elsewhere in memory, as a part of a larger tensor does and what is read from a file."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


def select(params: Params, names: Iterable[str]) -> Params:
    return {k: params[k] for k in names}


def on_device(params: Params, device: torch.device) -> Params:
    return {k: v.to(device) for k, v in params.items()}


def copy_per_client(params: Params, clients: int) -> Params:
    """A separate copy for each client, [clients, ...]."""
    return {k: v.expand(clients, *v.shape).clone(memory_format=torch.contiguous_format) for k, v in params.items()}


def with_client_axis(params: Params) -> Params:
    """A client axis of length one, which broadcasts: the same parameters for every client, without a copy."""
    return {k: v[None] for k, v in params.items()}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weightᵀ + bias for each client. Written weight-first, so that the gradient of the (large) weight has the memory
    layout of the weight: 1.5 times as fast on a CPU (benchmarks/steps.py)."""
    out = (torch.bmm(weight, x.mT) if len(weight) == len(x) else weight @ x.mT).mT
    return out if bias is None else out + bias[:, None]


class Answer(NamedTuple):
    """What a step computed for a few clients, [clients, ...] each."""

    own: Params  # private rows; stored where the step trains
    values: Params
    shared: Params = {}
    lengths: dict[str, Tensor] = {}  # [clients], of ragged values, which are padded to the longest client
