"""FedCLIP with an adapter on the text side (Lu et al., 2023, Figure 3a): masks of image and class embeddings.

As adapter=attention on images, and a second mask of its own on class embeddings, t* = a(t)·t / ‖a(t)·t‖; logits =
scale · cos(h*, t*). With images=false the text side alone has one. Class embeddings are kept normalised, so that the
text side's mask sees vectors of length 1 (our reading; the paper says only that an adapter is added).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Task
from fedvlm.core.data import Batch
from fedvlm.core.seeds import key
from fedvlm.core.state import Params
from fedvlm.parts.adapters.attention import Attention

TEXT = "text."  # prefix of the text side's parameters


@dataclass(frozen=True)
class TwoMasks(Attention):
    images: bool = True  # false: no mask on images, which keep their embedding

    @property
    def view(self) -> str:  # type: ignore[override]
        return "raw" if self.images else "embedding"

    @property
    def alignment(self) -> Literal["images", "classes"]:  # type: ignore[override]
        return "images" if self.images else "classes"

    def init(self, task: Task, seed: int) -> Params:
        text = {TEXT + k: v for k, v in super().init(task, key(seed, 83)).items()}
        return text | (super().init(task, seed) if self.images else {})

    def text_side(self, params: Params) -> Params:
        return {k.removeprefix(TEXT): v for k, v in params.items() if k.startswith(TEXT)}

    def diagnose(self, task: Task, params: Params, x: Tensor) -> Params:
        """Diagnostics of the mask on images; with images=false, of that on class embeddings, which takes the place of
        images."""
        if self.images:
            return super().diagnose(task, params, x)
        text = self.text_side(params)
        return super().diagnose(task, text, task.names()[None].to(text["w1"]))

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        text = self.text_side(params)
        return F.normalize(self.masked(text, task.names()[None].to(text["w1"])), dim=-1)

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return super().features(task, params, x) if self.images else x.to(params[TEXT + "w1"])

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * self.features(task, params, x) @ self.class_vectors(task, params).mT

    def logits_and_aligned(self, task: Task, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        classes = self.class_vectors(task, params)
        if not self.images:
            return task.scale * self.features(task, params, batch.x) @ classes.mT, classes
        masked = self.masked(params, batch.x)
        return task.scale * F.normalize(masked, dim=-1) @ classes.mT, task.dim * masked
