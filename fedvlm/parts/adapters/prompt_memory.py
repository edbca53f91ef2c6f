"""pFedPrompt (Guo et al., WWW 2023): a shared context, and on each client a private memory of its own images beside it.

What clients agree on is learned in text space, as in PromptFL; what is particular to one is added in image space without
parameters: logits = scale · cos(h, text(context)) + α · Σ_j exp(−β(1 − h·k_j)) y_j, the client's own training embeddings k_j
as keys and their one-hot classes y_j as values (parts/adapters/memory.py). local=memory trains the context without the
memory, fills the memory and chooses α and β on validation; a newcomer has the shared context alone.

Our reading of the paper's local personalised attention, of which we know the idea (non-parametric, keys and values) and not
the equations; the form is Tip-Adapter's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.data import Batch
from fedvlm.core.ranges import Count
from fedvlm.core.state import Params
from fedvlm.parts.adapters.memory import MEMORY, empty_memory, recalled
from fedvlm.parts.adapters.prompt import Prompt


@dataclass(frozen=True)
class PromptMemory(Prompt):
    private: tuple[str, ...] = MEMORY
    size: Count = 1024  # examples that a client keeps at most

    open_vocabulary: ClassVar[bool] = False  # the memory knows the classes of training only

    def init(self, task: Task, seed: int) -> Params:
        context = super().init(task, seed)["context"]
        return {"context": context} | empty_memory(self.size, len(task.classes), context.new_empty(task.dim))

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return super().logits(task, params, x) + recalled(params, x)

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        logits, text = super().logits_and_aligned(task, params, batch)
        return logits + recalled(params, batch.x), text
