"""FedTPG (Qiu et al., ICLR 2024): a shared network generates the context from the class names.

context = W₂ relu(W₁ norm(a) + b₁) + b₂ with a = attention(Q, T W_k, T W_v) in `heads` heads, Q the learned queries, one for
each of the n = 4 context vectors, and T the frozen model's embeddings of the class names. All classes have the same context;
another set of classes, also of names that nobody trained on, has another. Everything is shared.

Our reading: T has all classes of the task (in the paper each client has classes of its own, and T these); norm is a layer
norm without parameters, the hidden layer as wide as the context; W₂ starts so small that the context does as in PromptFL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Task
from fedvlm.core.ranges import Count
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params, linear
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.prompt import Prompt, text_tower


@dataclass(frozen=True)
class Generated(Prompt):
    context: Count = 4  # n, generated vectors before a class name
    heads: Count = 4  # of the attention over class names; must divide the width of the text tower

    diagnostics: ClassVar[Mapping[str, str]] = {
        "selectivity": "how much the attention prefers some class names; 0: uniform, 1: a single name"
    }

    def __post_init__(self) -> None:
        if self.specific or self.phrase:
            raise FedvlmError("adapter=generated computes one context for all classes; leave specific= and phrase= out")

    def init(self, task: Task, seed: int) -> Params:
        width, rng = text_tower(task).width, generator(seed, 89)
        if width % self.heads:
            raise FedvlmError(
                f"heads={self.heads} does not divide the text tower's width of {width}; use heads=1, 2 or 4"
            )

        def normal(*shape: int, scale: float) -> Tensor:
            return (scale * torch.randn(*shape, generator=rng)).to(torch.get_default_dtype())

        return {
            "query": normal(self.context, width, scale=1.0),
            "key": normal(width, task.dim, scale=1.0),  # of unit vectors, so that keys have a variance of 1
            "value": normal(width, task.dim, scale=1.0),
            "hidden.weight": normal(width, width, scale=width**-0.5),
            "hidden.bias": torch.zeros(width),
            "out.weight": normal(width, width, scale=0.02 * (2 / width) ** 0.5),  # relu halves the second moment
            "out.bias": torch.zeros(width),
        }

    def attention(self, task: Task, params: Params) -> tuple[Tensor, Tensor]:
        """Weights [clients, heads, n, classes] and what is read with them, [clients, n, width]."""
        names = task.names().to(params["key"])
        query, key, value = (
            v.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for v in (params["query"], names @ params["key"].mT, names @ params["value"].mT)
        )
        weight = (query @ key.mT / float(query.shape[-1] ** 0.5)).softmax(-1)
        return weight, (weight @ value).transpose(1, 2).flatten(2)

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        _, read = self.attention(task, params)
        inner = F.layer_norm(read, read.shape[-1:])
        inner = torch.relu(linear(inner, params["hidden.weight"], params["hidden.bias"]))
        context = linear(inner, params["out.weight"], params["out.bias"])[:, None]
        return super().class_vectors(task, {"context": context})

    def diagnose(self, task: Task, params: Params, x: Tensor) -> Params:
        weight, _ = self.attention(task, params)
        entropy = -torch.xlogy(weight, weight).sum(-1).mean((-2, -1))
        return {"selectivity": 1 - entropy / torch.tensor(float(max(2, weight.shape[-1]))).log().to(entropy)}
