"""Short names of weights on the Hugging Face hub: where they come from, about how large they are, under
which licence as we know it: the hub's own page counts."""

from __future__ import annotations

from typing import NamedTuple


class Weights(NamedTuple):
    source: str  # on the hub
    size: str  # about, of the files that are fetched
    licence: str


WEIGHTS = {
    "clip-b32": Weights("openai/clip-vit-base-patch32", "605 MB", "MIT"),
    "clip-b16": Weights("openai/clip-vit-base-patch16", "599 MB", "MIT"),
    "clip-l14": Weights("openai/clip-vit-large-patch14", "1.7 GB", "MIT"),
    "siglip-b16": Weights("google/siglip-base-patch16-224", "813 MB", "Apache-2.0"),
    "dinov2-b14": Weights("facebook/dinov2-base", "346 MB", "Apache-2.0"),
    "biomedclip": Weights("microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224", "784 MB", "MIT"),
}


def in_full(name: str) -> str:
    """The hub's name of a short one; any other name as it is."""
    return WEIGHTS[name].source if name in WEIGHTS else name
