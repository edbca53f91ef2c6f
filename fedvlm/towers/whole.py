"""A whole CLIP as a module, both encoders, for adapters that train all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import CLIPModel, CLIPTokenizer


class WholeModel(nn.Module):
    """`image` is hf.ImageTower. Embeddings are not normalised."""

    def __init__(self, image: nn.Module, model: CLIPModel, tokenizer: CLIPTokenizer):
        super().__init__()
        self.image, self.text, self.text_projection = image, model.text_model, model.text_projection
        self.tokenizer = tokenizer

    def tokens(self, phrases: Sequence[str]) -> dict[str, Tensor]:
        found = self.tokenizer(list(phrases), padding=True, truncation=True, return_tensors="pt")
        return {k: v.to(self.text_projection.weight.device) for k, v in found.items()}

    def forward(self, x: Tensor | None, tokens: dict[str, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Image embeddings [examples, dim] and text embeddings [phrases, dim]; empty where there is no input."""
        none = torch.zeros(0)
        images = none if x is None else self.image(x)[0]
        if tokens is None:
            return images, none
        return images, self.text_projection(self.text(**tokens).pooler_output)
