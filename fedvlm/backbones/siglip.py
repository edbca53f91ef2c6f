"""SigLIP and SigLIP 2 of fixed resolution, in Hugging Face format (Zhai et al., 2023; Tschannen et al., 2025).

SigLIP is trained with a sigmoid for each pair of image and text, σ(scale · cos + bias). The methods here use a softmax
over the classes, softmax(scale · cos): the bias is the same for all classes, so that it drops out, and the scale is kept.

The text tower is not causal and reads the last position of a text padded to the tower's length. Texts are cleaned as the
model's own tokenizer does: lower case and, for the first SigLIP, no punctuation.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from fedvlm.backbones.base import RAW, ViewFormat
from fedvlm.backbones.hf import Clip, ImageTower
from fedvlm.backbones.model_folder import loading
from fedvlm.backbones.tokenizers import SiglipTokenizer, special_tokens
from fedvlm.towers.text import Tokenizer, padded


class Siglip(Clip):
    views: ClassVar[tuple[str, ...]] = ("embedding", RAW, "hidden", "pixels")
    towers: ClassVar[tuple[str, ...]] = ("image tower", "text tower", "both towers")
    note = (
        "SigLIP is trained with a sigmoid per class, σ(scale · cos + bias); methods here use a softmax over the classes, "
        "where the bias drops out, with SigLIP's own scale"
    )

    def __init__(self, name: str, folder: Path):
        super().__init__(name, folder)
        # the pooled image state is the embedding: there is no projection
        self.dim = int(self.vision_config.get("hidden_size", 768))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        with loading(self.folder):
            first = special_tokens(self.folder).get("tokenizer_class", "").startswith("SiglipTokenizer")
            return SiglipTokenizer(self.folder, keeps_punctuation=not first)

    def embeddings_of(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.model.vision_model(pixels).pooler_output
        return found

    def texts_together(self, phrases: Sequence[str]) -> Tensor:
        text = self.model.text_model
        longest = text.config.max_position_embeddings
        ids = padded(self.tokenizer.phrases(phrases, longest), self.tokenizer.pad_token_id, longest)
        found: Tensor = text(ids.to(self.device)).pooler_output
        return found

    def view_format(self, view: str) -> ViewFormat | None:
        if view == "patches":
            return None
        found = super().view_format(view)
        if view.startswith("hidden@") and found is not None:
            return found._replace(shape=(found.shape[0] - 1, *found.shape[1:]))  # there is no class token
        return found

    @cached_property
    def image_tower(self) -> ImageTower:
        return ImageTower(copy.deepcopy(self.frozen).vision_model, nn.Identity(), self.processor)
