"""FedLT, an ablation of FedOT: the private map W is any matrix, starting at I.  logits = scale · w_g (W h)/‖W h‖."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter, Task, initial_classifier
from fedvlm.core.state import Params, linear
from fedvlm.parts.adapters.rotation import MAP_DIAGNOSTICS, diagnose_map


@dataclass(frozen=True)
class Linear(Adapter):
    private: tuple[str, ...] = ("map",)
    init_from: Literal["text", "random"] = "text"  # initial classifier: embeddings of the class names, or random

    diagnostics: ClassVar[Mapping[str, str]] = MAP_DIAGNOSTICS
    linear_head: ClassVar[bool] = True

    def init(self, task: Task, seed: int) -> Params:
        return {"head": initial_classifier(task, self.init_from, seed), "map": torch.eye(task.dim)}

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return F.normalize(linear(x, params["map"]), dim=-1)

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * linear(self.features(task, params, x), params["head"])

    def diagnose(self, task: Task, params: Params, x: Tensor) -> Params:
        return diagnose_map(params["map"][:, None])
