"""What a client does once the server has added up what was sent: it compares the merge's candidates on its own data, or
solves its own model from the sums (merge=moments). Other merges do not ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from fedvlm.core.data import Data, Extra
from fedvlm.core.local import Adjusts
from fedvlm.core.schema import Schema
from fedvlm.core.state import Answer, Message, Params
from fedvlm.rounds.steps.base import Step

if TYPE_CHECKING:
    from fedvlm.rounds.method import Method


class Adjust(Step):
    trains = True

    def schema(self, method: Method, extras: Mapping[str, Extra]) -> Schema:
        return Schema(method.merge.adjusts(method.task))

    def run(self, method: Method, own: Params, message: Message, data: Data, prepared: Params) -> Answer:
        if not isinstance(method.local, Adjusts) or not message.stage:
            return Answer(own, self.nothing(method, data))
        if method.privacy and method.privacy.level == "example":  # so that a client knows what it has sent
            data = replace(data, private=method.privacy.descent(method.adapter))
        return Answer(*method.local.adjust(method.model, own, message, data))

    def nothing(self, method: Method, data: Data) -> Params:
        fields = method.merge.adjusts(method.task)
        return {k: data.x.new_zeros(len(data), *f.shape, dtype=data.dtype) for k, f in fields.items()}
