"""GalLoP (Lafon et al., ECCV 2024): global prompts for the whole image, local ones for its nearest patches.

Each of the n = 4 global prompts gives cos(image, text). Each of the m = 4 local prompts gives, per class, the mean
cosine of the patches nearest to it: k = 5 patches for the first prompt, 2k for the second, 3k, … Patches first pass
through a learned linear map, which starts as the identity.
logits = scale · (mean of the global + mean of the local similarities)/2.
loss = cross-entropy of the mean over the global prompts kept for an image + Σ cross-entropy of each local prompt.
Prompt dropout: per image n − ⌊0.75 n⌋ global prompts are kept, at least one. They are drawn from seed,
round, step and the image's place in the batch, the same for all clients.

Shared: the global prompts. Private, as in the public FedGalLoP: the local prompts and the map; private=[] shares them
too (the recipe fedgallop-all-shared). For a newcomer, who has none, the global prompts take the place of the local
ones, and the map is the identity. Our reading: each prompt starts from its own random draw (there from "a photo of
a", n times the same); local losses are summed (there averaged); the map comes after CLIP's projection, since stored
features are projected (there before it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import TEXT_FEATURES, Limits, Task
from fedvlm.core.data import Batch
from fedvlm.core.ranges import Count, Share, Whole
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params, linear
from fedvlm.core.tasks import Objective
from fedvlm.parts.adapters.prompt import Prompt
from fedvlm.parts.adapters.several import draw_contexts, encode_contexts


@dataclass(frozen=True)
class Gallop(Prompt):
    private: tuple[str, ...] = ("detail", "projection")
    global_prompts: Count = 4  # n, global prompts
    local_prompts: Whole = 4  # m, local prompts; 0: none
    patches: Count = 5  # k, patches that the first local prompt is compared with; 2k for the second, and so on
    drop: Share = 0.75  # share of the global prompts that are dropped per image in training; 0: none

    view: ClassVar[str] = "patches"
    limits: ClassVar[Limits] = Limits(examples=512, clients=2, gpu=True)  # eight prompts per class

    def init(self, task: Task, seed: int) -> Params:
        params = {"context": draw_contexts(self, task, seed, self.global_prompts)}
        if self.local_prompts:
            detail = draw_contexts(self, task, seed, self.local_prompts, self.global_prompts)
            params |= {"detail": detail, "projection": torch.eye(task.dim)}
        return params

    def __post_init__(self) -> None:
        if not self.local_prompts:  # nothing that could be private
            object.__setattr__(self, "private", tuple(p for p in self.private if p not in ("detail", "projection")))

    def shared_only(self, params: Params) -> Params:
        if not self.local_prompts:
            return params
        globals_in_turn = torch.arange(self.local_prompts) % self.global_prompts
        eye = torch.eye(params["projection"].shape[-1]).to(params["projection"])
        detail = params["context"][:, globals_in_turn].expand_as(params["detail"])
        return params | {"detail": detail, "projection": eye.expand_as(params["projection"])}

    def prompts(self, task: Task, params: Params) -> Tensor:
        """The class vectors of each prompt, the global ones first: [clients, prompts, classes, dim]."""
        contexts = [params[k] for k in ("context", "detail") if k in params]
        clients = max(map(len, contexts))  # shared contexts may have a client axis of length one
        return torch.cat([encode_contexts(self, task, v).expand(clients, -1, -1, -1) for v in contexts], 1)

    def prepare(self, task: Task, params: Params, before: Params) -> Params:
        return params | {TEXT_FEATURES: self.prompts(task, params)}

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        return mean_over_prompts(self.prompts(task, params))

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return x[:, :, 0].to(params["context"])

    def similarities(self, params: Params, text: Tensor, x: Tensor) -> list[Tensor]:
        """Similarities to the global prompts and, if any, to the local ones: [clients, examples, prompts, classes]
        each."""
        x, global_text, local_text = x.to(text), text[:, : self.global_prompts], text[:, self.global_prompts :]
        found = [torch.einsum("knd,kmcd->knmc", x[:, :, 0], global_text)]
        if self.local_prompts:
            patches = F.normalize(linear(x[:, :, 1:].flatten(1, 2), params["projection"]), dim=-1)
            cosines = torch.einsum("knpd,kmcd->knmcp", patches.unflatten(1, (x.shape[1], x.shape[2] - 1)), local_text)
            counts = [min(self.patches * (m + 1), cosines.shape[-1]) for m in range(cosines.shape[2])]
            largest = cosines.topk(counts[-1]).values
            found.append(torch.stack([largest[:, :, m, :, :k].mean(-1) for m, k in enumerate(counts)], 2))
        return found

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        text = params[TEXT_FEATURES] if TEXT_FEATURES in params else self.prompts(task, params)
        return task.scale * torch.stack([each.mean(2) for each in self.similarities(params, text, x)]).mean(0)

    def train_logits(self, task: Task, params: Params, batch: Batch) -> Tensor:
        return self.logits_and_aligned(task, params, batch)[0]

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [clients, examples, 1 + local prompts, classes]: the mean of the global prompts kept, then each local
        prompt's."""
        text = self.prompts(task, params)
        whole, *details = self.similarities(params, text, batch.x)
        weight = self.prompt_weights(batch)[..., None].to(whole)
        logits = torch.cat([(whole * weight).sum(2, keepdim=True), *details], 2)
        return task.scale * logits, mean_over_prompts(text)

    def prompt_weights(self, batch: Batch) -> Tensor:
        """Prompt dropout: the weight of each global prompt per image, [examples, prompts]: 1/(prompts kept), or 0."""
        draw = generator(*batch.drawn, 61, batch.step)
        ranks = torch.rand(batch.y.shape[1], self.global_prompts, generator=draw).argsort(1).argsort(1)
        kept = max(1, self.global_prompts - int(self.drop * self.global_prompts))
        return (ranks < kept) / kept

    def loss(self, objective: Objective, logits: Tensor, batch: Batch) -> Tensor:
        return torch.stack([self.task_type.losses[objective](one, batch) for one in logits.unbind(2)]).sum(0)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return torch.stack([super(Gallop, self).losses(one, y) for one in logits.unbind(2)]).sum(0)


def mean_over_prompts(text: Tensor) -> Tensor:
    """One vector per class: the mean over all prompts, normalised."""
    return F.normalize(text.mean(1), dim=-1)
