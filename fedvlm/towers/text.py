"""The frozen text tower of a CLIP as a function of learned context vectors (prompt learning: CoOp, PromptFL, FOCoOp).

A prompt is [start] v₁ … vₙ NAME . [end] with v learned; its feature is the tower's state at [end], projected and
normalised. The tower is causal (a token attends to itself and to those before it) and only the state at [end] is read,
so the following is not computed, which changes results by rounding only:

- positions after [end]: nothing that is read attends to them (so the remaining padding needs no mask);
- repeated prefixes: where classes share a context, [start] v₁ … vₙ is the same for every class. It runs once per
  client, and the classes' own tokens attend to its stored keys and values. Where every class has its own context, only
  [start] is common, and it is a constant;
- the last layer, except for one query per prompt: its other outputs are never read;
- most padding: classes run in groups of similar length;
- gradients of constants: the weights, and the embeddings of words, which are computed once for all clients.

Clients are stacked along the first axis; a client's result does not depend on the others.

SigLIP's tower is not causal: a prompt is v₁ … vₙ NAME [end] [pad] …, padded to the tower's length, every position attends
to every other, and the state at the last position is read. There only the last layer's other queries can be left out.

Plain phrases have no context. Where only the last n layers are trained (low-rank changes, adapters), the layers below
give a constant, to be computed once:

    plan = tower.phrases(["a photo of a cat", …])
    hidden = tower.below(plan, n)                    the input of the last n layers; keep it
    text = tower.above(hidden, plan, lora, scale)    [clients, classes, dim], normalised
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.state import Params
from fedvlm.errors import FedvlmError
from fedvlm.towers.layers import (
    Affine,
    Beside,
    Change,
    Kernels,
    TowerLayer,
    add_and_norm,
    affine_of,
    affine_to,
    attend,
    fast_activation,
    kernels,
    layer_count,
    layers_of,
    low_rank_changes,
    moved,
    project,
    split_heads,
    to_device,
)
from fedvlm.towers.modules import TextWithProjection, TwoTowers
from fedvlm.towers.products import plain_linear

# positions that run at a time, by device: with ViT-B/16's tower 0.25 GB on a CPU and, in bfloat16, 1 GB on a GPU
CHUNK = {"cpu": 1 << 15, "cuda": 1 << 18}
# positions of padding that take about as long as one more group does (measured), by device
GROUP_COST = {"cpu": 32, "cuda": 1 << 14}


class Tokenizer(Protocol):
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int

    def words(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text alone."""
        ...

    def phrases(self, texts: Sequence[str], longest: int) -> list[list[int]]:
        """The tokens of each text with those at the start and the end that the tower knows, and at most so many."""
        ...


def padded(prompts: Sequence[Sequence[int]], token: int, length: int = 0) -> Tensor:
    """The prompts in one tensor, filled up with this token to the longest of them or to `length`."""
    length = max(length, *map(len, prompts))
    return torch.tensor([[*prompt, *[token] * (length - len(prompt))] for prompt in prompts])


class PromptPlan(NamedTuple):
    """Tokenised prompts with places for the context vectors."""

    ids: Tensor  # [classes, longest]: token ids; −1−j is the place of context vector j
    ends: tuple[int, ...]  # the position of each prompt's end-of-text token
    context: int  # context vectors per prompt
    shared: int  # leading positions that are the same for all classes where these share a context


class LowerActivations(NamedTuple):
    """The output of the frozen lower layers, for phrases without a learned context."""

    prefix: Tensor  # [1, 1, shared positions, width]
    own: Tensor  # [1, classes, the other positions, width]
    layers: int  # how many layers remain to be run


class Changes(NamedTuple):
    """The trained changes of the layers that run; see `layers.py`. Layers are counted from the lowest that runs."""

    low_rank: Sequence[Change] = ()  # by layer; empty: none
    beside: Beside | None = None
    deep: Tensor | None = None  # [clients, depth, vectors, width]: they replace the context at layers 1 … depth
    start: int = 1  # positions before the context

    def __bool__(self) -> bool:
        return any(self.low_rank) or self.beside is not None or self.deep is not None

    @property
    def clients(self) -> int:
        found = [len(part) for change in self.low_rank for pair in change.values() for part in pair]
        return max([1, *found, *([] if self.deep is None else [len(self.deep)])])

    def low_rank_at(self, layer: int) -> Change:
        return self.low_rank[layer] if self.low_rank else {}

    def layer_input(self, layer: int, x: Tensor) -> Tensor:
        if self.deep is None or not 1 <= layer <= self.deep.shape[1]:
            return x
        new = self.deep[:, layer - 1, None].to(x)
        clients, after = max(len(x), len(new)), self.start + new.shape[2]
        parts = (x[:, :, : self.start], new, x[:, :, after:])
        return torch.cat([part.expand(clients, x.shape[1], -1, -1) for part in parts], 2)

    def layer_output(self, layer: int, x: Tensor, normed: Tensor) -> Tensor:
        return x if self.beside is None else x + self.beside(layer, normed)


