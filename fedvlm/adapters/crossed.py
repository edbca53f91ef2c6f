"""pFedDC (Zhang et al., 2025: dual-prompt optimisation and cross fusion): a shared and a private prompt in both towers,
brought together by a small private attention between them.

Text: [start] p₁ … pₙ NAME . [end]; image: class token, patches and p₁ … pₘ. In each tower, with shared G and own L,

    p = (G + L)/2 + W_o · softmax((W_q L)(W_k G)ᵀ / √size) W_v G

logits = scale · cos. Shared: `context` [1, n, width], `tokens` [1, m, image width]. Private: `own.context`, `own.tokens`,
and the fusion of each, `fuse.{context,tokens}.{query,key,value}` [size, width], `….out` [width, size].

Our reading: of the paper we know the idea (global and local prompts in both modalities, integrated by a cross-fusion module)
and not its equations. That own asks and shared answers, the mean beside it, prompts at the first layer only, and the sizes
are ours; so is the start: own = shared and W_o = 0, so that a newcomer, who has nothing of its own, uses G alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import Task
from fedvlm.adapters.layered import Layered, towers_of
from fedvlm.adapters.maple import first_words
from fedvlm.adapters.prompt import plan
from fedvlm.core import FedvlmError, Params
from fedvlm.seeds import generator

PROMPTS = ("context", "tokens")
FUSION = ("query", "key", "value", "out")
OWN = tuple(f"own.{p}" for p in PROMPTS) + tuple(f"fuse.{p}.{part}" for p in PROMPTS for part in FUSION)


@dataclass(frozen=True)
class Crossed(Layered):
    private: tuple[str, ...] = OWN
    context: int = 4  # vectors before a class name
    tokens: int = 4  # beside the patches
    size: int = 32  # of the fusion
    phrase: str = "a photo of a"  # words to start from; none: noise

    pairs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if min(self.tokens, self.size) < 1:
            raise FedvlmError(f"tokens={self.tokens} and size={self.size} must be at least 1")

    def init(self, task: Task, seed: int) -> Params:
        reader, top = towers_of(task).text, towers_of(task).image.last(self.layers)
        draw = generator(seed, 71)
        context = 0.02 * torch.randn(self.context, reader.width, generator=draw)
        tokens = 0.02 * torch.randn(self.tokens, top.width, generator=draw)
        shared = {"context": first_words(reader, self.phrase, context)[None], "tokens": tokens[None]}
        params = shared | {f"own.{k}": v.clone() for k, v in shared.items()}
        for name, prompt in shared.items():
            width = prompt.shape[-1]
            for part in FUSION[:3]:
                params[f"fuse.{name}.{part}"] = torch.randn(self.size, width, generator=draw) / width**0.5
            params[f"fuse.{name}.out"] = torch.zeros(width, self.size)
        return params

    def public(self, params: Params) -> Params:
        """Both prompts are the shared one, and nothing is added to it."""
        alone = {f"own.{p}": params[p].expand_as(params[f"own.{p}"]) for p in PROMPTS}
        return params | alone | {k: torch.zeros_like(params[k]) for k in (f"fuse.{p}.out" for p in PROMPTS)}

    def fused(self, params: Params, prompt: str) -> Tensor:
        """[clients, 1, vectors, width]."""
        shared, own = params[prompt], params[f"own.{prompt}"]
        query, key, value, out = (params[f"fuse.{prompt}.{part}"][:, None] for part in FUSION)
        asked = (own @ query.mT) @ (shared @ key.mT).mT / self.size**0.5
        return (shared + own) / 2 + asked.softmax(-1) @ (shared @ value.mT) @ out.mT

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        tokens = self.fused(params, "tokens")
        top = towers_of(task, self.precision).image.last(self.layers)
        return F.normalize(top.features(x, tokens=tokens).to(tokens.dtype), dim=-1)

    def classes(self, task: Task, params: Params) -> Tensor:
        reader, context = towers_of(task, self.precision).text, self.fused(params, "context")
        return reader.features(plan(reader, task.classes, context.shape[2], "end"), context)
