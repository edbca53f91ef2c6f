"""The frozen text tower of a CLIP as a function of learned context vectors (prompt learning: CoOp, PromptFL, FOCoOp).

A prompt is [start] v₁ … vₙ NAME . [end] with v learned; its feature is the tower's state at [end], projected and
normalised. The tower is causal (a token sees itself and what stands before it) and only the state at [end] is read,
so all of this is left out and nothing changes but rounding:

- what stands after [end]: nothing that is read can see it (and so the little padding there is needs no mask);
- repeated prefixes: [start] v₁ … vₙ is the same before every class where classes share a context, so it runs once a
  client, and the classes' own tokens look back at the keys and values it left in each layer. Where every class has a
  context of its own, only [start] is common, and constant;
- the last layer, but for one query a prompt: the other states of that layer are never read;
- nearly all padding: classes run in groups of about equal length;
- gradients of constants: the weights, and what words alone enter the first layer with, which is once for all clients.

Clients lie side by side along the first axis; a client's result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core import FedvlmError

Affine = tuple[Tensor, Tensor]  # weight, bias
CHUNK = 2048  # prompts at a time: 0.4 GB in the widest layer of ViT-B/16's tower for 25 tokens each
SWITCH = {"cpu": 32, "cuda": 2048}  # tokens of padding that cost about what one more group does (measured)


class Layer(NamedTuple):
    norm1: Affine
    qkv: Affine
    out: Affine
    norm2: Affine
    fc1: Affine
    fc2: Affine


class Plan(NamedTuple):
    """Prompts yet without their context vectors."""

    ids: Tensor  # [classes, longest]: token ids; −1−j keeps the place of context vector j
    ends: tuple[int, ...]  # where each prompt's end-of-text stands
    context: int  # context vectors in a prompt
    shared: int  # leading places that are the same for all classes where they share a context


@dataclass(frozen=True, eq=False)
class TextTower:
    token: Tensor  # [vocabulary, width]
    position: Tensor  # [positions, width]
    layers: tuple[Layer, ...]
    norm: Affine
    projection: Tensor  # [dim, width]
    heads: int
    eps: float
    activation: Callable[[Tensor], Tensor]
    tokenizer: Any

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> TextTower:
        """From a Hugging Face CLIPModel, sharing its weights (but for the fused query, key and value)."""
        text = model.text_model

        def plain(*modules: Any) -> Affine:
            weight, bias = ([getattr(m, part).detach() for m in modules] for part in ("weight", "bias"))
            return (torch.cat(weight), torch.cat(bias)) if len(modules) > 1 else (weight[0], bias[0])

        layers = tuple(
            Layer(
                plain(block.layer_norm1),
                plain(block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj),
                plain(block.self_attn.out_proj),
                plain(block.layer_norm2),
                plain(block.mlp.fc1),
                plain(block.mlp.fc2),
            )
            for block in text.encoder.layers
        )
        return cls(
            text.embeddings.token_embedding.weight.detach(),
            text.embeddings.position_embedding.weight.detach(),
            layers,
            plain(text.final_layer_norm),
            model.text_projection.weight.detach(),
            text.config.num_attention_heads,
            text.config.layer_norm_eps,
            text.encoder.layers[0].mlp.activation_fn,  # no weights of its own
            tokenizer,
        )

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> TextTower:
        def pair(affine: Affine) -> Affine:
            return move(affine[0]), move(affine[1])

        def move(weight: Tensor) -> Tensor:
            return weight.to(dtype=dtype or weight.dtype, device=device)

        return replace(
            self,
            token=move(self.token),
            position=move(self.position),
            layers=tuple(Layer(*map(pair, layer)) for layer in self.layers),
            norm=pair(self.norm),
            projection=move(self.projection),
        )

    def phrase(self, text: str) -> Tensor:
        """Context vectors to start from, [tokens, width]: the embeddings of, say, "a photo of a"."""
        return self.token[self._tokens([text])[0]]

    def plan(self, names: Sequence[str], context: int, position: str = "end", ending: str = ".") -> Plan:
        """The prompts of these classes: [start] context NAME ending [end], or, with position="middle", the name
        between the two halves of the context. A name too long for the tower loses its last tokens."""
        if position not in ("end", "middle"):
            raise FedvlmError(f"position={position}: a class name stands at the end or in the middle of its context")
        before = context if position == "end" else context // 2
        slots = [-1 - j for j in range(context)]
        start, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        prompts = []
        for alone, whole in zip(self._tokens(names), self._tokens([name + ending for name in names]), strict=True):
            # read together, as in a plain prompt: a name's own full stop and the ending may be one token
            pairs = enumerate(zip(alone, whole, strict=False))
            split = next((at for at, (one, other) in pairs if one != other), len(alone))
            tail = [*whole[split:], end]
            room = len(self.position) - 1 - context - len(tail)
            if context < 1 or room < 1:
                raise FedvlmError(
                    f"context={context}: the text tower reads {len(self.position)} tokens, and the start, one token of "
                    f"the name, {ending!r} and the end are among them; use context=1 to {context + room - 1}"
                )
            prompts.append([start, *slots[:before], *whole[:split][:room], *slots[before:], *tail])
        ends = tuple(len(prompt) - 1 for prompt in prompts)
        ids = torch.tensor([prompt + [end] * (max(ends) + 1 - len(prompt)) for prompt in prompts])
        return Plan(ids, ends, context, 1 + before)

    def features(self, plan: Plan, context: Tensor, chunk: int = CHUNK) -> Tensor:
        """Normalised text features [clients, classes, dim] of context [clients, 1 or classes, vectors, width], in the
        context's dtype. At most `chunk` prompts (clients × classes) are worked on at a time; training keeps what the
        backward pass needs of them all (ViT-B/16, a thousand prompts: 3 GB with a shared context, 8 GB without)."""
        clients, kinds, vectors, _ = context.shape
        if vectors != plan.context or kinds not in (1, len(plan.ends)):
            raise ValueError(f"context {tuple(context.shape)} for {len(plan.ends)} prompts of {plan.context} vectors")
        learned = context.to(self.token)
        shared = plan.shared if kinds == 1 else 1
        past = self._prefix(self._embed(plan.ids[:1, :shared], 0, learned)) if shared > 1 else self._start
        groups = _groups(plan.ends, clients, chunk, SWITCH.get(self.token.device.type, SWITCH["cuda"]))
        states = []
        for group in groups:
            ends = torch.tensor([plan.ends[c] for c in group])
            ids = plan.ids[group, shared : int(ends.max()) + 1]
            own = self._embed(ids, shared, learned if kinds == 1 else learned[:, group])
            states.append(self._run(own, past, ends - shared)[1])
        back = torch.tensor([c for group in groups for c in group]).argsort()
        pooled = torch.cat(states, 1)[:, back.to(learned.device)]
        projected = F.linear(self._norm(pooled, self.norm), self.projection)
        return F.normalize(projected.to(context), dim=-1)

    @cached_property
    def _start(self) -> list[Tensor]:
        """What [start] leaves behind in each layer: a constant."""
        return self._prefix((self.token[self.tokenizer.bos_token_id] + self.position[0])[None, None, None])

    def _prefix(self, x: Tensor) -> list[Tensor]:
        nothing = x.new_empty(1, 1, 2, self.heads, 0, x.shape[-1] // self.heads)
        return self._run(x, [nothing] * len(self.layers), torch.tensor([x.shape[2] - 1]))[0]

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def _norm(self, x: Tensor, affine: Affine) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *affine, self.eps)  # statistics in float32 at least, whatever x is

    def _embed(self, ids: Tensor, start: int, context: Tensor) -> Tensor:
        """What enters the first layer from place `start` on, [clients, classes, places, width]. Where no context
        vector is among it, it is the same for all clients and stands there once."""
        device, slots = context.device, -1 - ids
        places = self.position[start : start + ids.shape[1]]
        words = self.token[ids.clamp(min=0).to(device)]
        if bool((slots < 0).all()):
            return (words + places)[None]
        at = slots.clamp(min=0) + context.shape[2] * torch.arange(context.shape[1])[:, None]
        learned = context.flatten(1, 2).index_select(1, at.flatten().to(device)).unflatten(1, ids.shape)
        return torch.where((slots >= 0)[..., None].to(device), learned, words) + places

    def _run(self, x: Tensor, past: list[Tensor], ends: Tensor) -> tuple[list[Tensor], Tensor]:
        """x [clients, classes, places, width] through all layers, seeing `past`: by layer, the keys and values of what
        stands before it. Returns x's own keys and values, and the last layer's state at `ends` alone."""
        width, places, before = x.shape[-1], x.shape[2], past[0].shape[-2]
        seen = torch.ones(places, before + places, dtype=torch.bool).tril(before)
        everywhere, kept = seen.to(x.device), []
        for layer, old in zip(self.layers[:-1], past, strict=False):
            query, both = F.linear(self._norm(x, layer.norm1), *layer.qkv).split([width, 2 * width], -1)
            kept.append(self._split(both, 2))
            x = self._block(layer, x, query, old, kept[-1], everywhere)
        layer = self.layers[-1]
        (weight, bias), normed = layer.qkv, self._norm(x, layer.norm1)
        kept.append(self._split(F.linear(normed, weight[width:], bias[width:]), 2))
        at, to = torch.arange(len(ends), device=x.device), ends.to(x.device)
        query = F.linear(normed[:, at, to][:, :, None], weight[:width], bias[:width])
        only = seen[ends].to(x.device)[:, None, None].repeat(max(len(x), len(past[-1])), 1, 1, 1)
        return kept, self._block(layer, x[:, at, to][:, :, None], query, past[-1], kept[-1], only)[:, :, 0]

    def _split(self, x: Tensor, parts: int) -> Tensor:
        """[clients, classes, places, parts × width] as [clients, classes, parts, heads, places, size of a head]."""
        return x.unflatten(-1, (parts, self.heads, -1)).permute(0, 1, 3, 4, 2, 5)

    def _block(self, layer: Layer, x: Tensor, query: Tensor, old: Tensor, new: Tensor, seen: Tensor) -> Tensor:
        rows = (max(len(old), len(new)), new.shape[1])  # what all clients (or classes) have in common stands once
        both = torch.cat([part.expand(*rows, *part.shape[2:]) for part in (old, new)], -2).flatten(0, 1)
        asked = self._split(query, 1)[:, :, 0].expand(*rows, -1, -1, -1).flatten(0, 1)
        mixed = F.scaled_dot_product_attention(asked, both[:, 0], both[:, 1], attn_mask=seen)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2).unflatten(0, rows), *layer.out)
        return x + F.linear(self.activation(F.linear(self._norm(x, layer.norm2), *layer.fc1)), *layer.fc2)


def _groups(ends: Sequence[int], clients: int, chunk: int, switch: int) -> list[list[int]]:
    """Classes by length, longest first; those of one length join longer ones where padding costs less than a group
    of their own would."""
    groups: list[list[int]] = []
    for end in sorted(set(ends), reverse=True):
        same = [c for c, other in enumerate(ends) if other == end]
        if groups and clients * len(same) * (ends[groups[-1][0]] - end) <= switch:
            groups[-1] += same
        else:
            groups.append(same)
    size = max(1, chunk // clients)
    return [group[at : at + size] for group in groups for at in range(0, len(group), size)]
