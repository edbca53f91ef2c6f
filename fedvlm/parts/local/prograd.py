"""ProGrad (Zhu et al., ICCV 2023): a step never moves against what the frozen model knows.

With g the gradient of the loss and k that of KL(p_zero-shot ‖ p), the step is along g where g·k ≥ 0, and otherwise along
g − λ (g·k/‖k‖²) k, which is orthogonal to k at λ = 1 (the paper's). g·k is over all trained parameters of a client; p and
p_zero-shot are softmaxes of the logits of the whole image, at temperature 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, by_autograd, optimise
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative
from fedvlm.core.state import Message, Params
from fedvlm.parts.local.means import Means, relative_to_plain
from fedvlm.parts.local.term import has_prompts


@dataclass(frozen=True)
class ProGrad(Local):
    projection: NotNegative = 1.0  # λ, how much of the conflicting part of a gradient is removed; 0: none, 1: all

    effects: ClassVar[Mapping[str, str]] = {
        "conflicts": "share of a client's steps whose gradient pointed against the frozen model's knowledge",
        "removed": "length of what was removed from a gradient, divided by the gradient's, mean over the steps",
    }

    def incompatible(self, adapter: Adapter) -> str:
        return "" if has_prompts(adapter) else "compares prompts with the frozen model's; use adapter=prompt"

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        return self.projected(model, None)

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        means = Means(data)
        loss = optimise(self, params, data, self.projected(model, means))
        return {"loss": loss, **means.found(*self.effects)}

    def projected(self, model: Model, means: Means | None) -> Gradients:
        plain = model.gradients(self.objective)
        general = by_autograd(lambda now, batch: zero_shot_divergence(model, now, batch))

        def gradients(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
            each, found = plain(now, batch)
            known = general(now, batch)[1]
            product, length = inner(found, known), inner(known, known)
            share = self.projection * product.clamp(max=0) / length.clamp(min=torch.finfo(length.dtype).tiny)
            kept = [f - share.view(-1, *[1] * (f.dim() - 1)) * k for f, k in zip(found, known, strict=True)]
            if means is not None:
                means.add(conflicts=(product < 0).to(each.dtype), removed=relative_to_plain(now, kept, found))
            return each, kept

        return gradients


def zero_shot_divergence(model: Model, now: Params, batch: Batch) -> Tensor:
    """KL(p_zero-shot ‖ p), one number per client."""
    features = model.adapter.features(model.task, now, batch.x)
    frozen = (model.task.scale * features.detach() @ model.task.names().to(features).mT).log_softmax(-1)
    learned = model.logits(now, batch.x).log_softmax(-1)
    return batch.mean((frozen.exp() * (frozen - learned)).sum(-1))


def inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """The inner product of two gradients, one number per client."""
    return torch.stack([(x * y).flatten(1).sum(1) for x, y in zip(a, b, strict=True)]).sum(0)
