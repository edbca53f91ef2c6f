"""The next character (LEAF's and q-FFL's model, FFT-GP §4.1): characters → 8 numbers each → 2 LSTM layers → a character.

Written for all clients at once: the inputs' part of every gate in one product, then one product a character and layer.
The hidden size is LEAF's 256; the paper does not state one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import Adapter, Limits, Task
from fedvlm.core import Params
from fedvlm.seeds import generator
from fedvlm.tasks import NEXT_CHARACTER, TaskType


@dataclass(frozen=True)
class Lstm(Adapter):
    embed: int = 8
    hidden: int = 256
    layers: int = 2

    task_type: ClassVar[TaskType] = NEXT_CHARACTER
    view: ClassVar[str] = "text"
    limits: ClassVar[Limits] = Limits(examples=512, gpu=True)

    def init(self, task: Task, seed: int) -> Params:
        draw, bound, count = generator(seed, 43), self.hidden**-0.5, len(task.classes)
        shapes: dict[str, tuple[int, ...]] = {}
        for k in range(self.layers):
            inside = self.hidden if k else self.embed
            shapes |= {f"input{k}": (4 * self.hidden, inside), f"state{k}": (4 * self.hidden, self.hidden)}
            shapes |= {f"bias{k}": (4 * self.hidden,)}
        shapes |= {"head": (count, self.hidden), "bias": (count,)}
        start = {k: (torch.rand(s, generator=draw) * 2 - 1) * bound for k, s in shapes.items()}
        return {"characters": torch.randn(count, self.embed, generator=draw)} | start

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        """[clients, examples, hidden] after the last character."""
        clients, examples, length = max(len(x), len(params["head"])), *x.shape[1:]
        # one character of all examples after the other; a product, not a lookup, whose gradient has no fixed order on a GPU
        ids = x.expand(clients, -1, -1).long().mT.reshape(clients, -1)
        h = F.one_hot(ids, len(task.classes)).to(params["head"].dtype) @ params["characters"]
        for k in range(self.layers):
            gates = h @ params[f"input{k}"].mT + params[f"bias{k}"][:, None]
            inner = params[f"state{k}"].mT.expand(clients, -1, -1)
            h = Layer.apply(gates.unflatten(1, (length, examples)), inner).flatten(1, 2)
        return h[:, -examples:]

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return self.features(task, params, x) @ params["head"].mT + params["bias"][:, None]


class Layer(torch.autograd.Function):
    """One layer over all characters: gates [clients, length, examples, 4 × hidden] → states. By hand, because the slope of
    the inner weights is then one product over all characters, where autograd would add up a matrix for each."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, inner: Tensor) -> Tensor:
        clients, length, examples, _ = gates.shape
        size = inner.shape[1]
        states, cells = (gates.new_zeros(length + 1, clients, examples, size) for _ in range(2))
        opened = torch.empty(length, clients, examples, 4 * size, dtype=gates.dtype, device=gates.device)
        for t in range(length):
            now = torch.baddbmm(gates[:, t], states[t], inner, out=opened[t])
            i, f, g, o = now.chunk(4, -1)
            i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
            torch.addcmul(f * cells[t], i, g, out=cells[t + 1])
            torch.mul(o, cells[t + 1].tanh(), out=states[t + 1])
        ctx.save_for_backward(states, cells, opened, inner)
        return states[1:].transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        states, cells, opened, inner = ctx.saved_tensors
        found = torch.empty_like(opened)
        back, state, cell = inner.mT, torch.zeros_like(states[0]), torch.zeros_like(cells[0])
        for t in reversed(range(len(opened))):
            state = state + gradients[0][:, t]
            i, f, g, o = opened[t].chunk(4, -1)
            bent = cells[t + 1].tanh()
            cell = cell + state * o * (1 - bent * bent)
            di, df, dg, do = found[t].chunk(4, -1)
            torch.mul(cell * g, i * (1 - i), out=di)
            torch.mul(cell * cells[t], f * (1 - f), out=df)
            torch.mul(cell * i, 1 - g * g, out=dg)
            torch.mul(state * bent, o * (1 - o), out=do)
            state, cell = torch.bmm(found[t], back), cell * f
        before = states[:-1].transpose(0, 1).flatten(1, 2)
        gates = found.transpose(0, 1)
        return gates, torch.bmm(before.mT, gates.flatten(1, 2))
