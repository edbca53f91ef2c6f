"""Training: the local rule trains, the merge adds what it needs, and the trained shared parameters go up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fedvlm.core import copies
from fedvlm.core.data import Data, Extra
from fedvlm.core.schema import Schema
from fedvlm.core.state import EFFECT, Answer, Message, Params, with_client_axis
from fedvlm.privacy.mechanism import joined
from fedvlm.rounds.steps.base import Step
from fedvlm.rounds.steps.validate import validation_loss

if TYPE_CHECKING:
    from fedvlm.rounds.method import Method


class Train(Step):
    trains = True

    def schema(self, method: Method, extras: Mapping[str, Extra]) -> Schema:
        return Schema(method.uploads, shared=True)

    def run(self, method: Method, own: Params, message: Message, data: Data, prepared: Params) -> Answer:
        privacy = method.privacy
        if privacy is None:
            return self.trained(method, own, message, data)
        if privacy.level == "client":
            return privacy.protected(self.trained(method, own, message, data), message, data)
        data = privacy.data(data, method.adapter)
        alone = [replace(data, bounds=data.bounds[[i]], ids=data.ids[[i]]) for i in range(len(data))]
        rows = [{k: v[i : i + 1] for k, v in own.items()} for i in range(len(data))]
        answers = [self.trained(method, row, message, one) for row, one in zip(rows, alone, strict=True)]
        return privacy.protected(joined(answers), message, data)

    def trained(self, method: Method, own: Params, message: Message, data: Data) -> Answer:
        values: Params = {}
        if "before" in method.uploads:
            values["before"] = validation_loss(method, own, with_client_axis(message.shared), data)
        own, shared, uploaded = method.local.train(method.model, own, message, data)
        if method.has_shared_twin:
            own |= {method.TRAINED: torch.ones(len(data), dtype=data.dtype, device=data.x.device)}
        if "after" in method.uploads:
            values["after"] = validation_loss(method, own, shared, data)
        more, lengths = method.merge.client_values(method.model, shared | copies.adapter_params(own), data)
        acted = {EFFECT + k: uploaded[k] for k in method.local.effects if EFFECT + k in method.uploads}
        told = {k: v for k, v in uploaded.items() if k not in method.local.effects}
        return Answer(own, told | acted | more | values, shared, lengths)
