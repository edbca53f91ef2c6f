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

Plain phrases need no context, and where only the last n layers are trained (low-rank changes, adapters), what lies below
them is a constant to be computed once:

    plan = tower.phrases(["a photo of a cat", …])
    hidden = tower.below(plan, n)                    what enters the last n layers; keep it
    text = tower.above(hidden, plan, lora, scale)    [clients, classes, dim], normalised
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.backbones.layers import (
    Affine,
    Beside,
    Change,
    Layer,
    attend,
    changes,
    how_many,
    kernels,
    layers_of,
    moved,
    plain,
    project,
    sent,
    settle,
    smooth,
    split,
)
from fedvlm.core import FedvlmError, Params

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 18}  # places at a time: in ViT-B/16's tower 0.25 GB and, in bfloat16, 1 GB
SWITCH = {"cpu": 32, "cuda": 1 << 14}  # places of padding that cost about what one more group does (measured)


class Plan(NamedTuple):
    """Prompts yet without their context vectors."""

    ids: Tensor  # [classes, longest]: token ids; −1−j keeps the place of context vector j
    ends: tuple[int, ...]  # where each prompt's end-of-text stands
    context: int  # context vectors in a prompt
    shared: int  # leading places that are the same for all classes where they share a context


class Below(NamedTuple):
    """What enters the last layers, of prompts without a learned context."""

    prefix: Tensor  # [1, 1, shared places, width]
    own: Tensor  # [1, classes, the other places, width]
    layers: int  # how many are left


class Tuning(NamedTuple):
    """What is changed in the layers that run."""

    changes: Sequence[Change] = ()  # by layer
    beside: Beside | None = None
    deep: Tensor | None = None  # [clients, depth, vectors, width]: in a prefix, the context at layers 1 … depth

    def __bool__(self) -> bool:
        return any(self.changes) or self.beside is not None or self.deep is not None

    @property
    def clients(self) -> int:
        found = [len(part) for change in self.changes for pair in change.values() for part in pair]
        return max([1, *found, *([] if self.deep is None else [len(self.deep)])])

    def at(self, layer: int) -> Change:
        return self.changes[layer] if self.changes else {}

    def enter(self, layer: int, x: Tensor) -> Tensor:
        if self.deep is None or not 1 <= layer <= self.deep.shape[1]:
            return x
        new = self.deep[:, layer - 1, None].to(x)
        clients = max(len(x), len(new))
        return torch.cat([part.expand(clients, -1, -1, -1) for part in (x[:, :, :1], new)], 2)

    def leave(self, layer: int, x: Tensor, normed: Tensor) -> Tensor:
        return x if self.beside is None else x + self.beside(layer, normed)


