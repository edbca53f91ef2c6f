"""CLIP-Adapter (Gao et al., 2021), the adapter as FFT-GP §3.4 describes FedCLIP's: a residual module of two linear layers.

logits = scale · cos((1 − α) h + α relu(W₂ relu(W₁ h)), class name), with h the embedding before normalisation, W₁
[d / reduction, d] and α = 0.2. All parameters are shared. FedCLIP's own paper and code have a mask instead
(adapters/attention.py). Rules that align features compare the sum before it is normalised.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.data import Batch
from fedvlm.core.ranges import Count, Share
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params


@dataclass(frozen=True)
class ClipAdapter(Adapter):
    reduction: Count = 4  # the hidden layer has the width of the embedding over this
    ratio: Share = 0.2  # α, weight of the module beside the embedding itself; 0: the frozen model

    view: ClassVar[str] = "raw"
    open_vocabulary: ClassVar[bool] = True
    diagnostics: ClassVar[Mapping[str, str]] = {"turned": "mean cosine between adapted and frozen embeddings"}

    def init(self, task: Task, seed: int) -> Params:
        task.names()
        rng, d = generator(seed, 2), task.dim
        shapes = {"w1": (max(1, d // self.reduction), d), "w2": (d, max(1, d // self.reduction))}
        return {k: (torch.rand(s, generator=rng) * 2 - 1) * s[1] ** -0.5 for k, s in shapes.items()}

    def adapted(self, params: Params, x: Tensor) -> Tensor:
        module = torch.relu(torch.relu(x @ params["w1"].mT) @ params["w2"].mT)
        return (1 - self.ratio) * x + self.ratio * module

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return F.normalize(self.adapted(params, x), dim=-1)

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * self.features(task, params, x) @ task.names().mT

    def diagnose(self, task: Task, params: Params, x: Tensor) -> Params:
        return {"turned": (self.features(task, params, x) * F.normalize(x, dim=-1)).sum(-1).mean(-1)}

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        adapted = self.adapted(params, batch.x)
        return task.scale * F.normalize(adapted, dim=-1) @ task.names().mT, adapted
