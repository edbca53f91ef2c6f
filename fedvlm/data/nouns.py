"""Names for outsiders: WordNet's nouns (Fellbaum 1998) and which of them are far from every class (FOCoOp 2025, §3.2).

A noun's closeness is the 95th percentile of its cosines to the class names, so that one odd class does not decide; the
nouns with the lowest closeness are chosen. As printed, d = percentile_η of −cos and the U largest d, η not given; the
95th percentile of cos is NegLabel's η = 0.05 (Jiang et al. 2024), which the paper follows.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import Tensor

from fedvlm.core import FedvlmError

NOUNS = Path(__file__).parent / "assets" / "nouns.txt.gz"  # made by tools/build_nouns.py
PART = 10_000_000  # torch.quantile takes at most 16 million numbers


def nouns() -> list[str]:
    """Some 39,000 nouns for things one can see, in alphabetical order."""
    lines = gzip.decompress(NOUNS.read_bytes()).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def outsiders(similarity: Tensor, count: int, percentile: float = 0.95) -> Tensor:
    """Which nouns [count] to take, given their cosines to the class names [nouns, classes]: farthest first, and the
    earlier noun where two are equally far."""
    found, classes = similarity.shape
    if not 0 <= count <= found:
        raise FedvlmError(f"{count} outsiders were asked for, and there are {found} nouns to choose from")
    if not classes or not 0 <= percentile <= 1:
        raise FedvlmError(
            f"closeness is a percentile between 0 and 1, not {percentile}, over the classes, not {classes}"
        )
    if similarity.isnan().any():
        raise FedvlmError("some cosines to the class names are not a number; is an embedding zero?")
    work = similarity.detach().to(torch.promote_types(similarity.dtype, torch.float32))
    closeness = torch.cat([part.quantile(percentile, dim=1) for part in work.split(max(1, PART // classes))])
    return closeness.sort(stable=True).indices[:count]
