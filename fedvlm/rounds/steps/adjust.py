"""What a client does once the server has added up what was sent: it compares the merge's candidates on its own data, or
solves its own model from the sums (merge=moments). Other merges do not ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fedvlm.core.adapter import Task
from fedvlm.core.data import Data, Extra
from fedvlm.core.model import Model
from fedvlm.core.schema import Fields, Schema
from fedvlm.core.state import Answer, Message, Params
from fedvlm.rounds.steps.base import Step

if TYPE_CHECKING:
    from fedvlm.rounds.method import Method


@runtime_checkable
class AsksToAdjust(Protocol):
    """A merge that asks for this step."""

    def adjusts(self, task: Task) -> Fields:
        """What clients answer."""
        ...


@runtime_checkable
class Adjusts(Protocol):
    """A local rule that answers it."""

    def adjust(self, model: Model, own: Params, message: Message, data: Data) -> tuple[Params, Params]:
        """The new private rows, and the values that the merge `adjusts` by."""
        ...


class Adjust(Step):
    trains = True

    def schema(self, method: Method, extras: Mapping[str, Extra]) -> Schema:
        return Schema(self.fields(method))

    def run(self, method: Method, own: Params, message: Message, data: Data, prepared: Params) -> Answer:
        if not isinstance(method.local, Adjusts) or not message.stage:
            return Answer(own, self.nothing(method, data))
        if method.privacy and method.privacy.level == "example":  # so that a client knows what it has sent
            data = method.privacy.data(data, method.adapter)
        return Answer(*method.local.adjust(method.model, own, message, data))

    def nothing(self, method: Method, data: Data) -> Params:
        shapes = {k: f.shape for k, f in self.fields(method).items()}
        return {k: data.x.new_zeros(len(data), *shape, dtype=data.dtype) for k, shape in shapes.items()}

    def fields(self, method: Method) -> Fields:
        return method.merge.adjusts(method.task) if isinstance(method.merge, AsksToAdjust) else {}
