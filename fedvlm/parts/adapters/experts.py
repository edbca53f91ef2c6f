"""pFedMoAP (Luo et al., ICLR 2025): a client's own prompt and those of other clients are experts that a private gate mixes.

With t_e the feature of class c by expert e, an image h gives the experts weights softmax_e((W_q h)·(W_k t_e)/√size), their
mixture is m = Σ weight · t_e, normalised, and logits = scale · (λ h·t_own + (1 − λ) h·m), λ = 0.5. Shared: `context`, the
client's own prompt, which is sent (local=experts, merge=experts: it goes to other clients, and is not replaced by the
mean). Private: `others`, the prompts of K = 9 other clients, and the gate, `query` and `key` [size, dim]. W_q starts at 0:
all experts count alike. A newcomer has the mean of all prompts as every expert. Under another local rule the others are
private prompts of the client's own.

Our reading: one head without maps of values and output; there eight heads, on features pooled to 128 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import PREPARED, TEXT_FEATURES, Limits, Task
from fedvlm.core.data import Batch
from fedvlm.core.ranges import Count, Share
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params, linear
from fedvlm.parts.adapters.prompt import Prompt
from fedvlm.parts.adapters.several import draw_contexts, encode_contexts

OTHERS = PREPARED + "others"  # the class features of the other clients' prompts, where they are already encoded


@dataclass(frozen=True)
class Experts(Prompt):
    private: tuple[str, ...] = ("others", "query", "key")
    experts: Count = 9  # K, prompts of other clients
    size: Count = 128  # width of the gate's queries and keys
    share: Share = 0.5  # λ, weight of the client's own prompt beside the mixture; 1: PromptFL

    limits: ClassVar[Limits] = Limits(examples=1 << 12, clients=2, gpu=True)

    def init(self, task: Task, seed: int) -> Params:
        contexts = draw_contexts(self, task, seed, 1 + self.experts)
        key = torch.randn(self.size, task.dim, generator=generator(seed, 109)).to(contexts.dtype)
        return {"context": contexts[0], "others": contexts[1:], "query": torch.zeros_like(key), "key": key}

    def shared_only(self, params: Params) -> Params:
        return params | {"others": params["context"][:, None].expand_as(params["others"])}

    def texts(self, task: Task, params: Params) -> Tensor:
        """The class features of all experts, the client's own first: [clients, 1 + K, classes, dim]."""
        own = super().class_vectors(task, params)[:, None]
        others = params[OTHERS] if OTHERS in params else encode_contexts(self, task, params["others"])
        clients = max(len(own), len(others))
        return torch.cat([own.expand(clients, -1, -1, -1), others.expand(clients, -1, -1, -1)], 1)

    def gate(self, params: Params, text: Tensor, x: Tensor) -> Tensor:
        """The experts' weights, [clients, examples, classes, 1 + K]."""
        keys = torch.einsum("kecd,ksd->kecs", text, params["key"])
        scores = torch.einsum("kns,kecs->knce", linear(x, params["query"]), keys)
        return (scores / float(self.size**0.5)).softmax(-1)

    def similarity(self, params: Params, text: Tensor, x: Tensor) -> Tensor:
        weight = self.gate(params, text, x)
        each = torch.einsum("knd,kecd->knce", x, text)
        gram = torch.einsum("kecd,kfcd->kcef", text, text)
        length = torch.einsum("knce,kcef,kncf->knc", weight, gram, weight).clamp(min=1e-12).sqrt()  # of the mixture
        return self.share * each[..., 0] + (1 - self.share) * (weight * each).sum(-1) / length

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        return F.normalize(self.texts(task, params).mean(1), dim=-1)

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        return params | {TEXT_FEATURES: self.texts(task, params)}

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        text = params[TEXT_FEATURES] if TEXT_FEATURES in params else self.texts(task, params)
        return task.scale * self.similarity(params, text, x)

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        text = self.texts(task, params)
        return task.scale * self.similarity(params, text, batch.x), F.normalize(text.mean(1), dim=-1)
