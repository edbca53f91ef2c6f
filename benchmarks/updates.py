"""What an update tells of single images when the server breaks no rule but chooses the model that is trained:

    python benchmarks/attacks.py updates

One site trains fedavg (a linear head on mini-clip's embeddings of emoji, ten classes) for a round from a head of zeros. The
server takes a class's row of the update for an embedding and compares it with candidates: as many images of the class that
were trained on (members) as others. A cell is the mean cosine, without the mean embedding, with the nearest member and with
the nearest other image, and how often a member is the nearest (chance is 50 %), over classes and draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.config.config import resolve
from fedvlm.core.data import Data
from fedvlm.core.state import Message
from fedvlm.data.clients import Federation
from fedvlm.data.pool import Pools
from fedvlm.engines.stacked import Stacked
from fedvlm.rounds.method import Method
from fedvlm.training.privacy_plan import planned

EACH, CLASSES, DRAWS = (1, 2, 4, 8, 16, 64), 10, 10


def drawn(y: Tensor, classes: list[int], each: int, seed: int) -> tuple[Tensor, Tensor]:
    """Members and others, [classes, each] rows of the pool."""
    draw = np.random.default_rng(seed)
    rows = [draw.permutation(np.flatnonzero(y.numpy() == c))[: 2 * each] for c in classes]
    both = torch.from_numpy(np.stack(rows))
    return both[:, :each], both[:, each:]


def recovered(x: Tensor, members: Tensor, keys: dict[str, object], pool: object, seed: int) -> Tensor:
    """The rows of the update, [classes, dim]."""
    setup = resolve("fedavg", {"engine": "serial", "seed": seed} | keys)
    task = pool.task._replace(classes=pool.task.classes[:CLASSES])  # type: ignore[attr-defined]
    task = task._replace(text=task.text[:CLASSES] if task.text is not None else None)
    flat = members.flatten()
    y = torch.arange(len(members)).repeat_interleave(members.shape[1])
    data = Data(x[flat], y, np.array([[0, len(flat), len(flat), len(flat)]]), np.array([0]), seed, 0, 1)
    method = Method.build(setup.adapter, setup.local, setup.merge, task, seed, setup.metrics)
    privacy = planned(setup, Federation(("site",), ("site",), data, task))
    method = replace(method, privacy=privacy)
    message = Message({k: torch.zeros_like(v) for k, v in method.initial.items()})
    (reply,) = Stacked(method, data, 1).run("train", np.array([0]), message, 1, 0)
    return reply.shared["head"][0]


def nearest(found: Tensor, x: Tensor, members: Tensor, others: Tensor) -> Tensor:
    """Cosine with the nearest member and the nearest other image, and whether the first is larger, [3]."""
    mean = x.mean(0)
    cosines = [(F.cosine_similarity(found[:, None], x[rows] - mean, dim=-1)).amax(1) for rows in (members, others)]
    return torch.stack([*cosines, (cosines[0] > cosines[1]).float()]).mean(1)


def main(_: Sequence[str] = ()) -> int:
    setup = resolve("fedavg", {"data": "emoji"})
    pool = Pools().load(setup)
    number = {c: k for k, c in enumerate(pool.task.classes)}
    y = torch.tensor([number[i.label] for i in pool.source.items])
    classes = torch.bincount(y).argsort(descending=True)[:CLASSES].tolist()
    print("| examples of a class | without dp= | dp=example epsilon=8 |\n|---|---|---|")
    for each in EACH:
        cells = []
        for keys in ({}, {"dp": "example", "epsilon": 8.0, "delta": 1e-3, "rounds": 1}):
            found = []
            for seed in range(DRAWS):
                members, others = drawn(y, classes, each, seed)
                rows = recovered(pool.x, members, keys, pool, seed)
                found.append(nearest(rows, pool.x, members, others))
            member, other, share = torch.stack(found).mean(0).tolist()
            cells.append(f"{member:.2f}, {other:.2f}; {100 * share:.0f} %")
        print(f"| {each} | {' | '.join(cells)} |", flush=True)
    return 0
