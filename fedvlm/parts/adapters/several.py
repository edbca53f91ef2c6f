"""Shared code of adapters with several prompts per class."""

from __future__ import annotations

import torch
from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.seeds import key
from fedvlm.parts.adapters.prompt import Prompt


def draw_contexts(adapter: Prompt, task: Task, seed: int, count: int, first: int = 0) -> Tensor:
    """Initial contexts [count, 1 or classes, vectors, width], each from its own draw; number 0 is PromptFL's."""
    seeds = (key(seed, 59, i) if i else seed for i in range(first, first + count))
    return torch.stack([Prompt.init(adapter, task, s)["context"] for s in seeds])


def encode_contexts(adapter: Prompt, task: Task, contexts: Tensor) -> Tensor:
    """Class vectors [clients, prompts, classes, dim] of contexts [clients, prompts, 1 or classes, vectors, width]."""
    text = Prompt.class_vectors(adapter, task, {"context": contexts.flatten(0, 1)})
    return torch.unflatten(text, 0, contexts.shape[:2])


def mean_cosine(text: Tensor) -> Tensor:
    """The cosine of all pairs of a class's prompts, mean over pairs and classes, one number per client; 1 where there
    is one prompt."""
    count = text.shape[1]
    total = text.sum(1).square().sum(-1).mean(-1)  # ‖Σ t‖² = count + Σ over pairs
    return (total - count) / (count * (count - 1)) if count > 1 else torch.ones_like(total)
