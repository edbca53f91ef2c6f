"""FedDTL's server (2026, §3.4): the server trains the text tower, clients train the image tower.

All clients thus share the same class vectors. Beside their parameters, clients send the normalised embeddings of their
training images and the labels. With them the server trains low-rank changes of its text tower by cross-entropy (Adam),
Σ −log [e^{scale · t_y·z} / Σ_c e^{scale · t_c·z}] over the embeddings z and labels y that arrived, and sends the class
embeddings t, which replace the frozen ones. A client needs no text tower.

**Clients send embeddings of private images**: they contain less than the pixels, but enough to tell which images of a
given set a client holds (`tools/attack.py` measures this). To send less (D.1): a share of them (`upload_share`), a fixed
number per class (`upload_count`; 16 in Table 8), means over shuffled groups per class in their place (`upload_groups`),
noise on each (`upload_noise`). What is averaged or noisy is normalised on the server: Eq. 1 is a cosine.

Training on the base classes alone also moves the embeddings of the novel ones, and after many steps away from what the
frozen model knows. `anchor` (ours; 0 in the paper) adds anchor · mean_c (1 − cos(t_c, t⁰_c)) to the loss, with t⁰_c the
frozen model's embedding of base class c.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter, HasTowers, Task, class_vectors
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, Optimiser, OptimiserSettings, by_autograd
from fedvlm.core.merge import Start
from fedvlm.core.model import Model
from fedvlm.core.ranges import Count, NotNegative, Positive, PositiveShare, Range, Whole
from fedvlm.core.schema import Field, Fields
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params, Reply, State, copy_per_client, with_client_axis
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.lora import Lora
from fedvlm.parts.merge.stages import Stages, mean_by_client, training_blocks

ADAM = "adam."  # prefix of its optimiser's state there
TOWER = "text."  # prefix of the text tower's low-rank changes, in the server's state


@dataclass(frozen=True)
class TextServer(Stages):
    text_rank: Whole = 0  # rank of the text tower's changes; 0: that of the image tower (rank=)
    text_layers: Annotated[
        int, Range(-1)
    ] = -1  # last layers of the text tower that are trained; 0: all; −1: as layers=
    text_lr: Positive = 1e-3  # learning rate of the text tower
    text_epochs: Count = 2  # passes over the received embeddings per round
    text_batch: Count = 64  # embeddings per step of the text tower
    text_moments: Literal["reset", "kept"] = "reset"  # Adam's running means of the text tower from round to round
    text_scale: NotNegative = (
        0.0  # logit scale of the text tower's loss; 0: the backbone's (2.66 in the paper is ln 14.3)
    )
    anchor: NotNegative = 0.0  # weight of the cosine distance to the frozen embeddings of the base classes; 0: none
    upload_share: PositiveShare = 1.0  # share of a client's embeddings of each class that is sent; 1: all
    upload_count: Whole = 0  # the most embeddings of each class that a client sends, drawn at random; 0: no limit
    upload_groups: Whole = 0  # means per class that a client sends in place of its embeddings; 0: the embeddings
    upload_noise: NotNegative = 0.0  # σ of the noise that is added to what a client sends; 0: none

    reveals: ClassVar[str] = "embeddings of private images, and their labels"
    effects: ClassVar[Mapping[str, str]] = {
        "text_cosine": "mean cosine between the class embeddings that are sent and the frozen ones; 1: unchanged"
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.upload_share <= 1:
            raise FedvlmError(f"upload_share={self.upload_share:g} must be above 0 and at most 1")
        if self.upload_groups < 0 or self.upload_noise < 0:
            raise FedvlmError(
                f"upload_groups={self.upload_groups} and upload_noise={self.upload_noise:g} must not be negative"
            )

    def text_adapter(self, adapter: Adapter) -> Lora:
        """What the server trains; rank and layers are those of the clients' adapter where this merge has none."""
        image = adapter if isinstance(adapter, Lora) else Lora()
        rank, layers = self.text_rank or image.rank, image.layers if self.text_layers < 0 else self.text_layers
        return Lora(rank=rank, layers=layers, projections=("q", "k", "v", "out"), towers="text")

    def uploads(self, task: Task) -> Fields:
        reach = 1 + 10 * self.upload_noise  # embeddings have length 1
        return super().uploads(task) | {
            "embeddings": Field((-1, task.dim), low=-reach, high=reach),
            "labels": Field((-1,), low=0, high=len(task.classes) - 1, whole=True),
        }

    @torch.no_grad()
    def client_values(self, model: Model, params: Params, data: Data) -> tuple[Params, dict[str, Tensor]]:
        adapter, task = model.adapter, model.task
        blocks = [
            (adapter.features(task, one, x)[0], class_vectors(adapter, task, one)[0], y)
            for one, x, y in training_blocks(params, data, adapter.limits.examples)
        ]
        correct = [(z @ text.T).argmax(-1) == y for z, text, y in blocks]
        accuracy = mean_by_client(correct, data, adapter.limits.examples)
        rows = torch.cat([z for z, *_ in blocks]) if blocks else data.x.new_empty(0, task.dim)
        sent, start = [], 0
        for i, (low, high, *_) in zip(data.ids, data.bounds, strict=True):
            n = int(high - low)
            sent.append(self.embeddings_to_send(rows[start : start + n], data.y[int(low) : int(high)], data, int(i)))
            start += n
        longest = max(len(y) for _, y in sent)
        values = {
            "accuracy": accuracy,
            "embeddings": torch.stack([F.pad(z, (0, 0, 0, longest - len(z))) for z, _ in sent]),
            "labels": torch.stack([F.pad(y.to(z), (0, longest - len(y))) for z, y in sent]),
        }
        lengths = torch.tensor([len(y) for _, y in sent])
        return values, {"embeddings": lengths, "labels": lengths}

    def embeddings_to_send(self, z: Tensor, y: Tensor, data: Data, client: int) -> tuple[Tensor, Tensor]:
        """What one client sends of its embeddings z [n, dim] with labels y [n], after all protections."""
        sources = self.source_rows(y.cpu(), data, client)  # on the CPU: thousands of tiny operations
        first = torch.tensor([int(rows[0]) for rows in sources], dtype=torch.int64)
        sent = torch.stack([z[rows].mean(0) for rows in sources]) if self.upload_groups and sources else z[first]
        if self.upload_noise:
            noise = torch.randn(sent.shape, generator=generator(data.seed, 73, client))
            sent = sent + self.upload_noise * noise.to(sent)
        return sent, y[first]

    def source_rows(self, y: Tensor, data: Data, client: int) -> list[Tensor]:
        """The rows that each embedding that is sent is the mean of: a single one without `upload_groups`."""
        if self.upload_share == 1 and not self.upload_groups and not self.upload_count:
            return list(torch.arange(len(y))[:, None])
        order = torch.randperm(len(y), generator=generator(data.seed, 71, client))
        sources: list[Tensor] = []
        for label in y.unique():
            rows = order[y[order] == label]
            # 0.28 × 25 is 7.000000000000001 in floating point and must give 7
            share = max(1, math.ceil(self.upload_share * len(rows) - 1e-9))
            rows = rows[: min(share, self.upload_count or share)]
            sources += rows.tensor_split(min(self.upload_groups or len(rows), len(rows)))
        return sources

    def incompatible(self, adapter: Adapter) -> str:
        if isinstance(adapter, HasTowers) and adapter.towers == "image":
            return ""
        return "trains the text tower while clients train the image tower; use adapter=lora towers=image"

    def init(self, model: Model, clients: int, seed: int) -> Start:
        start = super().init(model, clients, seed)
        changes = self.text_adapter(model.adapter).init(model.task, seed)
        return Start(start.server | changes, self.class_embeddings(model, changes))

    @torch.no_grad()
    def class_embeddings(self, model: Model, changes: Params) -> Params:
        """The changed text tower's embeddings of all classes to be scored: "text" and, where there are any, "novel"."""
        tasks = {"text": model.task, "novel": model.task.novel}
        adapter, params = self.text_adapter(model.adapter), with_client_axis(changes)
        return {k: adapter.class_vectors(task, params)[0] for k, task in tasks.items() if task is not None}

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        by_id: dict[int, tuple[Tensor, Tensor]] = {}  # the result must not depend on the order of replies

        def collect(reply: Reply) -> None:
            for i, z, y in zip(reply.ids.tolist(), reply.values["embeddings"], reply.values["labels"], strict=True):
                by_id[i] = z, y.long()

        after = self.train(state, cohort, collect)
        received = [by_id[i] for i in sorted(by_id)]
        changes = {k: v for k, v in after.server.items() if k.startswith(TOWER)}
        memory = {k: v for k, v in after.server.items() if k.startswith(ADAM)}
        changes, loss = self.train_text_tower(model, changes, received, cohort.round, memory)
        embeddings = self.class_embeddings(model, changes)
        cohort.notes |= {"text_loss": loss, "embeddings": sum(len(y) for _, y in received)}
        cohort.acted(text_cosine=float(cosines(embeddings["text"], model.task).mean()))
        return after._replace(task=embeddings, server=after.server | changes | memory)

    def train_text_tower(
        self,
        model: Model,
        changes: Params,
        received: list[tuple[Tensor, Tensor]],
        round: int,
        memory: Params | None = None,
    ) -> tuple[Params, float]:
        """The low-rank changes after training on the received (embeddings, labels), and the mean loss. `memory` has Adam's
        state of before where it is kept, and afterwards that of now."""
        x, y = (torch.cat(part) for part in zip(*received, strict=True))
        if self.upload_groups or self.upload_noise:
            x = F.normalize(x, dim=-1)
        settings = OptimiserSettings(self.text_lr, self.text_epochs, self.text_batch, "adam")
        params = copy_per_client(changes, 1)
        data = Data(x, y, np.array([[0, len(y), len(y), len(y)]]), np.array([0]), 0, round)
        optimiser, gradients = Optimiser(settings, params), self.text_gradients(model)
        if memory:
            optimiser.steps = int(memory[ADAM + "steps"])
            optimiser.slots = [[memory[f"{ADAM}{j}.{k}"][None].clone() for k in params] for j in range(2)]
        losses = []
        with torch.no_grad():
            for batch in data.batches(settings.batch, settings.epochs):
                each, found = gradients(params, batch)
                optimiser.step(1, found, settings.lr)
                losses.append(float(each[0]))
        if self.text_moments == "kept" and memory is not None:
            memory[ADAM + "steps"] = torch.tensor(float(optimiser.steps), dtype=torch.float64)
            memory |= {
                f"{ADAM}{j}.{k}": v[0]
                for j, slot in enumerate(optimiser.slots)
                for k, v in zip(params, slot, strict=True)
            }
        return {k: v[0] for k, v in params.items()}, float(np.mean(losses)) if losses else 0.0

    def text_gradients(self, model: Model) -> Gradients:
        """The gradients of the text tower's loss: cross-entropy, and the anchor where there is one."""
        task = model.task._replace(scale=self.text_scale) if self.text_scale else model.task
        text = Model(self.text_adapter(model.adapter), task)
        if not self.anchor:
            return text.gradients("cross-entropy")

        def loss(now: Params, batch: Batch) -> Tensor:
            logits, classes = text.adapter.logits_and_aligned(text.task, now, batch)
            distance = 1 - cosines(classes, text.task).mean(-1)
            return text.adapter.loss("cross-entropy", logits, batch) + self.anchor * distance

        return by_autograd(loss)


def cosines(classes: Tensor, task: Task) -> Tensor:
    """Cosines between class embeddings [..., classes, dim] and the frozen ones."""
    return (classes * task.names().to(classes)).sum(-1)
