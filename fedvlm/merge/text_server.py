"""FedDTL's server (2026, §3.4): it trains the text tower, and clients the image tower, so that all pull at one set of words.

Clients send, beside their parameters, the normalised embeddings of their own training images and the labels. With them the
server trains low-rank changes of its text tower by cross-entropy (Adam), and sends down the class embeddings, which take
the place of the frozen ones. A client needs no text tower.

**What is sent up are embeddings of private images**: less than the pixels, and enough to tell which images of a given set a
client holds (`fedvlm attack` measures it). To send less (D.1): `upload` a share of them, `groups` shuffled means a class in
their place, `blur` noise on each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import Adapter, HasTowers, Task, class_vectors
from fedvlm.adapters.lora import Lora
from fedvlm.core import Cohort, Data, FedvlmError, Params, Reply, State, copy_per_client, with_client_axis
from fedvlm.local.base import Shapes
from fedvlm.local.descent import OptimiserSettings, optimise
from fedvlm.local.model import Model
from fedvlm.merge.base import Start
from fedvlm.merge.stages import Stages, mean_by_client, training_blocks
from fedvlm.seeds import generator

TOWER = "text."  # prefix of the text tower's low-rank changes, in the server's state


@dataclass(frozen=True)
class TextServer(Stages):
    text_rank: int = 4
    text_layers: int = 2  # of the text tower that are trained, the last; 0 is all
    text_lr: float = 1e-3
    text_epochs: int = 2  # over what clients sent, each round
    text_batch: int = 64
    upload: float = 1.0  # share of each class's embeddings that is sent
    groups: int = 0  # so many means a class in place of the embeddings; 0 sends these
    blur: float = 0.0  # σ of noise on what is sent

    reveals: ClassVar[str] = "embeddings of private images, and their labels"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.upload <= 1 and self.groups >= 0 and self.blur >= 0):
            raise FedvlmError(
                f"upload={self.upload:g} must be above 0 and at most 1, groups={self.groups}, blur={self.blur:g} 0 or more"
            )

    @property
    def reader(self) -> Lora:
        return Lora(rank=self.text_rank, layers=self.text_layers, projections=("q", "k", "v", "out"), towers="text")

    def uploads(self, task: Task) -> Shapes:
        return super().uploads(task) | {"embeddings": (-1, task.dim), "labels": (-1,)}

    @torch.no_grad()
    def client_values(self, model: Model, params: Params, data: Data) -> tuple[Params, dict[str, Tensor]]:
        adapter, task = model.adapter, model.task
        parts = [
            (adapter.features(task, one, x)[0], class_vectors(adapter, task, one)[0], y)
            for one, x, y in training_blocks(params, data, adapter.limits.examples)
        ]
        accuracy = mean_by_client([(z @ text.T).argmax(-1) == y for z, text, y in parts], data, adapter.limits.examples)
        rows = torch.cat([z for z, *_ in parts]) if parts else data.x.new_empty(0, task.dim)
        sent, start = [], 0
        for i, (low, high, *_) in zip(data.ids, data.bounds, strict=True):
            n = int(high - low)
            sent.append(self.lessen(rows[start : start + n], data.y[int(low) : int(high)], data, int(i)))
            start += n
        longest = max(len(y) for _, y in sent)
        values = {
            "accuracy": accuracy,
            "embeddings": torch.stack([F.pad(z, (0, 0, 0, longest - len(z))) for z, _ in sent]),
            "labels": torch.stack([F.pad(y.to(z), (0, longest - len(y))) for z, y in sent]),
        }
        lengths = torch.tensor([len(y) for _, y in sent])
        return values, {"embeddings": lengths, "labels": lengths}

    def lessen(self, z: Tensor, y: Tensor, data: Data, client: int) -> tuple[Tensor, Tensor]:
        """What of a client's embeddings is sent, with labels."""
        made = self.made_of(y.cpu(), data, client)  # thousands of tiny steps: nothing for a GPU
        first = torch.tensor([int(rows[0]) for rows in made], dtype=torch.int64)
        sent = torch.stack([z[rows].mean(0) for rows in made]) if self.groups and made else z[first]
        if self.blur:
            noise = torch.randn(sent.shape, generator=generator(data.seed, 73, client))
            sent = sent + self.blur * noise.to(sent)
        return sent, y[first]

    def made_of(self, y: Tensor, data: Data, client: int) -> list[Tensor]:
        """The rows that go into each embedding that is sent: one, or a group's."""
        if self.upload == 1 and not self.groups:
            return list(torch.arange(len(y))[:, None])
        order = torch.randperm(len(y), generator=generator(data.seed, 71, client))
        made: list[Tensor] = []
        for label in y.unique():
            mine = order[y[order] == label]
            mine = mine[: max(1, math.ceil(self.upload * len(mine) - 1e-9))]  # 0.28 × 25 is 7.000000000000001: means 7
            made += mine.tensor_split(min(self.groups or len(mine), len(mine)))
        return made

    def incompatible(self, adapter: Adapter) -> str:
        if isinstance(adapter, HasTowers) and adapter.towers == "image":
            return ""
        return "trains the text tower, beside clients that train the image tower; use adapter=lora towers=image"

    def init(self, model: Model, clients: int, seed: int) -> Start:
        start = super().init(model, clients, seed)
        changes = self.reader.init(model.task, seed)
        return Start(start.server | changes, self.embeddings(model.task, changes))

    def embeddings(self, task: Task, changes: Params) -> Params:
        """The class embeddings of all classes that will be scored, as the changed text tower computes them."""
        with torch.no_grad():
            found = {"text": self.reader.class_vectors(task, with_client_axis(changes))[0]}
            if task.novel is not None:
                found["novel"] = self.reader.class_vectors(task.novel, with_client_axis(changes))[0]
        return found

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        by_id: dict[int, tuple[Tensor, Tensor]] = {}

        def collect(reply: Reply) -> None:
            for i, z, y in zip(reply.ids.tolist(), reply.values["embeddings"], reply.values["labels"], strict=True):
                by_id[i] = z, y.long()

        after = self.train(state, cohort, collect)
        heard = [by_id[i] for i in sorted(by_id)]
        changes = {k: v for k, v in after.server.items() if k.startswith(TOWER)}
        changes, loss = self.learn(model, changes, heard, cohort.round)
        cohort.notes |= {"text_loss": loss, "embeddings": sum(len(y) for _, y in heard)}
        return after._replace(task=self.embeddings(model.task, changes), server=after.server | changes)

    def learn(
        self, model: Model, changes: Params, heard: list[tuple[Tensor, Tensor]], round: int
    ) -> tuple[Params, float]:
        x, y = (torch.cat(part) for part in zip(*heard, strict=True))
        settings = OptimiserSettings(self.text_lr, self.text_epochs, self.text_batch, "adam")
        params = copy_per_client(changes, 1)
        data = Data(x, y, np.array([[0, len(y), len(y), len(y)]]), np.array([0]), 0, round)
        loss = optimise(settings, params, data, Model(self.reader, model.task).gradients("cross-entropy"))
        return {k: v[0] for k, v in params.items()}, float(loss[0])
