"""A client's own copy of the shared parameters: kept in its private row, recalled as its personal model.

Until a client has trained there is no copy, and its model is the shared one; so is a newcomer's.
"""

import torch

from fedvlm.core import Params

COPY = "personal."
STARTED = COPY + "started"


def empty(shared: Params) -> Params:
    """The newcomer's row."""
    copy = {COPY + k: torch.zeros_like(v) for k, v in shared.items()}
    return copy | {STARTED: torch.zeros(())} if copy else {}


def keep(copy: Params) -> Params:
    """A copy [clients, ...] as rows."""
    rows = {COPY + k: v for k, v in copy.items()}
    return rows | {STARTED: next(iter(copy.values())).new_ones(len(next(iter(copy.values()))))} if copy else {}


def recall(own: Params, down: Params) -> Params:
    """The copy where there is one, else what was sent."""
    if not down:
        return {}
    started = own[STARTED] > 0
    return {k: torch.where(started.view(-1, *[1] * (v.dim() - 1)), own[COPY + k], v) for k, v in down.items()}


def adapters(own: Params) -> Params:
    """The adapter's private names among a client's own."""
    return {k: v for k, v in own.items() if not k.startswith(COPY)}
