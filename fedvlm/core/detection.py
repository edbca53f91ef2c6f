"""Out-of-distribution detection: separating insiders (images of the task's classes) from outsiders by one score per image,
higher for insiders.

Measures: AUROC (Mann and Whitney 1947) is the probability that an insider scores above an outsider, ties counting half.
FPR95 is the share of outsiders at or above the highest threshold that accepts 95 % of the insiders; some public code swaps
the two sides, which gives another number. Scores: MCM (Ming et al. 2022) is the largest softmax probability; the maximum
logit (Hendrycks et al. 2022) and the energy log Σ exp (Liu et al. 2020) use the logits directly.

A measure without insiders or without outsiders is None, printed as “–”; a NaN score is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedvlm.errors import FedvlmError

Scores = Tensor | np.ndarray | Sequence[float]


def auroc(inside: Scores, outside: Scores) -> float | None:
    """P(insider > outsider) + P(equal)/2, computed exactly from ranks."""
    ins, outs = _sorted(inside, "inside"), _sorted(outside, "outside")
    if not (len(ins) and len(outs)):
        return None
    below, up_to = (int(np.searchsorted(outs, ins, side=side).sum()) for side in ("left", "right"))
    return (below + up_to) / (2 * len(ins) * len(outs))


def fpr_at(inside: Scores, outside: Scores, keep: float = 0.95) -> float | None:
    """The share of outsiders at or above the highest threshold that accepts at least the share `keep` of the insiders."""
    if not 0 < keep <= 1:
        raise FedvlmError(f"keep={keep} must be a share of insiders above 0 and at most 1, such as 0.95")
    ins, outs = _sorted(inside, "inside"), _sorted(outside, "outside")
    if not (len(ins) and len(outs)):
        return None
    kept = math.ceil(keep * len(ins) - 1e-9)  # 0.07 × 100 is 7.000000000000001 in floating point and must give 7
    return float(np.mean(outs >= ins[-max(1, kept)]))


def mcm(logits: Tensor, temperature: float = 1.0, classes: int | None = None) -> Tensor:
    """The largest softmax probability [...] of logits [..., C].

    classes: take the largest among the first `classes` only, with the softmax over all C (FOCoOp, whose last logits belong
    to outsider prompts); None: all.
    """
    if not temperature > 0:
        raise FedvlmError(f"temperature={temperature} must be above 0")
    return (_not_empty(logits) / temperature).softmax(-1)[..., : _class_count(logits, classes)].amax(-1)


def max_logit(logits: Tensor) -> Tensor:
    """The largest logit [...] of logits [..., C]."""
    return _not_empty(logits).amax(-1)


def energy(logits: Tensor) -> Tensor:
    """log Σ exp [...] of logits [..., C]: the negative free energy, so that insiders score higher."""
    return _not_empty(logits).logsumexp(-1)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {"mcm": mcm, "max-logit": max_logit, "energy": energy}
MEASURES: dict[str, Callable[[Scores, Scores], float | None]] = {"auroc": auroc, "fpr95": fpr_at}


def scores_of(logits: Tensor) -> dict[str, Tensor]:
    """Every one of SCORES of these logits, by name."""
    return {name: score(logits) for name, score in SCORES.items()}


def _sorted(scores: Scores, side: str) -> np.ndarray:
    values = torch.as_tensor(scores).detach().double().cpu().numpy().reshape(-1)
    if np.isnan(values).any():
        raise FedvlmError(f"{side}: {int(np.isnan(values).sum())} of {len(values)} scores are NaN")
    return np.sort(values)


def _not_empty(logits: Tensor) -> Tensor:
    if not logits.shape[-1:].numel() or not logits.dim():
        raise FedvlmError(f"logits of shape {tuple(logits.shape)} have no class to score; expected [..., classes]")
    return logits


def _class_count(logits: Tensor, classes: int | None) -> int:
    if classes is not None and not 0 < classes <= logits.shape[-1]:
        raise FedvlmError(f"classes={classes} must be between 1 and the {logits.shape[-1]} logits")
    return classes or logits.shape[-1]
