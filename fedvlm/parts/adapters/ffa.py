"""FFA-LoRA (Sun et al., ICLR 2024): LoRA with A frozen at its random start; only B is trained, sent and averaged.

W + scale · B A as in adapter=lora. With A the same for all, the mean of the clients' models is the model of the mean:
Σ aᵢ Bᵢ A = (Σ aᵢ Bᵢ) A. Half of LoRA's numbers travel, and noise on B alone is not multiplied by noise on A, which is why
the paper uses it with differential privacy. Parameters, all shared: `image.{i}.{projection}.B`, `text.{i}.{projection}.B`.

A is never sent: everybody draws it from the number `basis`. It is therefore the same for all seeds of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.ranges import Whole
from fedvlm.core.state import Params
from fedvlm.parts.adapters.lora import Lora, random_down


@dataclass(frozen=True)
class Ffa(Lora):
    basis: Whole = 0  # seed of the frozen A

    trains_factors: ClassVar[bool] = False

    def init(self, task: Task, seed: int) -> Params:
        return {k: v for k, v in super().init(task, seed).items() if k.endswith(".B")}

    def factors(self, task: Task, params: Params) -> Params:
        found: Params = {}
        for name, width, at in self.changed(task):
            up = params[f"{name}.B"]
            down = frozen_down(self.rank, width, self.basis, at, up.dtype, up.device)
            found |= {f"{name}.A": down[None], f"{name}.B": up}
        return found


@lru_cache(maxsize=512)
def frozen_down(
    rank: int, width: int, basis: int, at: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return random_down(rank, width, basis, at).to(dtype=dtype, device=device)
