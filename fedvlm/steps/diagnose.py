"""Diagnostics that an adapter declares, such as the condition number of FedOT's map: one number per client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedvlm.adapters.base import HasDiagnostics
from fedvlm.core import Data, Extra, Message, Params, with_client_axis
from fedvlm.schema import Field
from fedvlm.steps.base import Answer, Schema, Step

if TYPE_CHECKING:
    from fedvlm.method import Method


class Diagnose(Step):
    def schema(self, method: Method, extras: Mapping[str, Extra]) -> Schema:
        adapter = method.adapter
        return Schema(dict.fromkeys(adapter.diagnostics, Field()) if isinstance(adapter, HasDiagnostics) else {})

    def run(self, method: Method, own: Params, message: Message, data: Data, prepared: Params) -> Answer:
        if not isinstance(method.adapter, HasDiagnostics):
            return Answer(own, {})
        params = method.local.personal(own, with_client_axis(message.shared))
        found = method.adapter.diagnose(method.task, params)
        return Answer(own, {k: v.expand(len(data)) for k, v in found.items()})  # shared parameters have one row for all
