"""FedGH (Yi et al., 2023): the server trains the classifier on the clients' class means.

A client sends, for each of its classes, the mean of its training images' embeddings as the model sees them (a
prototype), trains the classifier it was sent on its own images, and keeps the result as its personal model (keep=true).
The server goes on training the global classifier on all prototypes by cross-entropy, one step for each client in the
order of their numbers, and sends it:

    w ← w − server_lr · ∇ mean_c cross-entropy(scale · w p_kc, c)   for every client k, c its classes

Prototypes are normalised, as embeddings are. The paper's clients also have their own extractors; here all have the
frozen backbone, as in FedOT's FedGH(C). Trained classifiers go up like all shared parameters in fedvlm and are not used,
so that a round counts twice the paper's bytes up.

**Clients send class means of embeddings of private images**; a class with one image is that image's embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data
from fedvlm.core.merge import Merge
from fedvlm.core.model import Model
from fedvlm.core.ranges import Count, Positive
from fedvlm.core.schema import Field, Fields
from fedvlm.core.state import Params, State
from fedvlm.parts.merge.stages import training_blocks

HEAD = "head"


@dataclass(frozen=True)
class Prototypes(Merge):
    server_lr: Positive = 0.01  # learning rate of the server's classifier
    server_epochs: Count = 1  # passes over the prototypes per round

    requires_parameters: ClassVar[tuple[str, ...]] = (HEAD,)
    reveals: ClassVar[str] = "class means of embeddings of private images"

    def incompatible(self, adapter: Adapter) -> str:
        if adapter.view == "embedding" and not adapter.requires:
            return ""
        return "trains a linear classifier on class means of embeddings; use adapter=head"

    def uploads(self, task: Task) -> Fields:
        shape = (len(task.classes), task.dim)
        return {"prototypes": Field(shape, low=-1.001, high=1.001)}

    @torch.no_grad()
    def client_values(self, model: Model, params: Params, data: Data) -> tuple[Params, dict[str, Tensor]]:
        """Means by class, 0 where a client has no such image."""
        found = torch.zeros(len(data), len(model.task.classes), model.task.dim, dtype=data.dtype)
        clients = [i for i, n in enumerate(data.counts("train")) if n]
        block = int(max(data.counts("train"), default=1)) or 1  # one block for each client that has examples
        for i, (one, x, y) in zip(clients, training_blocks(params, data, block), strict=True):
            z = model.adapter.features(model.task, one, x)[0].to(found)
            total = torch.zeros_like(found[i]).index_add_(0, y.cpu(), z)
            found[i] = total / torch.bincount(y.cpu(), minlength=len(total)).clamp(min=1)[:, None]
        return {"prototypes": found}, {}

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        replies = self.gather(state, cohort)
        order = torch.argsort(torch.from_numpy(replies.ids))  # the result must not depend on the order of replies
        head = self.trained(state.shared[HEAD], replies.values["prototypes"][order], model.task.scale)
        others = replies.sum(replies.uniform())
        return self.finish(
            state, cohort, replies, others | {HEAD: head}, replies.uniform(), float(replies.values["loss"].mean())
        )

    def trained(self, head: Tensor, prototypes: Tensor, scale: float) -> Tensor:
        """The classifier after a pass over the clients' prototypes [clients, classes, dim]; the gradient is
        Σ_c (softmax − one-hot) pᵀ · scale / classes."""
        head = head.clone()
        for _ in range(self.server_epochs):
            for own in prototypes:
                known = torch.nonzero(own.abs().sum(-1)).flatten()
                if len(known):
                    p = F.normalize(own[known], dim=-1).to(head)
                    residual = (scale * p @ head.T).softmax(-1) - F.one_hot(known, len(head)).to(head)
                    head -= self.server_lr * scale * residual.T @ p / len(known)
        return head
