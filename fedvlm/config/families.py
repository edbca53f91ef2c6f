"""Families of methods: what kind of thing is trained. Lists group by them, and charts take their colours from them."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    when: str  # when to use it, in a line
    adapters: tuple[str, ...]  # whose methods belong to it


REFERENCE, ONE_ROUND = "references", "one round"
FAMILIES = {
    ONE_ROUND: Family("first of all: one exchange in closed form, seconds, no learning rate", ("affine", "named")),
    "heads": Family(
        "the usual second step: a small classifier, few bytes, nothing to encode again",
        ("head", "memory", "mlp", "guided"),
    ),
    "adapters": Family(
        "a map of the embeddings, shared or private, where heads are level with each other",
        ("attention", "two_masks", "rotation", "linear", "clip_adapter"),
    ),
    "prompts": Family(
        "few images per class, new classes or outsiders; needs a text tower, and minutes instead of seconds",
        (
            *("prompt", "conditional", "factored", "gallop", "lapt", "background", "groups", "transported", "lowrank"),
            *("generated", "outsiders", "experts", "prompt_memory", "plot", "proda", "portfolio", "server_coop"),
        ),
    ),
    "inside the towers": Family(
        "images far from what the backbone knows, with a GPU: LoRA, visual prompts, both towers",
        ("lora", "small", "residual", "ffa", "visual", "visual_head", "maple", "crossed", "mma", "independent"),
    ),
    "whole networks": Family(
        "everything is trained and sent: other tasks, or as a reference",
        ("both_towers", "tower", "alexnet", "cnn", "lstm", "resnet", "unet"),
    ),
    REFERENCE: Family("what others are compared with: nothing trained, each alone, all images in one place", ("none",)),
}
IN_ONE_ROUND = ("moments",)  # merges
REFERENCES = ("zero-shot", "local-only", "centralised")
PAPERS = ("fedclip", "fedot", "fft-gp", "focoop", "feddtl")  # of the five papers that fedvlm reproduces


def family(method: str, adapter: str, merge: str) -> str:
    """The family of a method; of an adapter that nobody knows here, that of adapters."""
    if method in REFERENCES:
        return REFERENCE
    if merge in IN_ONE_ROUND or method == "tip-adapter":
        return ONE_ROUND
    return next((name for name, found in FAMILIES.items() if adapter in found.adapters), "adapters")
