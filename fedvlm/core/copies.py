"""A client's personal copy of the shared parameters, kept in its private row.

Until a client has trained there is no copy, and its personal model is the shared one; the same holds for a new client.
"""

import torch

from fedvlm.core.state import Params

COPY = "personal."  # prefix of names in a private row that are not the adapter's; refused as a parameter's name
STARTED = COPY + "started"  # 1 once there is a copy


def empty(shared: Params) -> Params:
    """The row of a new client."""
    copy = {COPY + k: torch.zeros_like(v) for k, v in shared.items()}
    return copy | {STARTED: torch.zeros(())} if copy else {}


def store(copy: Params) -> Params:
    """A copy [clients, ...] as private rows."""
    rows = {COPY + k: v for k, v in copy.items()}
    return rows | {STARTED: next(iter(copy.values())).new_ones(len(next(iter(copy.values()))))} if copy else {}


def load_copies(own: Params, shared: Params) -> Params:
    """Each client's copy where it has one, else the shared parameters."""
    if not shared:
        return {}
    started = own[STARTED] > 0
    return {k: torch.where(started.view(-1, *[1] * (v.dim() - 1)), own[COPY + k], v) for k, v in shared.items()}


def without_copy(row: Params, shared: Params) -> Params:
    """A new client's row without its empty copy, which is as large as the model and need not be stored."""
    if STARTED not in row or row[STARTED]:
        return row
    return {k: v for k, v in row.items() if k.removeprefix(COPY) not in shared or not k.startswith(COPY)}


def with_copy(row: Params, shared: Params) -> Params:
    """The row with its empty copy, where that was left out."""
    return {k: v for k, v in empty(shared).items() if STARTED in row} | row


def adapter_params(own: Params) -> Params:
    """The adapter's private parameters in the clients' rows."""
    return {k: v for k, v in own.items() if not k.startswith(COPY)}
