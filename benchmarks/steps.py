"""How much the optimisations of a training step save, each against the usual way on the same work:
`python benchmarks/steps.py`.

CPU-milliseconds on one thread: what fedvlm does, the alternative, and the ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from fedvlm.core.adapter import Task
from fedvlm.core.data import Batch
from fedvlm.core.descent import Optimiser, OptimiserSettings, by_autograd
from fedvlm.core.model import Model
from fedvlm.core.state import linear
from fedvlm.core.tasks import cross_entropy
from fedvlm.parts.adapters.head import Head
from fedvlm.parts.adapters.rotation import cayley, rotate

SCALE = 20.5  # mini-clip's logit scale


def timed(work: Callable[[], object], times: int = 200) -> float:
    """CPU-milliseconds."""
    for _ in range(20):
        work()
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times * 1e3


def compare(what: str, ours: float, other: float) -> None:
    print(f"{what}: {ours:.3f} against {other:.3f} ms, {other / ours:.1f}×")


def main() -> None:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    clients, examples, dim, classes = 20, 10, 256, 7
    text = F.normalize(torch.randn(classes, dim, generator=draw), dim=-1)
    model = Model(Head(), Task(tuple(map(str, range(classes))), text, dim, SCALE))
    x = F.normalize(torch.randn(clients, examples, dim, generator=draw), dim=-1)
    y = torch.randint(classes, (clients, examples), generator=draw)
    batch = Batch(x, y, torch.full((clients, examples), 1 / examples))
    head = {"head": text.repeat(clients, 1, 1)}

    def loss_of_one(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(SCALE * x @ w.T, y)

    by_axis = by_autograd(lambda p, b: cross_entropy(model.logits(p, b.x), b))
    closed_form = model.gradients("cross-entropy")
    autograd = timed(lambda: by_axis(head, batch))
    print(f"gradient of a linear head, {clients} clients × {examples} examples × {dim} dimensions")
    compare("  a client axis, not vmap(grad)", autograd, timed(lambda: vmap(grad(loss_of_one))(head["head"], x, y)))
    compare("  closed form, not autograd", timed(lambda: closed_form(head, batch)), autograd)
    usual = by_autograd(lambda p, b: cross_entropy(SCALE * b.x @ p["head"].mT, b))
    ours = by_autograd(lambda p, b: cross_entropy(SCALE * linear(b.x, p["head"]), b))
    compare("  the weight first in a product", timed(lambda: ours(head, batch)), timed(lambda: usual(head, batch)))
    pool, rows = torch.randn(10_000, dim), torch.randint(10_000, (clients, examples), generator=draw)
    selected = timed(lambda: pool.index_select(0, rows.reshape(-1)).view(clients, examples, dim))
    compare("  index_select, not x[rows]", selected, timed(lambda: pool[rows]))

    skew, h = torch.randn(1, 1, dim, dim, generator=draw) * 0.01, torch.randn(1, 32, dim, generator=draw)

    def gradient(rotated: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = skew.clone().requires_grad_()
        return torch.autograd.grad(rotated(leaf).sum(), leaf)[0]

    solved = timed(lambda: gradient(lambda s: rotate(s, h)), 50)
    inverted = timed(lambda: gradient(lambda s: h @ cayley(s)[:, 0].mT), 50)
    compare("gradient of a rotation: a solve with 32 right-hand sides, not the whole matrix", solved, inverted)
    weights = {"w1": torch.randn(1, dim, dim), "w2": torch.randn(1, dim, dim)}
    gradients = [torch.randn_like(v) for v in weights.values()]
    optimiser = Optimiser(OptimiserSettings(optimiser="adam"), weights)
    plain = torch.optim.Adam([v.clone().requires_grad_() for v in weights.values()], foreach=False)
    for p, g in zip(plain.param_groups[0]["params"], gradients, strict=True):
        p.grad = g
    fused = timed(lambda: optimiser.step(1, gradients, 1e-4))
    compare("an Adam step of FedCLIP's adapter, fused", fused, timed(plain.step))


if __name__ == "__main__":
    main()
