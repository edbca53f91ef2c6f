"""Whether a saved state is one of this method."""

from __future__ import annotations

from pathlib import Path

from fedvlm.core.state import Params, State
from fedvlm.errors import FedvlmError
from fedvlm.rounds.method import Method


def check_state(state: State, method: Method, where: Path, first: State | None = None) -> None:
    """An error where a saved state is not one of this method; `first`: the state that a run starts from, to check what the
    server keeps too."""
    check_params(state.shared, method.initial, str(where))
    check_params(state.private, method.newcomer, str(where))
    if state.task:  # class embeddings that the server trained
        tasks = {"text": method.task, "novel": method.task.novel}
        frozen = {k: task.names() for k, task in tasks.items() if task is not None}
        check_params({k: v for k, v in state.task.items() if k in frozen}, frozen, str(where))
    if first:
        kept = {k: v for k, v in state.server.items() if k in first.server}
        check_params(kept, first.server, str(where), finite=False)


def check_params(found: Params, expected: Params, where: str, finite: bool = True) -> None:
    """An error where names, shapes, types or numbers are not what the adapter expects."""
    odd = sorted(found.keys() ^ expected.keys())
    if odd:
        raise FedvlmError(f"{where} holds other parameters than its adapter has: {', '.join(odd[:5])}")
    for name, wanted in expected.items():
        value = found[name]
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise FedvlmError(
                f"{where} holds {name} as {tuple(value.shape)} {value.dtype}, and its adapter has "
                f"{tuple(wanted.shape)} {wanted.dtype}"
            )
        if finite and not value.isfinite().all():
            raise FedvlmError(f"{where} holds {name} with numbers that are not finite")
