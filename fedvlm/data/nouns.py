"""Names for outsiders, which is what we call out-of-distribution images and names: nouns of WordNet (Fellbaum 1998)
that are far from every class name (FOCoOp 2025, §3.2).

A noun's closeness is the 95th percentile of its cosines to the class names, so that a single close class does not
exclude it; the nouns with the lowest closeness are chosen. As printed, d = percentile_η of −cos and the U largest d are
chosen, η not given; the 95th percentile of cos is NegLabel's η = 0.05 (Jiang et al. 2024), which the paper follows.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import Tensor

from fedvlm.errors import FedvlmError

NOUNS = Path(__file__).parent / "assets" / "nouns.txt.gz"  # made by tools/build_nouns.py
CHUNK = 10_000_000  # cosines at a time: torch.quantile takes at most 16 million


def nouns() -> list[str]:
    """About 39,000 nouns for visible things, in alphabetical order."""
    lines = gzip.decompress(NOUNS.read_bytes()).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def farthest_nouns(similarity: Tensor, count: int, percentile: float = 0.95) -> Tensor:
    """Indices [count] of the nouns farthest from the classes, farthest first and ties in order, given the cosines
    [nouns, classes] between nouns and class names."""
    available, classes = similarity.shape
    if not 0 <= count <= available:
        raise FedvlmError(f"{count} outsiders were asked for, and there are {available} nouns to choose from")
    if not classes or not 0 <= percentile <= 1:
        raise FedvlmError(
            f"the percentile must be between 0 and 1, not {percentile}, and there must be classes, not {classes}"
        )
    if similarity.isnan().any():
        raise FedvlmError("some cosines to the class names are not a number; is an embedding all zero?")
    work = similarity.detach().to(torch.promote_types(similarity.dtype, torch.float32))
    closeness = torch.cat([part.quantile(percentile, dim=1) for part in torch.split(work, max(1, CHUNK // classes))])
    return closeness.sort(stable=True).indices[:count]
