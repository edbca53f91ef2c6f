"""Ridge regression from second moments, which add up over clients: A = Σ w x xᵀ, B = Σ w x yᵀ.

x are features, with a 1 appended where the classifier has a bias; y is one-hot less 1/K. The minimiser of
Σ w ‖y − Wᵀx‖² + λ‖W − V‖² is W = (A + λI)⁻¹(B + λV). λ is given in units of A's mean eigenvalue, so that neither the
number of examples nor the length of features matters. Everything is computed in float64; A is decomposed once for all λ, and
negative eigenvalues (of noise, or of a client that does not keep to the protocol) count as 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.state import Params
from fedvlm.privacy.noise import normal

TINY = 1e-30  # in place of a mean eigenvalue of 0: without data the solution is V


class Moments(NamedTuple):
    second: Tensor  # A, [features, features]
    cross: Tensor  # B, [features, classes]

    def plus(self, other: Moments, times: float = 1.0) -> Moments:
        return Moments(self.second + times * other.second, self.cross + times * other.cross)


def with_one(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1)


def moments(x: Tensor, y: Tensor, classes: int, balance: bool, saturation: float = 0.0) -> Moments:
    """Moments of examples x [n, features], with weights that add up to 1: the same for every example; balance: the same
    in total for every class that occurs, or, with a saturation κ, in proportion to m/(m + κ) for a class with m
    examples."""
    x, target = x.double(), F.one_hot(y, classes).double() - 1 / classes
    weight = torch.full((len(y),), 1 / max(1, len(y)), dtype=torch.float64, device=x.device)
    if balance and len(y):
        counts = torch.bincount(y, minlength=classes).double()
        occur = counts[counts > 0]
        weight = 1 / ((counts[y] + saturation) * (occur / (occur + saturation)).sum())
    weighted = x * weight[:, None]
    return Moments(weighted.mT @ x, weighted.mT @ target)


def packed(second: Tensor) -> Tensor:
    """The upper triangle of A [..., n, n] as [..., n (n + 1)/2]: all that need be sent."""
    row, column = triangle(second.shape[-1])
    return second[..., row, column]


def unpacked(values: Tensor) -> Tensor:
    size = int(((8 * values.shape[-1] + 1) ** 0.5 - 1) / 2)
    row, column = triangle(size)
    found = values.new_zeros(*values.shape[:-1], size, size)
    found[..., row, column] = values
    found[..., column, row] = values
    return found


@lru_cache(maxsize=8)
def triangle(size: int) -> tuple[Tensor, Tensor]:
    row, column = torch.triu_indices(size, size)
    return row, column


def class_means(given: Moments) -> tuple[Tensor, Tensor]:
    """The mean of each class [classes, features] and the covariance within classes, of moments with a 1 appended; a class
    without examples has the mean of all."""
    second, cross = given.second[:-1, :-1], given.cross[:-1]
    total, sums, classes = given.second[-1, -1].clamp(min=TINY), given.second[:-1, -1], given.cross.shape[1]
    weight = given.cross[-1] + total / classes  # of each class: one-hot targets are less 1/K
    known = occurring(given)
    means = torch.where(known, (cross + sums[:, None] / classes) / weight.clamp(min=TINY), (sums / total)[:, None]).mT
    return means, second / total - (means.mT * (weight * known / total)) @ means


def occurring(given: Moments) -> Tensor:
    """Whether there are examples of each class, of moments with a 1 appended."""
    found: Tensor = given.cross[-1] + given.second[-1, -1] / given.cross.shape[1] > 1e-6 * given.second[-1, -1]
    return found


def sensitivity(length: float, classes: int) -> float:
    """How far (A, B), before they are divided by n, move with one example more or less: rows x are at most so long, and
    ‖x xᵀ‖² + ‖x yᵀ‖² = ‖x‖⁴ + ‖x‖²‖y‖² with ‖y‖² = 1 − 1/K. A counts as a vector of its upper triangle with entries beside
    the diagonal times √2, which has the same length as A."""
    return float((length**4 + length**2 * (1 - 1 / classes)) ** 0.5)


def noised(given: Moments, spread: float, secret: bytes, *numbers: int) -> Moments:
    """Add independent normal noise of this standard deviation to every coordinate of that vector; `numbers`: the
    draw."""
    size, count = len(given.second), given.cross.numel()
    row, column = triangle(size)
    drawn = torch.from_numpy(normal(secret, "moments", *numbers, count=len(row) + count)) * spread
    second, cross = drawn[: len(row)], drawn[len(row) :]
    second = torch.where(row == column, second, second / 2**0.5)
    return Moments(given.second + unpacked(second), given.cross + cross.view(given.cross.shape))


class Line(NamedTuple):
    """Heads that are linear in a number t: start + t · slope."""

    start: Tensor
    slope: Tensor

    def at(self, t: float) -> Tensor:
        return self.start + t * self.slope

    def accuracies(self, times: Sequence[float], x: Tensor, y: Tensor) -> list[float]:
        """Accuracies of the heads at these numbers; 0 where there is no example."""
        start, slope = x @ self.start, x @ self.slope
        return [share_of_right(start + t * slope, y) for t in times]


class Ridge:
    """The solutions of one regression, for any λ and V."""

    def __init__(self, given: Moments):
        values, self.vectors = torch.linalg.eigh(given.second)
        self.values = values.clamp(min=0)
        self.unit = max(float(self.values.mean()), TINY)
        self.cross = self.vectors.mT @ given.cross
        self.total = given.second[-1, -1].clamp(min=TINY)  # of the weights, where features have a 1 appended

    def logit_size(self, head: Tensor) -> float:
        """The root mean square of a head's logits, less their mean over classes, on the examples of A."""
        turned = self.vectors.mT @ (head - head.mean(1, keepdim=True))
        square = (self.values[:, None] * turned.square()).sum() / (self.total * head.shape[1])
        return math.sqrt(max(float(square), TINY))

    def solve(self, strength: float, towards: Tensor) -> Tensor:
        """W [features, classes] with λ = strength · A's mean eigenvalue and V = towards."""
        size = strength * self.unit
        found: Tensor = self.vectors @ (
            (self.cross + size * (self.vectors.mT @ towards)) / (self.values + size)[:, None]
        )
        return found


