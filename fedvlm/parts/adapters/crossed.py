"""pFedDC (Zhang et al., 2025): a shared and a private prompt in both towers, fused by a small private cross-attention.

(Dual-prompt optimisation and cross fusion.) Text: [start] p₁ … pₙ NAME . [end]; image: class token, patches and
p₁ … pₘ. In each tower, with the shared prompt G and the private prompt L,

    p = (G + L)/2 + W_o · softmax((W_q L)(W_k G)ᵀ / √size) W_v G

logits = scale · cos. Shared: `context` [1, n, width], `tokens` [1, m, image width]. Private: `own.context`,
`own.tokens`, and the fusion of each, `fuse.{context,tokens}.{query,key,value}` [size, width], `….out` [width, size].

Our reading: of the paper we know the idea (global and local prompts in both modalities, integrated by a cross-fusion
module) and not its equations. These choices are ours: L gives the queries, G the keys and values; the mean of both is
added; prompts enter at the first layer only; the sizes; and the start L = G, W_o = 0, so that a newcomer, who has no
private parameters, uses G alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.ranges import Count
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params
from fedvlm.parts.adapters.layered import Layered, towers_of
from fedvlm.parts.adapters.maple import initial_context
from fedvlm.parts.adapters.prompt import prompt_plan

PROMPTS = ("context", "tokens")
FUSION = ("query", "key", "value", "out")
PRIVATE = tuple(f"own.{p}" for p in PROMPTS) + tuple(f"fuse.{p}.{part}" for p in PROMPTS for part in FUSION)


@dataclass(frozen=True)
class Crossed(Layered):
    private: tuple[str, ...] = PRIVATE
    context: Count = 4  # n, learned vectors before a class name
    tokens: Count = 4  # m, learned tokens beside the image's patches
    size: Count = 32  # width of the fusion's queries, keys and values
    phrase: str = "a photo of a"  # words that the context starts from; "": noise

    def init(self, task: Task, seed: int) -> Params:
        text_tower, image_layers = towers_of(task).text, towers_of(task).image.last(self.layers)
        rng = generator(seed, 71)
        context = 0.02 * torch.randn(self.context, text_tower.width, generator=rng)
        tokens = 0.02 * torch.randn(self.tokens, image_layers.width, generator=rng)
        shared = {"context": initial_context(text_tower, self.phrase, context)[None], "tokens": tokens[None]}
        params = shared | {f"own.{k}": v.clone() for k, v in shared.items()}
        for name, prompt in shared.items():
            width = prompt.shape[-1]
            for part in FUSION[:3]:
                params[f"fuse.{name}.{part}"] = torch.randn(self.size, width, generator=rng) / width**0.5
            params[f"fuse.{name}.out"] = torch.zeros(width, self.size)
        return params

    def shared_only(self, params: Params) -> Params:
        """Both prompts are the shared one, and the fusion adds nothing."""
        own = {f"own.{p}": params[p].expand_as(params[f"own.{p}"]) for p in PROMPTS}
        return params | own | {k: torch.zeros_like(params[k]) for k in (f"fuse.{p}.out" for p in PROMPTS)}

    def fused(self, params: Params, prompt: str) -> Tensor:
        """p of one tower, [clients, 1, vectors, width]."""
        shared, own = params[prompt], params[f"own.{prompt}"]
        query, key, value, out = (params[f"fuse.{prompt}.{part}"][:, None] for part in FUSION)
        scores = (own @ query.mT) @ (shared @ key.mT).mT / float(self.size**0.5)
        return (shared + own) / 2 + scores.softmax(-1) @ (shared @ value.mT) @ out.mT

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor:
        tokens = self.fused(params, "tokens")
        image_layers = towers_of(task, self.precision).image.last(self.layers)
        return image_layers.features(x, tokens=tokens).to(tokens.dtype)

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        text_tower, context = towers_of(task, self.precision).text, self.fused(params, "context")
        return text_tower.features(prompt_plan(text_tower, task.classes, context.shape[2], "end"), context)