PLAINLY = Tuning()


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
        """From a Hugging Face CLIPModel, sharing its weights where `layers_of` does."""
        text = model.text_model
        return cls(
            text.embeddings.token_embedding.weight.detach(),
            text.embeddings.position_embedding.weight.detach(),
            layers_of(text.encoder),
            plain(text.final_layer_norm),
            model.text_projection.weight.detach(),
            text.config.num_attention_heads,
            text.config.layer_norm_eps,
            smooth(text.encoder.layers[0].mlp.activation_fn)[0],
            tokenizer,
        )

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> TextTower:
        def move(weight: Tensor) -> Tensor:
            return weight.to(dtype=dtype or weight.dtype, device=device)

        return replace(
            self,
            token=move(self.token),
            position=move(self.position),
            layers=tuple(layer.to(dtype, device) for layer in self.layers),
            norm=moved(self.norm, dtype, device),
            projection=move(self.projection),
        )

    @property
    def width(self) -> int:
        return int(self.token.shape[1])

    def last(self, layers: int) -> tuple[Layer, ...]:
        """Its last so many layers; 0: all."""
        return self.layers[-how_many(layers, len(self.layers), "text") :]

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

    def phrases(self, texts: Sequence[str]) -> Plan:
        """Whole phrases without a learned context, for features(plan), or below(plan, n) and above. One too long for the
        tower loses its last tokens."""
        prompts = self.tokenizer(list(texts), truncation=True, max_length=len(self.position))["input_ids"]
        ends = tuple(len(prompt) - 1 for prompt in prompts)
        shared = next((at for at in range(min(ends)) if len({prompt[at] for prompt in prompts}) > 1), min(ends))
        ids = torch.tensor([prompt + prompt[-1:] * (max(ends) + 1 - len(prompt)) for prompt in prompts])
        return Plan(ids, ends, 0, shared)

    def features(
        self,
        plan: Plan,
        context: Tensor | None = None,
        chunk: int = 0,
        lora: Params | None = None,
        scale: float = 1.0,
        deep: Tensor | None = None,
    ) -> Tensor:
        """Normalised text features [clients, classes, dim] of context [clients, 1 or classes, vectors, width], in the
        context's dtype. At most `chunk` places (clients × classes × tokens) are worked on at a time; training keeps what the
        backward pass needs of them all (ViT-B/16, a thousand prompts: 3 GB with a shared context, 8 GB without).

        lora: low-rank changes of the last layers, named as in `layers.py` (`text.0.q.A`, …); other names are ignored.
        deep [clients or 1, depth, vectors, width]: a shared context's vectors are new ones at layers 1 … depth too.
        """
        if context is None:
            context = self.token.new_empty(1, 1, 0, self.token.shape[1], dtype=self._kind(lora))
        clients, kinds, vectors, _ = context.shape
        if vectors != plan.context or kinds not in (1, len(plan.ends)):
            raise ValueError(f"context {tuple(context.shape)} for {len(plan.ends)} prompts of {plan.context} vectors")
        if deep is not None and (kinds > 1 or plan.shared != 1 + deep.shape[2] or vectors != deep.shape[2]):
            raise ValueError(f"deep {tuple(deep.shape)} needs as many vectors shared by all classes, before the name")
        how = Tuning(changes(lora, "text", len(self.layers), scale, self.token), None, deep)
        learned = context.to(self.token)
        shared = plan.shared if kinds == 1 else 1
        first = shared > 1 or bool(how)
        past = self._prefix(self._embed(plan.ids[:1, :shared], 0, learned), how) if first else self._start

        def own(group: list[int], stop: int) -> Tensor:
            return self._embed(plan.ids[group, shared:stop], shared, learned if kinds == 1 else learned[:, group])

        return self._read(plan.ends, shared, past, own, max(clients, how.clients), chunk, how, context.dtype)

    @torch.no_grad()
    def below(self, plan: Plan, layers: int, chunk: int = 0) -> Below:
        """What enters the last `layers` layers (0: all) of plain phrases: a constant, for `above`."""
        if plan.context:
            raise ValueError("prompts with a learned context have nothing constant below; use features")
        left, shared = how_many(layers, len(self.layers), "text"), plan.shared
        frozen = self.layers[: len(self.layers) - left]
        nothing = self.token.new_empty(1, 1, 0, self.token.shape[1])
        rows = max(1, (chunk or self._most(CHUNK)) // (plan.ids.shape[1] - shared))
        before = [self._nothing(nothing)] * len(frozen)
        prefix, past = self._through(self._embed(plan.ids[:1, :shared], 0, nothing), before, frozen)
        parts = [self._embed(ids, shared, nothing) for ids in plan.ids[:, shared:].split(rows)]
        return Below(prefix, torch.cat([self._through(part, past, frozen)[0] for part in parts], 1), left)

    def above(
        self,
        hidden: Below,
        plan: Plan,
        lora: Params | None = None,
        scale: float = 1.0,
        beside: Beside | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """The rest of the way: normalised text features [clients, classes, dim], in the low-rank changes' dtype."""
        how = Tuning(changes(lora, "text", hidden.layers, scale, self.token), beside)
        past = self._prefix(hidden.prefix, how, hidden.layers)

        def own(group: list[int], stop: int) -> Tensor:
            return hidden.own[:, group, : stop - plan.shared]

        return self._read(plan.ends, plan.shared, past, own, how.clients, chunk, how, self._kind(lora))

    def _kind(self, lora: Params | None) -> torch.dtype:
        return next((v.dtype for v in (lora or {}).values()), self.token.dtype)

    def _read(
        self,
        ends: Sequence[int],
        shared: int,
        past: list[Tensor],
        own: Callable[[list[int], int], Tensor],
        clients: int,
        chunk: int,
        how: Tuning,
        kind: torch.dtype,
    ) -> Tensor:
        """All prompts behind their common prefix, a group at a time: own(group, stop) is what enters, from the prefix on,
        of these classes up to that place."""
        groups = _groups(ends, shared, clients, chunk or self._most(CHUNK), self._most(SWITCH))
        states = []
        for group in groups:
            last = torch.tensor([ends[c] for c in group])
            entering = own(group, int(last.max()) + 1)
            states.append(self._run(entering, past, last - shared, how._replace(deep=None))[1])
        back = torch.tensor([c for group in groups for c in group]).argsort()
        pooled = torch.cat(states, 1)[:, sent(back, self.token.device)]
        projected = F.linear(self._norm(pooled, self.norm), self.projection)
        return F.normalize(projected.to(kind), dim=-1)

    @cached_property
    def _start(self) -> list[Tensor]:
        """What [start] leaves behind in each layer: a constant."""
        return self._prefix((self.token[self.tokenizer.bos_token_id] + self.position[0])[None, None, None])

    def _prefix(self, x: Tensor, how: Tuning = PLAINLY, layers: int = 0) -> list[Tensor]:
        past = [self._nothing(x)] * (layers or len(self.layers))
        return self._run(x, past, torch.tensor([x.shape[2] - 1]), how)[0]

    def _nothing(self, x: Tensor) -> Tensor:
        """What stands before the first place, in any layer."""
        return x.new_empty(1, 1, 2, self.heads, 0, x.shape[-1] // self.heads)

    def _most(self, by_device: dict[str, int]) -> int:
        return by_device.get(self.token.device.type, by_device["cuda"])

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def _norm(self, x: Tensor, affine: Affine) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *affine, self.eps)  # statistics in float32 at least, whatever x is

    def _embed(self, ids: Tensor, start: int, context: Tensor) -> Tensor:
        """What enters the first layer from place `start` on, [clients, classes, places, width]. Where no context
        vector is among it, it is the same for all clients and stands there once."""
        device, slots = context.device, -1 - ids
        places = self.position[start : start + ids.shape[1]]
        words = self.token[sent(ids.clamp(min=0), device)]
        if bool((slots < 0).all()):
            return (words + places)[None]
        at = slots.clamp(min=0) + context.shape[2] * torch.arange(context.shape[1])[:, None]
        learned = context.flatten(1, 2).index_select(1, sent(at.flatten(), device)).unflatten(1, ids.shape)
        return torch.where(sent((slots >= 0)[..., None], device), learned, words) + places

    def _through(
        self, x: Tensor, past: Sequence[Tensor], layers: Sequence[Layer], how: Tuning = PLAINLY
    ) -> tuple[Tensor, list[Tensor]]:
        """x [clients, classes, places, width] after these layers, seeing `past`: by layer, the keys and values of what
        stands before it. Returns x's own keys and values, too."""
        kept = []
        for i, (layer, old) in enumerate(zip(layers, past, strict=False)):
            x, change = how.enter(i, x), how.at(i)
            x, normed = settle(x, None, layer.norm1, self.eps)
            mixed, own = self._look(layer, normed, old, change)
            kept.append(own)
            x = how.leave(i, self._rest(layer, x, mixed, change), normed)
        return x, kept

    def _run(
        self, x: Tensor, past: Sequence[Tensor], ends: Tensor, how: Tuning = PLAINLY
    ) -> tuple[list[Tensor], Tensor]:
        """x through the last layers, as many as there is `past` of. Returns x's own keys and values, and the last layer's
        state at `ends` alone."""
        i, layers = len(past) - 1, self.layers[-len(past) :]
        x, kept = self._through(x, past, layers[:-1], how)
        x, layer, change = how.enter(i, x), layers[-1], how.at(i)
        x, normed = settle(x, None, layer.norm1, self.eps)
        at, to = torch.arange(len(ends), device=x.device), sent(ends, x.device)
        asking, state = (part[:, at, to][:, :, None] for part in (normed, x))
        if self._quick(normed, past[-1]):  # to ask everywhere is less than a product and an attention of their own kind
            mixed, own = self._look(layer, normed, past[-1], change)
            mixed = mixed[:, at, to][:, :, None]
        else:
            (weight, bias), width = layer.qkv, x.shape[-1]
            own = split(project(normed, (weight[width:], bias[width:]), change, "k", "v"), 2, self.heads)
            query = project(asking, (weight[:width], bias[:width]), change, "q")
            clients = max(len(query), len(own), len(past[-1]))
            only = _seen(x.shape[2], past[-1].shape[-2], x.device)[to][:, None, None].repeat(clients, 1, 1, 1)
            mixed = self._mix(query, past[-1], own, only)
        return [*kept, own], how.leave(i, self._rest(layer, state, mixed, change), asking)[:, :, 0]

    def _look(self, layer: Layer, normed: Tensor, old: Tensor, change: Change) -> tuple[Tensor, Tensor]:
        """What each place sees, [clients, classes, places, width], and its own keys and values."""
        asked = project(normed, layer.qkv, change, "q", "k", "v")
        query, both = asked.split([self.width, 2 * self.width], -1)
        own = split(both, 2, self.heads)
        if quick := self._quick(normed, old):
            return quick.attend(asked, old), own
        return self._mix(query, old, own, _seen(own.shape[-2], old.shape[-2], normed.device)), own

    def _quick(self, x: Tensor, past: Tensor) -> Any:
        fast = kernels(x)
        return fast if fast and fast.short(x, past) else None

    def _mix(self, query: Tensor, old: Tensor, new: Tensor, seen: Tensor) -> Tensor:
        rows = (max(len(old), len(new), len(query)), new.shape[1])  # what all clients (or classes) share stands once
        both = torch.cat([part.expand(*rows, *part.shape[2:]) for part in (old, new)], -2).flatten(0, 1)
        asked = split(query, 1, self.heads)[:, :, 0].expand(*rows, -1, -1, -1).flatten(0, 1)
        mixed = attend(asked, both[:, 0], both[:, 1], seen)
        return mixed.transpose(1, 2).flatten(2).unflatten(0, rows)

    def _rest(self, layer: Layer, x: Tensor, mixed: Tensor, change: Change) -> Tensor:
        x, normed = settle(x, project(mixed, layer.out, change, "out"), layer.norm2, self.eps)
        return x + F.linear(self.activation(F.linear(normed, *layer.fc1)), *layer.fc2)


@lru_cache(maxsize=256)
def _seen(places: int, before: int, device: torch.device) -> Tensor:
    """Each place sees itself and what stands before it."""
    return torch.ones(places, before + places, dtype=torch.bool).tril(before).to(device)


def _groups(ends: Sequence[int], shared: int, clients: int, chunk: int, switch: int) -> list[list[int]]:
    """Classes by length, longest first; those of one length join longer ones where padding costs less than a group
    of their own would. What is in a group has at most `chunk` places behind the shared ones, all clients together."""
    groups: list[list[int]] = []
    for end in sorted(set(ends), reverse=True):
        same = [c for c, other in enumerate(ends) if other == end]
        if groups and clients * len(same) * (ends[groups[-1][0]] - end) <= switch:
            groups[-1] += same
        else:
            groups.append(same)
    sizes = [max(1, chunk // (clients * (ends[group[0]] + 1 - shared))) for group in groups]
    return [g[at : at + size] for g, size in zip(groups, sizes, strict=True) for at in range(0, len(g), size)]
