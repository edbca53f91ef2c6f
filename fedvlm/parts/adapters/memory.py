"""Tip-Adapter's cache (Zhang et al., ECCV 2022) beside a linear classifier; kNN-Per (Marfoq et al., ICML 2022).

logits = scale · W h + α · Σ_j exp(−β(1 − h·k_j)) y_j, with the client's own training embeddings k_j and their one-hot
classes y_j. The memory is private and empty at the start, so that a newcomer has the shared classifier alone. local=memory
fills it; under another rule keys and values are trained (Tip-Adapter-F).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedvlm.core.adapter import Adapter, Task, initial_classifier
from fedvlm.core.ranges import Count
from fedvlm.core.state import Params, linear

MEMORY = ("keys", "values", "amount", "sharpness")


@dataclass(frozen=True)
class Memory(Adapter):
    private: tuple[str, ...] = MEMORY
    init_from: Literal["text", "random"] = "text"  # initial classifier: embeddings of the class names, or random
    size: Count = 1024  # examples that a client keeps at most

    def init(self, task: Task, seed: int) -> Params:
        head = initial_classifier(task, self.init_from, seed)
        return {"head": head} | empty_memory(self.size, len(head), head)

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * linear(x, params["head"]) + recalled(params, x)


def recalled(params: Params, x: Tensor) -> Tensor:
    """What the memory adds to the logits, α · Σ_j exp(−β(1 − h·k_j)) y_j."""
    near = torch.exp(-params["sharpness"].view(-1, 1, 1) * (1 - linear(x, params["keys"])))
    return params["amount"].view(-1, 1, 1) * (near @ params["values"])


def empty_memory(size: int, classes: int, like: Tensor) -> Params:
    """The memory of a newcomer, in the dtype and with the last axis of `like`."""
    empty = {"keys": like.new_zeros(size, like.shape[-1]), "values": like.new_zeros(size, classes)}
    return empty | {"amount": like.new_ones(1), "sharpness": like.new_full((1,), 5.0)}
