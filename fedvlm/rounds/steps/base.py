"""What a step is: what it computes on a few clients side by side, and the schema of its reply.

A step is a pure function of (private rows, message, data): random only through seeds derived from (run, round, client).
Engines know the schema and nothing else of a step; the server checks every reply against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedvlm.core.data import Data, Extra
from fedvlm.core.schema import Schema
from fedvlm.core.state import Answer, Message, Params

if TYPE_CHECKING:
    from fedvlm.rounds.method import Method


class Step:
    trains: bool = False  # it changes private rows

    def schema(self, method: Method, extras: Mapping[str, Extra]) -> Schema:
        """`extras`: extra examples that the clients' data has, by name."""
        raise NotImplementedError

    def prepare(self, method: Method, message: Message) -> Params:
        """What can be computed once for all clients of a process before they run the step."""
        return {}

    def run(self, method: Method, own: Params, message: Message, data: Data, prepared: Params) -> Answer:
        """`method` already uses the class embeddings of the message."""
        raise NotImplementedError
