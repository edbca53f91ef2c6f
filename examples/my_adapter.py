"""A shared classifier, and on each client a private shift of the embedding: logits = scale · W (h + strength · b)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.parts import Adapter, Params, Task, initial_classifier


@dataclass(frozen=True)
class Shift(Adapter):
    private: tuple[str, ...] = ("shift",)  # parameters that never leave a client
    strength: float = 1.0  # factor of the shift; 0 is a shared classifier alone

    def init(self, task: Task, seed: int) -> Params:
        """The parameters of one model."""
        return {"head": initial_classifier(task, "text", seed), "shift": torch.zeros(task.dim)}

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        """x is [clients, examples, dim], params["shift"] [clients, dim]."""
        return x + self.strength * params["shift"][:, None]

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * self.features(task, params, x) @ params["head"].mT
