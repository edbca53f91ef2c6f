"""LA-LoRA's client (Liu et al., ICLR 2026): LoRA's two factors in alternate local steps, with smoothed gradients.

Local step k changes B where k is odd and A where it is even, and the other factor is fixed, so that noise on one is not
multiplied by noise on the other:  B ← B − η S(∂L/∂B),  A ← A − η S(∂L/∂A).  S is a fixed low-pass filter,
[1, 4, 6, 4, 1]/16, over the outputs for B and over the inputs for A (smooth=false: the paper's ablation).

In the paper S follows the noise of differential privacy in every step. Here noise is added to a client's update
(dp=client), and dp=example is refused. At the edges the outermost value is repeated, which the paper does not say; the
filter's numbers are those of the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, optimise_in_turns
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.state import Message, Params
from fedvlm.parts.adapters.lora import trains_factors
from fedvlm.parts.local.means import Means, relative_to_plain

FILTER = (1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16)


@dataclass(frozen=True)
class Turns(Local):
    smooth: bool = True  # gradients are filtered; false: only the two factors in turn

    effects: ClassVar[Mapping[str, str]] = {
        "filtered": "how far the filter moved the gradients, relative to their length, mean over steps"
    }

    def incompatible(self, adapter: Adapter) -> str:
        return "" if trains_factors(adapter) else "trains two factors in turn; use adapter=lora"

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        means = Means(data)
        turns = []
        for fixed in (".A", ".B"):  # B is first: at the start it is 0, and A has no gradient
            held = {k: v for k, v in params.items() if k.endswith(fixed)}
            trained = {k: v for k, v in params.items() if k not in held}
            plain = model.gradients(self.objective, held=held)
            turns.append((trained, filtered(plain, means) if self.smooth else plain))
        return {"loss": optimise_in_turns(self, turns, data)} | means.found("filtered")


def filtered(gradients: Gradients, means: Means) -> Gradients:
    def smooth(now: Params, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        each, plain = gradients(now, batch)
        found = [low_pass(g, -1 if k.endswith(".A") else -2) for k, g in zip(now, plain, strict=True)]
        means.add(filtered=relative_to_plain(now, found, plain).to(each.dtype))
        return each, found

    return smooth


def low_pass(x: Tensor, dim: int) -> Tensor:
    """x [clients, …, …], smoothed along a dimension."""
    x = x.transpose(dim, -1)
    padded = F.pad(x, (2, 2), mode="replicate")
    length = x.shape[-1]
    parts = [weight * padded[..., k : k + length] for k, weight in enumerate(FILTER)]
    return torch.stack(parts).sum(0).transpose(dim, -1).contiguous()
