"""What can be rebuilt of the images behind one honest step of training, by matching its gradient (Zhu et al., 2019; the
cosine and total variation of Geiping et al., 2020):

    python benchmarks/attacks.py inversion [--only fedavg-cnn,promptfl] [--examples 1,4,16,64]

One site takes one step of SGD on so many images of emoji, from the model that an honest round starts with. The attacker
knows the model, the learning rate, the number of images and their classes (more than a server is told), and searches the
inputs whose gradient points where the update does. For networks on pixels a cell is the mean SSIM of what was found with
the image that is most like it (the same for as many other images of these classes in brackets); elsewhere the mean cosine
of embeddings without their mean. "share" is how often what was found is nearer to an image of the step than to the others:
50 % is chance. The larger of two starts by the attacker's own criterion counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from updates import CLASSES, drawn

from fedvlm.config.config import resolve
from fedvlm.core.data import Data
from fedvlm.core.state import Message, Params, with_client_axis
from fedvlm.data.clients import Federation
from fedvlm.data.pool import Pools
from fedvlm.engines.stacked import Stacked
from fedvlm.parts.adapters.network import IMAGENET
from fedvlm.rounds.method import Method
from fedvlm.towers import layers
from fedvlm.training.privacy_plan import planned

DATA = {"data": "emoji", "engine": "serial"}
ONE_STEP = {"local.optimiser": "sgd", "local.momentum": 0.0, "local.weight_decay": 0.0, "local.epochs": 1}
PRIVATE = {"dp": "example", "epsilon": 8.0, "delta": 1e-3, "rounds": 1}
METHODS = {
    "fedavg-cnn": ("fedavg", {"on": "cnn", "backbone": "pixels:32"}),
    "fedavg": ("fedavg", {}),
    "fedclip": ("fedclip", {}),
    "fedot": ("fedot", {}),
    "promptfl": ("promptfl", {}),
    "fedlora": ("fedlora", {}),
}
STARTS, STEPS, VARIATION = 2, 300, 1e-2
DRAWS = {1: 4, 4: 2, 16: 1, 64: 1}


class Victim(NamedTuple):
    """What the attacker has: a method, the parameters before the step, and its gradient by name."""

    method: Method
    before: Params
    gradient: Params


def stepped(name: str, x: Tensor, y: Tensor, pool: object, seed: int, keys: dict[str, object]) -> Victim:
    """One step on these examples as a site takes it."""
    method_name, own = METHODS[name]
    rate = 1e-2
    settings = {**DATA, **own, **ONE_STEP, "local.lr": rate, "local.batch": len(x), "seed": seed, **keys}
    setup = resolve(method_name, settings)
    task = pool.task._replace(classes=pool.task.classes[:CLASSES])  # type: ignore[attr-defined]
    task = task._replace(text=task.text[:CLASSES] if task.text is not None else None)
    task = task._replace(phrases=task.phrases[:CLASSES])
    data = Data(x, y, np.array([[0, len(x), len(x), len(x)]]), np.array([0]), seed, 0, 1)
    method = Method.build(setup.adapter, setup.local, setup.merge, task, seed, setup.metrics)
    method = replace(method, privacy=planned(setup, Federation(("site",), ("site",), data, task)))
    sent = dict(method.initial)
    (reply,) = Stacked(method, data, 1).run("train", np.array([0]), Message(sent), 1, 0)
    before = method.adapter.init(task, seed) | sent  # private parameters are still at their start, which is public
    return Victim(method, before, {k: (v[0] - before[k]) / -rate for k, v in reply.shared.items()})


def cosine_loss(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    dot = sum((a * b).sum() for a, b in zip(found, wanted, strict=True))
    return 1 - dot / (sum((a**2).sum() for a in found) * sum((b**2).sum() for b in wanted) + 1e-20) ** 0.5


@sdpa_kernel(SDPBackend.MATH)  # the others have no second derivative
def inverted(victim: Victim, y: Tensor, start: Callable[[int], Tensor], shown: Callable[[Tensor], Tensor]) -> Tensor:
    """Inputs whose gradient is as near to the victim's as the attacker comes; `shown` keeps them in their range."""
    names = [k for k, v in victim.gradient.items() if v.abs().sum() > 0]
    wanted = [victim.gradient[k] for k in names]
    model, best, lowest = victim.method.model, None, float("inf")
    for k in range(STARTS):
        guess = start(k).requires_grad_()
        adam = torch.optim.Adam([guess], 0.05)
        fall = torch.optim.lr_scheduler.CosineAnnealingLR(adam, STEPS)
        for _ in range(STEPS):
            params = with_client_axis({n: v.clone().requires_grad_(n in names) for n, v in victim.before.items()})
            x = shown(guess)
            ready = model.adapter.prepare(model.task, params, {})
            loss = F.cross_entropy(model.logits(ready, as_input(x)[None])[0], y)
            found = torch.autograd.grad(loss, [params[n] for n in names], create_graph=True)
            cost = cosine_loss([f[0] for f in found], wanted)
            if x.ndim == 4:
                rough = (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
                cost = cost + VARIATION * rough / 255
            adam.zero_grad()
            cost.backward()
            if x.ndim == 4:
                guess.grad.sign_()  # type: ignore[union-attr]
            adam.step()
            fall.step()
        if cost.item() < lowest:
            best, lowest = shown(guess).detach(), cost.item()
    assert best is not None
    return best


def as_input(x: Tensor) -> Tensor:
    """Pixels as `cnn` normalises them; anything else as it is."""
    mean, std = (torch.tensor(v)[:, None, None] for v in IMAGENET)
    return (x / 255 - mean) / std if x.ndim == 4 else x


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Wang et al. (2004) with means over 8 × 8 windows, of images [n, 3, side, side] in 0 … 255; one number a pair."""
    pool = lambda x: F.avg_pool2d(x, 8, 1)  # noqa: E731
    means = pool(a), pool(b)
    own = [pool(x * x) - m * m for x, m in zip((a, b), means, strict=True)]
    both = pool(a * b) - means[0] * means[1]
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    top = (2 * means[0] * means[1] + c1) * (2 * both + c2)
    return (top / ((means[0] ** 2 + means[1] ** 2 + c1) * (sum(own) + c2))).mean((1, 2, 3))


def alike(found: Tensor, those: Tensor, mean: Tensor) -> Tensor:
    """How like each of `found` is to the nearest of `those`."""
    if found.ndim == 4:
        return torch.stack([ssim(f.expand_as(those), those).amax() for f in found])
    flat = lambda x: (x - mean).flatten(1)  # noqa: E731
    return F.cosine_similarity(flat(found)[:, None], flat(those)[None], dim=-1).amax(1)


def cell(name: str, examples: int, private: bool) -> str:
    method_name, own = METHODS[name]
    pool = Pools().load(resolve(method_name, {**DATA, **own}))
    number = {c: k for k, c in enumerate(pool.task.classes)}
    labels = torch.tensor([number[i.label] for i in pool.source.items])
    classes, each = list(range(min(examples, CLASSES))), -(-examples // CLASSES)
    scores, image = [], pool.x.ndim == 4
    mean = pool.x[:2000].float().mean(0)
    for seed in range(DRAWS[examples]):
        members, others = (rows.flatten()[:examples] for rows in drawn(labels, classes, each, seed))
        x, y = pool.x[members], labels[members]
        victim = stepped(name, x, y, pool, seed, dict(PRIVATE) if private else {})

        def start(k: int, shape: torch.Size = x.shape, seed: int = seed) -> Tensor:
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(97 * seed + k))
            return noise if image else mean + pool.x[:2000].float().std(0) * noise

        if image:
            shown: Callable[[Tensor], Tensor] = lambda g: 255 * torch.sigmoid(g)  # noqa: E731
        elif x.ndim == 2:
            shown = lambda g: F.normalize(g, dim=-1)  # noqa: E731
        else:
            shown = lambda g: g  # noqa: E731
        found = inverted(victim, y, start, shown)
        near = [alike(found, pool.x[rows].float(), mean) for rows in (members, others)]
        scores.append(torch.stack([near[0].mean(), near[1].mean(), (near[0] > near[1]).float().mean()]))
    inside, outside, share = torch.stack(scores).mean(0).tolist()
    return f"{inside:.2f} ({outside:.2f}); {100 * share:.0f} %"


def twice_differentiable(x: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """`layers.low_rank`, which is written by hand without a second derivative."""
    return layers.plain_linear(x, weight, bias) + (x @ down.mT[:, None]) @ up.mT[:, None]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(METHODS), help="methods of the table")
    parser.add_argument("--examples", default="1,4,16,64", help="images behind the step")
    args = parser.parse_args(argv)
    layers.low_rank = twice_differentiable
    counts = [int(n) for n in args.examples.split(",")]
    print("| method | dp= | " + " | ".join(map(str, counts)) + " |\n|---|---|" + "---|" * len(counts))
    for name in args.only.split(","):
        for private in (False, True):
            cells = " | ".join(cell(name, n, private) for n in counts)
            print(f"| {name} | {'example, ε = 8' if private else 'none'} | {cells} |", flush=True)
    return 0
