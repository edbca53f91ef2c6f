"""A whole CLIP as a module, both encoders, for adapters that train all of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedvlm.towers.modules import TwoTowers
from fedvlm.towers.text import Tokenizer, padded


class WholeModel(nn.Module):
    """`image` is hf.ImageTower. Embeddings are not normalised."""

    def __init__(self, image: nn.Module, model: TwoTowers, tokenizer: Tokenizer):
        super().__init__()
        self.image, self.text, self.text_projection = image, model.text_model, model.text_projection
        self.tokenizer = tokenizer

    def tokens(self, phrases: Sequence[str]) -> Tensor:
        longest = self.text.config.max_position_embeddings
        ids = padded(self.tokenizer.phrases(phrases, longest), self.tokenizer.pad_token_id)
        return ids.to(self.text_projection.weight.device)

    def forward(self, x: Tensor | None, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Image embeddings [examples, dim] and text embeddings [phrases, dim]; empty where there is no input."""
        none = torch.zeros(0)
        images = none if x is None else self.image(x)[0]
        if tokens is None:
            return images, none
        return images, self.text_projection(self.text(tokens).pooler_output)
