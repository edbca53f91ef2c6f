"""The choices behind the fast path, each against the obvious way on the same work: `python benchmarks/steps.py`.

CPU-milliseconds at one thread; a line says what was chosen, what was not, and the ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.func import grad, vmap
from torch.nn import functional as F

from fedvlm.adapters.base import Task
from fedvlm.adapters.head import Head
from fedvlm.adapters.rotation import cayley, rotate
from fedvlm.core import Batch, linear
from fedvlm.local.descent import Pace, Walk, by_autograd
from fedvlm.local.model import Model
from fedvlm.tasks import cross_entropy


def timed(work: Callable[[], object], times: int = 200) -> float:
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
    model = Model(Head(), Task(tuple(map(str, range(classes))), text, dim, 20.5))
    x = F.normalize(torch.randn(clients, examples, dim, generator=draw), dim=-1)
    y = torch.randint(classes, (clients, examples), generator=draw)
    batch = Batch(x, y, torch.full((clients, examples), 1 / examples))
    head = {"head": text.repeat(clients, 1, 1)}

    def alone(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(20.5 * x @ w.T, y)

    auto = timed(lambda: by_autograd(lambda p, b: cross_entropy(model.logits(p, b.x), b))(head, batch))
    print(f"slopes of a linear head, {clients} clients × {examples} examples × {dim} dimensions")
    compare("  a client axis, not vmap(grad)", auto, timed(lambda: vmap(grad(alone))(head["head"], x, y)))
    compare("  by hand, not autograd", timed(lambda: model.slopes("cross-entropy")(head, batch)), auto)
    usual = by_autograd(lambda p, b: cross_entropy(20.5 * b.x @ p["head"].mT, b))
    ours = by_autograd(lambda p, b: cross_entropy(20.5 * linear(b.x, p["head"]), b))
    compare("  weight first in a product", timed(lambda: ours(head, batch)), timed(lambda: usual(head, batch)))
    pool, rows = torch.randn(10_000, dim), torch.randint(10_000, (clients, examples), generator=draw)
    pick = timed(lambda: pool.index_select(0, rows.reshape(-1)).view(clients, examples, dim))
    compare("  index_select, not x[rows]", pick, timed(lambda: pool[rows]))

    skew, h = torch.randn(1, 1, dim, dim, generator=draw) * 0.01, torch.randn(1, 32, dim, generator=draw)

    def slope(turn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        leaf = skew.clone().requires_grad_()
        return torch.autograd.grad(turn(leaf).sum(), leaf)[0]

    whole = timed(lambda: slope(lambda s: h @ cayley(s)[:, 0].mT), 50)
    compare(
        "a rotation's slope, 32 right-hand sides, not the map", timed(lambda: slope(lambda s: rotate(s, h)), 50), whole
    )
    weights = {"w1": torch.randn(1, dim, dim), "w2": torch.randn(1, dim, dim)}
    slopes = [torch.randn_like(v) for v in weights.values()]
    walk = Walk(Pace(optimiser="adam"), weights)
    plain = torch.optim.Adam([v.clone().requires_grad_() for v in weights.values()], foreach=False)
    for p, s in zip(plain.param_groups[0]["params"], slopes, strict=True):
        p.grad = s
    compare("an Adam step of FedCLIP's adapter, fused", timed(lambda: walk.step(1, slopes, 1e-4)), timed(plain.step))


if __name__ == "__main__":
    main()