class Gaussian:
    """Gaussian discriminant analysis with one covariance Σ for all classes, from the same moments: class c has the logit
    (mᵀΣ⁻¹x − mᵀΣ⁻¹m/2)/features with m its mean. Moments with prior weight ρ are those of the posterior mean."""

    def __init__(self, given: Moments):
        self.means, within = class_means(given)
        values, self.vectors = torch.linalg.eigh(within)
        self.values = values.clamp(min=0)
        self.unit = max(float(self.values.mean()), TINY)
        self.turned = self.means @ self.vectors

    def solve(self, strength: float, towards: Tensor) -> Tensor:
        """W [features, classes] with Σ + strength · Σ's mean eigenvalue · I in place of Σ, plus `towards`."""
        scaled = self.turned / (self.values + strength * self.unit) @ self.vectors.mT
        bias = -(scaled * self.means).sum(1) / 2
        found: Tensor = torch.cat([scaled, bias[:, None]], dim=1).mT / len(self.values)
        return found + towards


class Bilinear:
    """The ridge regression whose head for a class is a linear function of the embedding of its name, W = M Tᵀ: M gives heads
    for classes without examples, too. The minimiser of Σ w ‖y − T Mᵀx‖² + λ‖M − V‖² has A M TᵀT + λM = B T + λV, which the
    eigenvectors of A and of TᵀT separate into single numbers."""

    def __init__(self, given: Moments, text: Tensor):
        values, self.vectors = torch.linalg.eigh(given.second)
        widths, self.directions = torch.linalg.eigh(text.mT @ text)
        self.values = values.clamp(min=0)[:, None] * widths.clamp(min=0)
        self.unit = max(float(self.values.mean()), TINY)
        self.cross = self.vectors.mT @ given.cross @ text @ self.directions

    def solve(self, strength: float, towards: Tensor) -> Tensor:
        """M [features, dim] with λ = strength · the mean product of both eigenvalues and V = towards."""
        size = strength * self.unit
        scaled = (self.cross + size * (self.vectors.mT @ towards @ self.directions)) / (self.values + size)
        found: Tensor = self.vectors @ scaled @ self.directions.mT
        return found


def to_params(weights: Tensor, like: Params) -> Params:
    """W [..., features, classes] or M [..., features, dim] as the shared parameters `head` and, where it has one, `bias`."""
    found = {"head": weights[..., :-1, :].mT if "bias" in like else weights.mT}
    found |= {"bias": weights[..., -1, :]} if "bias" in like else {}
    return {k: v.to(like[k].dtype).contiguous() for k, v in found.items()}


def from_params(params: Params) -> Tensor:
    head = params["head"].double().mT
    return torch.cat([head, params["bias"].double()[..., None, :]], dim=-2) if "bias" in params else head


def heads_on_line(solved: Ridge | Gaussian | Bilinear, strength: float, towards: Tensor) -> Line:
    """The solutions with V = t · towards, which are linear in t."""
    start = solved.solve(strength, torch.zeros_like(towards))
    return Line(start, solved.solve(strength, towards) - start)


def share_of_right(logits: Tensor, y: Tensor) -> float:
    return float((logits.argmax(-1) == y).double().mean()) if len(y) else 0.0
