"""GalLoP (Lafon et al., ECCV 2024): some prompts read the whole image, others its best-fitting patches.

Each of the n = 4 global prompts gives cos(image, text). Each of the m = 4 local ones gives, for a class, the mean cosine
of the k patches nearest to it, every prompt at a scale of its own: k, 2k, 3k, … with k = 5. Patches first pass a learned
linear map, the identity at the start.  logits = scale · (mean of the global + mean of the local similarities)/2.
loss = cross-entropy of the global prompts that an image keeps (their mean) + Σ cross-entropy of each local prompt.
Prompt dropout: each image keeps n − ⌊0.75 n⌋ global prompts, at least one, drawn by its place among a client's batches,
so that a step stays a function of what it is given; what lies there is shuffled anew every round.

Everything is shared. The public FedGalLoP sends the global prompts alone (private=detail,projection). Our reading: all
start from draws of their own (there from "a photo of a", n times the same); local losses are added up (there averaged);
the map stands behind CLIP's projection, where our features are kept (there before it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import READ, Task
from fedvlm.adapters.prompt import Prompt
from fedvlm.core import Batch, FedvlmError, Params, linear
from fedvlm.seeds import generator, key
from fedvlm.tasks import Objective


@dataclass(frozen=True)
class Gallop(Prompt):
    wholes: int = 4  # global prompts
    details: int = 4  # local prompts
    nearest: int = 5  # k, patches that the first local prompt reads; the second twice as many, and so on
    drop: float = 0.75  # share of the global prompts that an image leaves out in training

    reads: ClassVar[str] = "patches"
    block: ClassVar[int] = 512
    most: ClassVar[int] = 2  # eight prompts a class

    def __post_init__(self) -> None:
        if self.wholes < 1 or self.details < 0 or self.nearest < 1 or not 0 <= self.drop <= 1:
            raise FedvlmError(
                f"wholes={self.wholes} and nearest={self.nearest} must be at least 1, details={self.details} at least 0, "
                f"drop={self.drop:g} between 0 and 1"
            )

    def init(self, task: Task, seed: int) -> Params:
        def several(first: int, count: int) -> Tensor:
            seeds = (key(seed, 59, i) if i else seed for i in range(first, first + count))
            return torch.stack([super(Gallop, self).init(task, s)["context"] for s in seeds])

        params = {"context": several(0, self.wholes)}
        if self.details:
            params |= {"detail": several(self.wholes, self.details), "projection": torch.eye(task.dim)}
        return params

    def prompts(self, task: Task, params: Params) -> Tensor:
        """The class vectors of each prompt, the global ones first: [clients, prompts, classes, dim]."""
        kinds = [params[k] for k in ("context", "detail") if k in params]
        read = [super(Gallop, self).classes(task, {"context": v.flatten(0, 1)}) for v in kinds]
        clients = max(map(len, kinds))
        parts = [r.unflatten(0, v.shape[:2]).expand(clients, -1, -1, -1) for r, v in zip(read, kinds, strict=True)]
        return torch.cat(parts, 1)

    def read(self, task: Task, params: Params, before: Params) -> Params:
        return params | {READ: self.prompts(task, params)}

    def classes(self, task: Task, params: Params) -> Tensor:
        return centre(self.prompts(task, params))

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return x[:, :, 0].to(params["context"])

    def similar(self, params: Params, text: Tensor, x: Tensor) -> list[Tensor]:
        """By kind, the similarities [clients, examples, prompts, classes]."""
        x, whole, detail = x.to(text), text[:, : self.wholes], text[:, self.wholes :]
        found = [torch.einsum("knd,kmcd->knmc", x[:, :, 0], whole)]
        if self.details:
            moved = F.normalize(linear(x[:, :, 1:].flatten(1, 2), params["projection"]), dim=-1)
            cosines = torch.einsum("knpd,kmcd->knmcp", moved.unflatten(1, (x.shape[1], x.shape[2] - 1)), detail)
            scales = [min(self.nearest * (m + 1), cosines.shape[-1]) for m in range(cosines.shape[2])]
            best = cosines.topk(scales[-1]).values
            found.append(torch.stack([best[:, :, m, :, :k].mean(-1) for m, k in enumerate(scales)], 2))
        return found

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        found = self.similar(params, params[READ] if READ in params else self.prompts(task, params), x)
        return task.scale * torch.stack([kind.mean(2) for kind in found]).mean(0)

    def training(self, task: Task, params: Params, batch: Batch) -> Tensor:
        return self.both(task, params, batch)[0]

    def both(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [clients, examples, 1 + local prompts, classes]: of the global prompts kept, then of each local one."""
        text = self.prompts(task, params)
        whole, *details = self.similar(params, text, batch.x)
        kept = self.kept(batch)[..., None].to(whole)
        return task.scale * torch.cat([(whole * kept).sum(2, keepdim=True), *details], 2), centre(text)

    def kept(self, batch: Batch) -> Tensor:
        """What each global prompt counts for each image, [examples, prompts]: 1/(prompts kept), or 0."""
        drawn = torch.rand(batch.y.shape[1], self.wholes, generator=generator(61, batch.step)).argsort(1).argsort(1)
        keep = max(1, self.wholes - int(self.drop * self.wholes))
        return (drawn < keep) / keep

    def loss(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        return torch.stack([self.learns.losses[objective](one, batch) for one in logits.unbind(2)]).sum(0)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return torch.stack([super(Gallop, self).losses(one, y) for one in logits.unbind(2)]).sum(0)


def centre(text: Tensor) -> Tensor:
    """One vector a class: the mean over all prompts, normalised."""
    return F.normalize(text.mean(1), dim=-1)