UNCHANGED = Changes()


@dataclass(frozen=True, eq=False)
class TextTower:
    token: Tensor  # embeddings [vocabulary, width]
    position: Tensor  # embeddings [positions, width]
    layers: tuple[TowerLayer, ...]
    norm: Affine  # after the last layer
    projection: Tensor  # [dim, width]
    heads: int
    eps: float
    activation: Callable[[Tensor], Tensor]
    tokenizer: Tokenizer
    bias: Tensor | None = None  # of the projection, [dim]
    causal: bool = True  # false: SigLIP's

    @classmethod
    def of(cls, model: TwoTowers | TextWithProjection, tokenizer: Tokenizer) -> TextTower:
        """The text tower of a CLIP or a SigLIP. Weights are shared with it where `layers_of` shares them."""
        text = model.text_model
        projection = model.text_projection if text.head is None else text.head
        return cls(
            text.embeddings.token_embedding.weight.detach(),
            text.embeddings.position_embedding.weight.detach(),
            layers_of(text.encoder, text.config),
            affine_of(text.final_layer_norm),
            projection.weight.detach(),
            text.config.num_attention_heads,
            text.config.layer_norm_eps,
            fast_activation(text.config.hidden_act)[0],
            tokenizer,
            None if text.head is None else text.head.bias.detach(),
            text.head is None,
        )

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> TextTower:
        return replace(
            self,
            token=moved(self.token, dtype, device),
            position=moved(self.position, dtype, device),
            layers=tuple(layer.to(dtype, device) for layer in self.layers),
            norm=affine_to(self.norm, dtype, device),
            projection=moved(self.projection, dtype, device),
            bias=None if self.bias is None else moved(self.bias, dtype, device),
        )

    @property
    def width(self) -> int:
        return int(self.token.shape[1])

    def last(self, layers: int) -> tuple[TowerLayer, ...]:
        """The last `layers` layers; 0: all."""
        return self.layers[-layer_count(layers, len(self.layers), "text") :]

    def phrase(self, text: str) -> Tensor:
        """Initial context vectors [tokens, width]: the token embeddings of a text such as "a photo of a"."""
        return self.token[self.tokenizer.words([text])[0]]

    def plan(self, names: Sequence[str], context: int, position: str = "end", ending: str = ".") -> PromptPlan:
        """The prompts of these classes: [start] context NAME ending [end] or, with position="middle", the name
        between the two halves of the context. A name too long for the tower loses its last tokens."""
        if position not in ("end", "middle"):
            raise FedvlmError(f"position={position}: must be end or middle, the place of a class name in its context")
        before = context if position == "end" else context // 2
        slots = [-1 - j for j in range(context)]
        end = self.tokenizer.eos_token_id
        start = [self.tokenizer.bos_token_id] if self.causal else []
        prompts, words = [], self.tokenizer.words
        for alone, whole in zip(words(names), words([name + ending for name in names]), strict=True):
            # name and ending are tokenised together, as in a plain prompt: a name's full stop and "." may be one token
            pairs = enumerate(zip(alone, whole, strict=False))
            split = next((at for at, (one, other) in pairs if one != other), len(alone))
            tail = [*whole[split:], end]
            room = len(self.position) - len(start) - context - len(tail)
            if context < 1 or room < 1:
                raise FedvlmError(
                    f"context={context}: the text tower takes {len(self.position)} tokens, which include "
                    f"{'the start, ' if start else ''}one token of the name, {ending!r} and the end; "
                    f"use context=1 to {context + room - 1}"
                )
            prompts.append([*start, *slots[:before], *whole[:split][:room], *slots[before:], *tail])
        return self._padded(prompts, context, 1 + before)

    def _padded(self, prompts: list[list[int]], context: int, shared: int) -> PromptPlan:
        """The prompts in one tensor; what a causal tower gets after [end] does not matter."""
        ends, length, pad = tuple(len(prompt) - 1 for prompt in prompts), 0, self.tokenizer.eos_token_id
        if not self.causal:
            length, pad, shared = len(self.position), self.tokenizer.pad_token_id, 0
            ends = (length - 1,) * len(prompts)
        return PromptPlan(padded(prompts, pad, length), ends, context, shared)

    def phrases(self, texts: Sequence[str]) -> PromptPlan:
        """Phrases without a learned context, for features(plan), or for below(plan, n) and above. A phrase too long for
        the tower loses its last tokens."""
        prompts = self.tokenizer.phrases(texts, len(self.position))
        end = min(map(len, prompts)) - 1
        shared = next((at for at in range(end) if len({prompt[at] for prompt in prompts}) > 1), end)
        return self._padded(prompts, 0, shared)

    def features(
        self,
        plan: PromptPlan,
        context: Tensor | None = None,
        chunk: int = 0,
        lora: Params | None = None,
        scale: float = 1.0,
        deep: Tensor | None = None,
    ) -> Tensor:
        """Normalised text features [clients, classes, dim] for a context [clients, 1 or classes, vectors, width], in
        the context's dtype. context=None: phrases without a context.

        chunk: the most positions (clients × classes × tokens) that run at a time; 0: CHUNK. Training keeps the
        activations of all of them for the backward pass (ViT-B/16, a thousand prompts: 3 GB with a shared context, 8 GB
        without).
        lora: low-rank changes of the last layers, named as in `layers.py` (`text.0.q.A`, …); other names are ignored.
        deep [clients or 1, depth, vectors, width]: new vectors that replace a shared context at layers 1 … depth.
        """
        if context is None:
            context = self.token.new_empty(1, 1, 0, self.token.shape[1], dtype=self._dtype(lora))
        clients, contexts, vectors, _ = context.shape
        if vectors != plan.context or contexts not in (1, len(plan.ends)):
            raise ValueError(f"context {tuple(context.shape)} for {len(plan.ends)} prompts of {plan.context} vectors")
        first = plan.shared == 1 + vectors or not self.causal
        if deep is not None and (contexts > 1 or not first or vectors != deep.shape[2]):
            raise ValueError(f"deep {tuple(deep.shape)} needs as many vectors shared by all classes, before the name")
        low_rank = low_rank_changes(lora, "text", len(self.layers), scale, self.token)
        changes = Changes(low_rank, None, deep, int(self.causal))
        learned = context.to(self.token)
        shared = plan.shared if contexts == 1 else min(1, plan.shared)
        if shared > 1 or changes or not self.causal:
            past = self._prefix(self._embed(plan.ids[:1, :shared], 0, learned), changes)
        else:
            past = self._start

        def own(group: list[int], stop: int) -> Tensor:
            return self._embed(plan.ids[group, shared:stop], shared, learned if contexts == 1 else learned[:, group])

        return self._encode(plan.ends, shared, past, own, max(clients, changes.clients), chunk, changes, context.dtype)

    @torch.no_grad()
    def below(self, plan: PromptPlan, layers: int, chunk: int = 0) -> LowerActivations:
        """The input of the last `layers` layers (0: all) for plain phrases: a constant, for `above`."""
        if plan.context:
            raise ValueError("prompts with a learned context have no constant lower activations; use features")
        left, shared = layer_count(layers, len(self.layers), "text"), plan.shared
        frozen = self.layers[: len(self.layers) - left]
        no_context = self.token.new_empty(1, 1, 0, self.token.shape[1])
        rows = max(1, (chunk or self._for_device(CHUNK)) // (plan.ids.shape[1] - shared))
        past = [self._empty_past(no_context)] * len(frozen)
        prefix = self._embed(plan.ids[:1, :shared], 0, no_context)
        if shared:
            prefix, past = self._run(prefix, past, frozen)
        parts = [self._embed(ids, shared, no_context) for ids in torch.split(plan.ids[:, shared:], rows)]
        return LowerActivations(prefix, torch.cat([self._run(part, past, frozen)[0] for part in parts], 1), left)

    def above(
        self,
        hidden: LowerActivations,
        plan: PromptPlan,
        lora: Params | None = None,
        scale: float = 1.0,
        beside: Beside | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """The last layers: normalised text features [clients, classes, dim], in the dtype of `lora`."""
        changes = Changes(low_rank_changes(lora, "text", hidden.layers, scale, self.token), beside)
        past = self._prefix(hidden.prefix, changes, hidden.layers)

        def own(group: list[int], stop: int) -> Tensor:
            return hidden.own[:, group, : stop - plan.shared]

        return self._encode(plan.ends, plan.shared, past, own, changes.clients, chunk, changes, self._dtype(lora))

    def _dtype(self, lora: Params | None) -> torch.dtype:
        return next((v.dtype for v in (lora or {}).values()), self.token.dtype)

    def _encode(
        self,
        ends: Sequence[int],
        shared: int,
        past: list[Tensor],
        own: Callable[[list[int], int], Tensor],
        clients: int,
        chunk: int,
        changes: Changes,
        dtype: torch.dtype,
    ) -> Tensor:
        """Normalised features of all prompts after their common prefix, one group of classes at a time. own(group,
        stop) gives the input of these classes from the end of the prefix up to position `stop`."""
        groups = _groups(ends, shared, clients, chunk or self._for_device(CHUNK), self._for_device(GROUP_COST))
        states = []
        for group in groups:
            last = torch.tensor([ends[c] for c in group])
            inputs = own(group, int(last.max()) + 1)
            own_changes = changes._replace(deep=None) if shared else changes  # deep vectors are in the prefix
            states.append(self._run_to_ends(inputs, past, last - shared, own_changes)[1])
        original = torch.tensor([c for group in groups for c in group]).argsort()
        pooled = torch.cat(states, 1)[:, to_device(original, self.token.device)]
        projected = plain_linear(self._norm(pooled, self.norm), self.projection, self.bias)
        return F.normalize(projected.to(dtype), dim=-1)

    @cached_property
    def _start(self) -> list[Tensor]:
        """The keys and values of [start] in each layer, which are constant."""
        return self._prefix((self.token[self.tokenizer.bos_token_id] + self.position[0])[None, None, None])

    def _prefix(self, x: Tensor, changes: Changes = UNCHANGED, layers: int = 0) -> list[Tensor]:
        """The keys and values of a prefix in each of the last `layers` layers; 0: all."""
        past = [self._empty_past(x)] * (layers or len(self.layers))
        if not x.shape[2]:
            return past
        return self._run_to_ends(x, past, torch.tensor([x.shape[2] - 1]), changes)[0]

    def _empty_past(self, x: Tensor) -> Tensor:
        """The keys and values before the first position, of which there are none."""
        return x.new_empty(1, 1, 2, self.heads, 0, x.shape[-1] // self.heads)

    def _for_device(self, by_device: dict[str, int]) -> int:
        return by_device.get(self.token.device.type, by_device["cuda"])

    def _norm(self, x: Tensor, affine: Affine) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *affine, self.eps)

    def _embed(self, ids: Tensor, start: int, context: Tensor) -> Tensor:
        """The input of the first layer from position `start` on, [clients, classes, positions, width]; [1, …] where it
        holds no context vector and is therefore the same for all clients."""
        device, slots = context.device, -1 - ids
        positions = self.position[start : start + ids.shape[1]]
        words = self.token[to_device(ids.clamp(min=0), device)]
        if bool((slots < 0).all()):
            return (words + positions)[None]
        at = slots.clamp(min=0) + context.shape[2] * torch.arange(context.shape[1])[:, None]
        flat = context.flatten(1, 2).index_select(1, to_device(at.flatten(), device))
        learned = torch.unflatten(flat, 1, ids.shape)
        return torch.where(to_device((slots >= 0)[..., None], device), learned, words) + positions

    def _run(
        self, x: Tensor, past: Sequence[Tensor], layers: Sequence[TowerLayer], changes: Changes = UNCHANGED
    ) -> tuple[Tensor, list[Tensor]]:
        """x [clients, classes, positions, width] after these layers, and its keys and values in each of them. `past`
        holds, by layer, the keys and values of the positions before x."""
        kept = []
        for i, (layer, old) in enumerate(zip(layers, past, strict=False)):
            x, change = changes.layer_input(i, x), changes.low_rank_at(i)
            x, normed = add_and_norm(x, None, layer.norm1, self.eps)
            mixed, own = self._attention(layer, normed, old, change)
            kept.append(own)
            x = changes.layer_output(i, self._after_attention(layer, x, mixed, change), normed)
        return x, kept

    def _run_to_ends(
        self, x: Tensor, past: Sequence[Tensor], ends: Tensor, changes: Changes = UNCHANGED
    ) -> tuple[list[Tensor], Tensor]:
        """x through the last layers, as many as `past` has entries. Returns the keys and values of x in each layer, and
        the last layer's output at the positions `ends` only, [clients, classes, width]."""
        i, layers = len(past) - 1, self.layers[-len(past) :]
        x, kept = self._run(x, past, layers[:-1], changes)
        x, layer, change = changes.layer_input(i, x), layers[-1], changes.low_rank_at(i)
        x, normed = add_and_norm(x, None, layer.norm1, self.eps)
        at, to = torch.arange(len(ends), device=x.device), to_device(ends, x.device)
        normed_ends, state = (part[:, at, to][:, :, None] for part in (normed, x))
        # with the Triton kernels, attention at all positions costs less than separate products for `ends`
        if self._attention_kernels(normed, past[-1]):
            mixed, own = self._attention(layer, normed, past[-1], change)
            mixed = mixed[:, at, to][:, :, None]
        else:
            (weight, bias), width = layer.qkv, x.shape[-1]
            own = split_heads(project(normed, (weight[width:], bias[width:]), change, "k", "v"), 2, self.heads)
            query = project(normed_ends, (weight[:width], bias[:width]), change, "q")
            clients = max(len(query), len(own), len(past[-1]))
            mask = self._mask(x.shape[2], past[-1].shape[-2], x.device)
            mask = None if mask is None else mask[to][:, None, None].repeat(clients, 1, 1, 1)
            mixed = self._attend(query, past[-1], own, mask)
        output = changes.layer_output(i, self._after_attention(layer, state, mixed, change), normed_ends)
        return [*kept, own], output[:, :, 0]

    def _attention(self, layer: TowerLayer, normed: Tensor, past: Tensor, change: Change) -> tuple[Tensor, Tensor]:
        """Attention before the output projection, [clients, classes, positions, width], and the keys and values."""
        qkv = project(normed, layer.qkv, change, "q", "k", "v")
        query, key_value = torch.split(qkv, [self.width, 2 * self.width], -1)
        own = split_heads(key_value, 2, self.heads)
        if fast := self._attention_kernels(normed, past):
            return fast.fused_attend(qkv, past), own
        return self._attend(query, past, own, self._mask(own.shape[-2], past.shape[-2], normed.device)), own

    def _mask(self, positions: int, before: int, device: torch.device) -> Tensor | None:
        return _causal_mask(positions, before, device) if self.causal else None

    def _attention_kernels(self, x: Tensor, past: Tensor) -> Kernels | None:
        fast = kernels(x) if self.causal else None
        return fast if fast and fast.supports(x, past) else None

    def _attend(self, query: Tensor, past: Tensor, own: Tensor, mask: Tensor | None) -> Tensor:
        # what is common to clients or classes has length 1 along that axis
        rows = (max(len(past), len(own), len(query)), own.shape[1])
        both = torch.cat([part.expand(*rows, *part.shape[2:]) for part in (past, own)], -2).flatten(0, 1)
        queries = split_heads(query, 1, self.heads)[:, :, 0].expand(*rows, -1, -1, -1).flatten(0, 1)
        mixed = attend(queries, both[:, 0], both[:, 1], mask)
        return torch.unflatten(mixed.transpose(1, 2).flatten(2), 0, rows)

    def _after_attention(self, layer: TowerLayer, x: Tensor, mixed: Tensor, change: Change) -> Tensor:
        x, normed = add_and_norm(x, project(mixed, layer.out, change, "out"), layer.norm2, self.eps)
        return x + plain_linear(self.activation(plain_linear(normed, *layer.fc1)), *layer.fc2)


@lru_cache(maxsize=256)
def _causal_mask(positions: int, before: int, device: torch.device) -> Tensor:
    """True where a position may attend: to itself and to all before it, `before` of which precede the first."""
    return torch.ones(positions, before + positions, dtype=torch.bool).tril(before).to(device)


def _groups(ends: Sequence[int], shared: int, clients: int, chunk: int, group_cost: int) -> list[list[int]]:
    """Classes by length, longest first. Those of one length join the previous group where this adds at most
    `group_cost` positions of padding. A group has at most `chunk` positions after the shared ones, over all clients."""
    groups: list[list[int]] = []
    for end in sorted(set(ends), reverse=True):
        same = [c for c, other in enumerate(ends) if other == end]
        if groups and clients * len(same) * (ends[groups[-1][0]] - end) <= group_cost:
            groups[-1] += same
        else:
            groups.append(same)
    sizes = [max(1, chunk // (clients * (ends[group[0]] + 1 - shared))) for group in groups]
    return [g[at : at + size] for g, size in zip(groups, sizes, strict=True) for at in range(0, len(g), size)]
