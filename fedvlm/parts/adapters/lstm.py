"""Next-character model (LEAF's and q-FFL's; FFT-GP §4.1): characters → 8 numbers each → 2 LSTM layers → a character.

Computed for all clients at once: the input's part of every gate is one matrix product, then there is one product per
character and layer. The hidden size is LEAF's 256; the paper does not state one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter, Limits, Task
from fedvlm.core.ranges import Count, default
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params
from fedvlm.core.tasks import NEXT_CHARACTER, TaskType


@dataclass(frozen=True)
class Lstm(Adapter):
    embed: Count = 8  # length of a character's embedding
    hidden: Count = 256  # size of a layer's state
    layers: Count = default(2, "effort")  # LSTM layers

    task_type: ClassVar[TaskType] = NEXT_CHARACTER
    view: ClassVar[str] = "text"
    limits: ClassVar[Limits] = Limits(examples=512, gpu=True)

    def init(self, task: Task, seed: int) -> Params:
        rng, bound, count = generator(seed, 43), self.hidden**-0.5, len(task.classes)
        shapes: dict[str, tuple[int, ...]] = {}
        for k in range(self.layers):
            inputs = self.hidden if k else self.embed
            shapes |= {f"input{k}": (4 * self.hidden, inputs), f"state{k}": (4 * self.hidden, self.hidden)}
            shapes |= {f"bias{k}": (4 * self.hidden,)}
        shapes |= {"head": (count, self.hidden), "bias": (count,)}
        uniform = {k: (torch.rand(s, generator=rng) * 2 - 1) * bound for k, s in shapes.items()}
        return {"characters": torch.randn(count, self.embed, generator=rng)} | uniform

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        """The last layer's state after the last character, [clients, examples, hidden]."""
        clients, examples, length = max(len(x), len(params["head"])), *x.shape[1:]
        # character by character, [clients, length × examples]; a product with one-hot vectors instead of a lookup,
        # whose gradient is summed in no fixed order on a GPU
        ids = x.expand(clients, -1, -1).long().mT.reshape(clients, -1)
        h = F.one_hot(ids, len(task.classes)).to(params["head"].dtype) @ params["characters"]
        for k in range(self.layers):
            gates = h @ params[f"input{k}"].mT + params[f"bias{k}"][:, None]
            weight = params[f"state{k}"].mT.expand(clients, -1, -1)
            h = lstm_layer(torch.unflatten(gates, 1, (length, examples)), weight).flatten(1, 2)
        return h[:, -examples:]

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return self.features(task, params, x) @ params["head"].mT + params["bias"][:, None]


class GatesContext(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class LstmLayer(torch.autograd.Function):
    """One layer over all characters: the input's part of the gates [clients, length, examples, 4 × hidden] → states. The
    backward pass is written by hand, so that the gradient of the recurrent weights is one product over all characters;
    autograd would sum one matrix per character."""

    @staticmethod
    def forward(ctx: GatesContext, gates: Tensor, weight: Tensor) -> Tensor:
        clients, length, examples, _ = gates.shape
        size = weight.shape[1]
        states, cells = (gates.new_zeros(length + 1, clients, examples, size) for _ in range(2))
        activated = torch.empty(length, clients, examples, 4 * size, dtype=gates.dtype, device=gates.device)
        for t in range(length):
            now = torch.baddbmm(gates[:, t], states[t], weight, out=activated[t])
            i, f, g, o = now.chunk(4, -1)
            i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
            torch.addcmul(f * cells[t], i, g, out=cells[t + 1])
            torch.mul(o, cells[t + 1].tanh(), out=states[t + 1])
        ctx.save_for_backward(states, cells, activated, weight)
        return states[1:].transpose(0, 1)

    @staticmethod
    def backward(ctx: GatesContext, *grads: Tensor) -> tuple[Tensor, Tensor]:
        states, cells, activated, weight = ctx.saved_tensors
        grad_gates = torch.empty_like(activated)
        grad_state, grad_cell = torch.zeros_like(states[0]), torch.zeros_like(cells[0])
        for t in reversed(range(len(activated))):
            grad_state = grad_state + grads[0][:, t]
            i, f, g, o = activated[t].chunk(4, -1)
            tanh_cell = cells[t + 1].tanh()
            grad_cell = grad_cell + grad_state * o * (1 - tanh_cell * tanh_cell)
            di, df, dg, do = grad_gates[t].chunk(4, -1)
            torch.mul(grad_cell * g, i * (1 - i), out=di)
            torch.mul(grad_cell * cells[t], f * (1 - f), out=df)
            torch.mul(grad_cell * i, 1 - g * g, out=dg)
            torch.mul(grad_state * tanh_cell, o * (1 - o), out=do)
            grad_state, grad_cell = torch.bmm(grad_gates[t], weight.mT), grad_cell * f
        previous = states[:-1].transpose(0, 1).flatten(1, 2)
        by_client = grad_gates.transpose(0, 1)
        return by_client, torch.bmm(previous.mT, by_client.flatten(1, 2))


lstm_layer: Callable[[Tensor, Tensor], Tensor] = LstmLayer.apply
