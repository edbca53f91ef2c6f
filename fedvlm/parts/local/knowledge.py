"""KgCoOp (Yao et al., CVPR 2023): prompts whose class features stay near those of the frozen model's phrases.

loss + λ · mean over classes ‖w_c − z_c‖², with w_c the class feature of the learned prompt and z_c that of the phrase
("a photo of a …", template=), both of length 1; λ = 8. The public code has 1 − cos in its place, which is half of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedvlm.core.adapter import Adapter
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, by_autograd
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative
from fedvlm.core.state import Message, Params
from fedvlm.parts.local.term import PULL, fit_with_term, has_prompts


@dataclass(frozen=True)
class Knowledge(Local):
    knowledge: NotNegative = 8.0  # λ, weight of the distance to the frozen model's class features; 0: none

    effects: ClassVar[Mapping[str, str]] = PULL

    def incompatible(self, adapter: Adapter) -> str:
        return (
            "" if has_prompts(adapter) else "keeps class features of prompts near the frozen ones; use adapter=prompt"
        )

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        adapter, task = model.adapter, model.task
        names = task.names()

        def loss(now: Params, batch: Batch) -> Tensor:
            logits, text = adapter.logits_and_aligned(task, now, batch)
            term = (text - names).square().sum(-1).mean(-1)
            return adapter.loss(self.objective, logits, batch) + self.knowledge * term

        return by_autograd(loss)

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        return fit_with_term(self, model, params, data, self.gradients(model, message, own))
