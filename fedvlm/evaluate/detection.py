"""Telling insiders (images of the task's classes) from outsiders by one score an image: higher means more inside.

AUROC (Mann and Whitney 1947) is the chance that an insider scores above an outsider, ties counting half. FPR95 is the
share of outsiders let in by the highest threshold that lets in 95 % of insiders; public code that swaps the two sides
reports another number. The scores: MCM (Ming et al. 2022) is the largest softmax probability, the maximum logit
(Hendrycks et al. 2022) and the energy (Liu et al. 2020), log Σ exp, look at the logits as they are.

A measure over no insiders or no outsiders is None, printed “–”; a score that is not a number is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedvlm.core import FedvlmError

Scores = Tensor | np.ndarray | Sequence[float]


def auroc(inside: Scores, outside: Scores) -> float | None:
    """P(insider > outsider) + P(equal)/2, from ranks: exact, without a threshold."""
    ins, outs = _sorted(inside, "inside"), _sorted(outside, "outside")
    if not (len(ins) and len(outs)):
        return None
    below, upto = (int(np.searchsorted(outs, ins, side=side).sum()) for side in ("left", "right"))
    return (below + upto) / (2 * len(ins) * len(outs))


def fpr_at(inside: Scores, outside: Scores, keep: float = 0.95) -> float | None:
    """The share of outsiders at or above the highest threshold that keeps at least `keep` of the insiders."""
    if not 0 < keep <= 1:
        raise FedvlmError(f"keep={keep}: a share of insiders above 0 and at most 1 is needed, such as 0.95")
    ins, outs = _sorted(inside, "inside"), _sorted(outside, "outside")
    if not (len(ins) and len(outs)):
        return None
    kept = math.ceil(keep * len(ins) - 1e-9)  # 0.07 × 100 is 7.000000000000001, and means 7
    return float(np.mean(outs >= ins[-max(1, kept)]))


def mcm(logits: Tensor, temperature: float = 1.0, classes: int | None = None) -> Tensor:
    """The largest softmax probability [...] of logits [..., C]. With `classes`, the largest among the first so many
    while the softmax runs over all: FOCoOp's score, whose last logits are outsider prompts'."""
    if not temperature > 0:
        raise FedvlmError(f"temperature={temperature} must be above 0")
    return (_some(logits) / temperature).softmax(-1)[..., : _known(logits, classes)].amax(-1)


def max_logit(logits: Tensor) -> Tensor:
    """The largest logit [...] of logits [..., C]."""
    return _some(logits).amax(-1)


def energy(logits: Tensor) -> Tensor:
    """log Σ exp [...] of logits [..., C]: the negative free energy, so that higher is more inside."""
    return _some(logits).logsumexp(-1)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {"mcm": mcm, "max-logit": max_logit, "energy": energy}
MEASURES = {"auroc": auroc, "fpr95": fpr_at}


def _sorted(scores: Scores, side: str) -> np.ndarray:
    values = torch.as_tensor(scores).detach().double().cpu().numpy().reshape(-1)
    if np.isnan(values).any():
        raise FedvlmError(f"{side}: {int(np.isnan(values).sum())} of {len(values)} scores are not a number")
    return np.sort(values)


def _some(logits: Tensor) -> Tensor:
    if not logits.shape[-1:].numel() or not logits.dim():
        raise FedvlmError(f"logits {tuple(logits.shape)} have no class to score; [..., classes] are needed")
    return logits


def _known(logits: Tensor, classes: int | None) -> int:
    if classes is not None and not 0 < classes <= logits.shape[-1]:
        raise FedvlmError(
            f"classes={classes}, and there are {logits.shape[-1]} logits; between 1 and that many are needed"
        )
    return classes or logits.shape[-1]
