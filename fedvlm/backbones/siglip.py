"""SigLIP and SigLIP 2 of fixed resolution, in Hugging Face format (Zhai et al., 2023; Tschannen et al., 2025).

SigLIP is trained with a sigmoid for each pair of image and text, σ(scale · cos + bias). The methods here use a softmax
over the classes, softmax(scale · cos): the bias is the same for all classes, so that it drops out, and the scale is kept.

The text tower is not causal and reads the last position of a text padded to the tower's length. Texts are cleaned as the
model's own tokenizer does: lower case and, for the first SigLIP, no punctuation.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.backbones.base import RAW, ViewFormat
from fedvlm.backbones.hf import Clip, ImageTower, Processor
from fedvlm.backbones.model_folder import loading
from fedvlm.core.records import parsed, read_text
from fedvlm.errors import FedvlmError
from fedvlm.towers.products import fast_linear
from fedvlm.towers.text import TextTower
from fedvlm.towers.vision import ImageLayers, Towers

if TYPE_CHECKING:
    from transformers import SiglipModel

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def canonical(text: str) -> str:
    """The first SigLIP's cleaning: lower case, no punctuation, single spaces."""
    return " ".join(text.lower().translate(NO_PUNCTUATION).split())


class PaddedTokenizer:
    """A tokenizer.json whose texts end with one end-of-text token; the tower pads them."""

    def __init__(self, folder: Path, keeps_punctuation: bool):
        from tokenizers import Tokenizer as Tokens

        if not (folder / "tokenizer.json").is_file():
            raise FedvlmError(
                f"backbone={folder}: no tokenizer.json in that folder; save it there with transformers and sentencepiece: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        self.tokens = Tokens.from_file(str(folder / "tokenizer.json"))
        self.tokens.no_padding()
        self.tokens.no_truncation()
        self.folder, self.keeps_punctuation = folder, keeps_punctuation
        settings = special_tokens(folder)
        self.bos_token_id = self.eos_token_id = self._id(settings.get("eos_token", "</s>"))
        self.pad_token_id = self._id(settings.get("pad_token", "</s>"))

    def _id(self, token: str) -> int:
        found: int | None = self.tokens.token_to_id(token)
        if found is None:
            raise FedvlmError(
                f"backbone={self.folder}: the tokenizer has no token {token!r}, which its tokenizer_config.json names"
            )
        return found

    def __call__(self, text: list[str], **options: bool | int) -> Mapping[str, list[list[int]]]:
        """With add_special_tokens=False, the texts' tokens alone; else at most max_length, the end token included."""
        cleaned = [t.lower() if self.keeps_punctuation else canonical(t) for t in text]
        ids = [e.ids for e in self.tokens.encode_batch(cleaned, add_special_tokens=False)]
        if options.get("add_special_tokens", True):
            longest = int(options["max_length"])
            ids = [[*one[: longest - 1], self.eos_token_id] for one in ids]
        return {"input_ids": ids}


def special_tokens(folder: Path) -> dict[str, str]:
    """The entries of tokenizer_config.json that are texts, or objects with a text as "content"."""
    path = folder / "tokenizer_config.json"
    found = parsed(read_text(path)) if path.is_file() else {}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in found.items()}
    return {k: v for k, v in texts.items() if isinstance(v, str)}


class Siglip(Clip):
    kind = "SiglipModel"
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

    @property
    def siglip(self) -> SiglipModel:
        return cast("SiglipModel", self.model)

    @cached_property
    def processor(self) -> Processor:
        from transformers import AutoImageProcessor

        with loading(self.folder):
            found = AutoImageProcessor.from_pretrained(self.folder, backend="pil", trust_remote_code=False)
        return cast(Processor, found)

    @cached_property
    def tokenizer(self) -> PaddedTokenizer:
        with loading(self.folder):
            first = special_tokens(self.folder).get("tokenizer_class", "").startswith("SiglipTokenizer")
            return PaddedTokenizer(self.folder, keeps_punctuation=not first)

    @torch.no_grad()
    def embeddings(self, images: Sequence[Image.Image]) -> Tensor:
        pixels = self.pixels(images)
        with fast_linear(pixels):
            found: Tensor = self.siglip.vision_model(pixel_values=pixels).pooler_output
        return found

    @torch.no_grad()
    def texts(self, phrases: Sequence[str]) -> Tensor | None:
        text = self.siglip.text_model
        length, pad = text.config.max_position_embeddings, self.tokenizer.pad_token_id
        ids = self.tokenizer(list(phrases), max_length=length)["input_ids"]
        padded = torch.tensor([one + [pad] * (length - len(one)) for one in ids], device=self.device)
        return F.normalize(text(input_ids=padded).pooler_output, dim=-1).cpu()

    def view_format(self, view: str) -> ViewFormat | None:
        if view == "patches":
            return None
        found = super().view_format(view)
        if view.startswith("hidden@") and found is not None:
            return found._replace(shape=(found.shape[0] - 1, *found.shape[1:]))  # there is no class token
        return found

    def first_layer_input(self, images: Sequence[Image.Image]) -> Tensor:
        found: Tensor = self.siglip.vision_model.embeddings(self.pixels(images))
        return found

    @cached_property
    def image_tower(self) -> ImageTower:
        return ImageTower(self.load().vision_model, nn.Identity(), self.processor)

    @cached_property
    def text_tower(self) -> TextTower:
        return TextTower.of_siglip(cast("SiglipModel", self.load()), self.tokenizer)

    @cached_property
    def both_towers(self) -> Towers:
        model = cast("SiglipModel", self.load())
        return Towers(ImageLayers.of_siglip(model), TextTower.of_siglip(model, self.tokenizer))
