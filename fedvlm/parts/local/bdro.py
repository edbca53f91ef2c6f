"""BDRO, FOCoOp's client (Liao et al., ICML 2025, Algorithm 2): training at worst-case perturbations of shared prompts.

For the classes' prompts, then for the outsiders', ε maximises L(t + ε) − τ‖ε‖² − γ‖ε‖₁, starting from ε ~ N(0, σ). Then,
with ε fixed, one descent step on κ log mean exp(f/κ), κ = τ₂μ, where f = (an example's loss at t + ε) − τ₁‖ε^g‖² −
τ₂‖ε^o‖²: hard examples weigh more. τ₁, τ₂, κ are constants (Theorem 3.1).

The ascent repeats ε ← S_γ(∇L(t + ε)) / 2τ, S the soft threshold: the exact maximiser where L is replaced by its tangent at
the present ε. A client whose objective would not rise goes a quarter of that way instead. L is convex in encoded prompts
(but for −log p(ID) where p(ID) < ½), so that full steps rise; where 2τ exceeds L's curvature there is one maximum, which is
found. Below, as in most of the paper's Figure 7, there are several: with `starts` the ascent also begins where all prompts
or one have been pushed away from the batch's images, or one has been pulled to all of them, and the highest end counts. The
paper takes plain gradient steps and gives neither their number, τ, σ nor μ. The defaults are ours; (τ₁, τ₂) are the best of
(5, 1), (20, 4) and (100, 20) by validation accuracy over three data sets (benchmarks/strengths.py).

space=features, a surrogate, perturbs the encoded prompts, as the authors' code does: one pass through the text tower a
step. ε is added to the fused prompt, in which t^g has the share ρ, so that τ₁ is the paper's over ρ². space=parameters
perturbs the shared parameters themselves (the contexts), as printed, with a pass for every repetition and a τ near 1, where
the worst case of contexts has a norm of about 0.02; adapters that encode no prompts are always trained so.

bos=authors is another worst case, that of the authors' public code: every encoded prompt, of length 1, moves by
`ascent_steps` steps of length `strength` along its own gradient: of cross-entropy over classes and outsiders for the
classes, of that plus H for the outsiders. The training loss is cross-entropy + ½ H there, without −log p(ID). H = log Σ exp
− mean of an image's logits for the outsiders, least where they are alike. Their penalty on the size, which turns a step a
little, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, optimise
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative, Positive, Whole
from fedvlm.core.seeds import generator
from fedvlm.core.state import Message, Params, is_running_statistic, select
from fedvlm.parts.local.means import Means

OUTSIDERS = "outsiders"  # the contexts that τ₂ applies to; τ₁ applies to all others
TINY = 1e-30  # in place of a norm of 0 in a denominator
FAR = 1e3  # times the mean image: a perturbation at which a prompt wins for all of them
STRIDE = 7919  # noise is drawn once per round and client, and rolled by this much at each step

Losses = Callable[[Params], Tensor]  # perturbed values → one number per example


@runtime_checkable
class HasEncodedPrompts(Protocol):
    """An adapter whose logits in training depend on the parameters through encoded prompts only."""

    def encode(self, task: Task, params: Params) -> Params:
        """Encoded prompts by the name of the shared context that they come from, [clients, prompts, dim]."""
        ...

    def logits_of(self, task: Task, encoded: Params, batch: Batch) -> Tensor: ...


@dataclass(frozen=True)
class Bdro(Local):
    space: Literal["features", "parameters"] = "features"  # what is perturbed: encoded prompts, or shared parameters
    ascent_steps: Whole = 4  # N, repetitions of the ascent to the worst-case perturbation; 0: random noise only
    sigma: NotNegative = 1e-4  # σ of the noise that a perturbation starts from; an encoded prompt has norm 1
    penalty: Positive = 20.0  # τ₁, penalty on the squared size of the classes' perturbation; large ones allow little
    outsider_penalty: Positive = 4.0  # τ₂, the same for the outsiders' perturbation
    temperature: Positive = 1.0  # κ = τ₂μ, weighting of examples: small values weigh only the hardest, large ones all
    l1: NotNegative = 0.0  # γ, L1 penalty on perturbations; 0: none
    starts: Whole = 0  # prompts of a kind from which the ascent starts beside the noise, for small penalties; 0: none
    bos: Literal["paper", "authors"] = "paper"  # the worst case of the paper, or that of the authors' public code
    strength: Positive = 1.0  # length of a step of an encoded prompt with bos=authors

    effects: ClassVar[Mapping[str, str]] = {
        "perturbation": "norm of the worst-case perturbation of all prompts, first batch",
        "class_perturbation": "norm of the classes' perturbation over that of their prompts, first batch",
        "outsider_perturbation": "norm of the outsiders' perturbation over that of their prompts, first batch",
        "loss_gained": "mean loss at the perturbation minus that without one, first batch",
    }

    def incompatible(self, adapter: Adapter) -> str:
        if not self.starts and self.bos == "paper":
            return ""
        able = self.space == "features" and isinstance(adapter, HasEncodedPrompts)
        return "" if able else "starts= and bos=authors need encoded prompts; use adapter=outsiders space=features"

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        names = [k for k in message.shared if not is_running_statistic(k)]
        means = Means(data)
        loss = optimise(self, params, data, self.robust_gradients(model, names, data, means))
        return {"loss": loss} | means.found(*self.effects)

    def robust_gradients(self, model: Model, names: Sequence[str], data: Data, means: Means) -> Gradients:
        """The gradient of the robust loss; what the perturbation did on the first batch is added to `means`."""
        start: Params = {}

        @torch.enable_grad()
        def gradients(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
            leaves = {k: v.detach().requires_grad_() for k, v in now.items()}
            points = self.points(model, leaves, names)  # t
            fixed = {k: v.detach() for k, v in points.items()}
            if not start:
                start.update(noise(fixed, data, self.sigma))
            noises = {k: v[: len(batch.y)].roll(batch.step * STRIDE, -1) for k, v in start.items()}
            still = {k: v.detach() for k, v in now.items()}
            losses = self.losses_at(model, still, batch)
            if self.bos == "authors":
                shift = self.unit_steps(self.losses_at(model, still, batch, spread=1.0), fixed, noises, batch)
            else:
                shift = self.worst_case(losses, fixed, noises, batch)
            each = self.losses_at(model, leaves, batch)(shifted(points, shift))
            if batch.step == 0:
                means.add(**effects_of_shift(fixed, shift, batch.mean(each - losses(fixed)).detach()))
            soft = self.temperature * (each / self.temperature + batch.weight.log()).logsumexp(-1)
            value = soft - sum(self.price(k, v) for k, v in shift.items())
            return value.detach(), torch.autograd.grad(value.sum(), list(leaves.values()))

        return gradients

    def points(self, model: Model, now: Params, names: Sequence[str]) -> Params:
        """What is perturbed."""
        if self.space == "features" and isinstance(model.adapter, HasEncodedPrompts):
            return model.adapter.encode(model.task, now)
        return select(now, names)

    def losses_at(self, model: Model, now: Params, batch: Batch, spread: float = 0.5) -> Losses:
        adapter = model.adapter
        if self.space == "features" and isinstance(adapter, HasEncodedPrompts):
            if self.bos == "authors":
                return lambda points: with_spread(adapter.logits_of(model.task, points, batch), batch, points, spread)
            return lambda points: adapter.losses(adapter.logits_of(model.task, points, batch), batch.y)
        return lambda points: model.losses(now | points, batch)

    def worst_case(self, losses: Losses, points: Params, start: Params, batch: Batch) -> Params:
        """ε of the classes, then that of the outsiders with the classes' prompts perturbed."""
        shift: Params = {}

        def loss(part: Params) -> Tensor:
            return batch.mean(losses(shifted(points, shift | part)))

        for names in ([k for k in start if k != OUTSIDERS], [k for k in start if k == OUTSIDERS]):
            noises = select(start, names)
            if names and self.ascent_steps:
                found = [self.ascend(loss, one) for one in (noises, *self.far_starts(noises, batch))]
                noises = highest(found)
            shift |= noises
        return shift

    def far_starts(self, noises: Params, batch: Batch) -> Iterator[Params]:
        """Perturbations at which all prompts of a kind are pushed away from the images of the batch, or one of the first
        `starts` is, or wins for all of them; far out, where the tangent leads to the end that such a perturbation has."""
        if not self.starts:
            return
        centre = (FAR * batch.weight[..., None] * batch.x).sum(1)
        for name, value in noises.items():
            yield noises | {name: -centre[:, None].expand_as(value)}
            for j, sign in product(range(min(self.starts, value.shape[1])), (1.0, -1.0)):
                far = torch.zeros_like(value)
                far[:, j] = sign * centre
                yield noises | {name: far}

    def unit_steps(self, losses: Losses, points: Params, start: Params, batch: Batch) -> Params:
        """The authors' worst case: steps of one length for every prompt, of the classes, then of the outsiders."""
        shift = dict(start)
        for names in ([k for k in start if k != OUTSIDERS], [k for k in start if k == OUTSIDERS]):
            for _ in range(self.ascent_steps if names else 0):
                leaves = {k: shift[k].detach().requires_grad_() for k in names}
                value = batch.mean(losses(shifted(points, shift | leaves)))
                found = torch.autograd.grad(value.sum(), list(leaves.values()))
                shift |= {
                    k: leaves[k].detach() + self.strength * F.normalize(g, dim=-1)
                    for k, g in zip(names, found, strict=True)
                }
        return shift

    def ascend(self, loss: Callable[[Params], Tensor], shift: Params) -> tuple[Tensor, Params]:
        """The objective where the ascent ends, one number per client, and the perturbation."""
        value, aim = self.tangent(loss, shift)
        length = torch.ones_like(value)  # of a client's next step, as a share of the way to its aim
        for _ in range(self.ascent_steps):
            trial = {k: v + along(length, v) * (aim[k] - v) for k, v in shift.items()}
            reached, next_aim = self.tangent(loss, trial)
            rises = reached > value
            shift, aim = (
                {k: torch.where(along(rises, v), v, old[k]) for k, v in new.items()}
                for new, old in ((trial, shift), (next_aim, aim))
            )
            value, length = torch.where(rises, reached, value), torch.where(rises, 1.0, length / 4)
        return value, shift

    def tangent(self, loss: Callable[[Params], Tensor], shift: Params) -> tuple[Tensor, Params]:
        """The objective at ε, one number per client, and the maximiser of the objective with L's tangent there for L."""
        leaves = {k: v.detach().requires_grad_() for k, v in shift.items()}
        each = loss(leaves)
        found = zip(leaves, torch.autograd.grad(each.sum(), list(leaves.values())), strict=True)
        value = each.detach() - sum(self.price(k, v) for k, v in shift.items())
        return value, {k: F.softshrink(g, self.l1) / (2 * self.hold(k)) for k, g in found}

    def hold(self, name: str) -> float:
        return self.outsider_penalty if name == OUTSIDERS else self.penalty

    def price(self, name: str, shift: Tensor) -> Tensor:
        """τ‖ε‖² + γ‖ε‖₁, one number per client."""
        flat = shift.flatten(1)
        return self.hold(name) * flat.square().sum(1) + self.l1 * flat.abs().sum(1)


def highest(found: Sequence[tuple[Tensor, Params]]) -> Params:
    """The perturbation with the highest objective, of each client."""
    value, best = found[0]
    for other, shift in found[1:]:
        best = {k: torch.where(along(other > value, v), v, best[k]) for k, v in shift.items()}
        value = torch.maximum(value, other)
    return best


def with_spread(logits: Tensor, batch: Batch, points: Params, weight: float) -> Tensor:
    """Cross-entropy over classes and outsiders plus weight · H of the outsiders' logits, [clients, examples]."""
    outsiders = logits[..., -points[OUTSIDERS].shape[1] :]
    each = F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), reduction="none").view_as(batch.weight)
    return each + weight * (outsiders.logsumexp(-1) - outsiders.mean(-1))


def along(numbers: Tensor, values: Tensor) -> Tensor:
    """One number per client, to be multiplied with values [clients, ...]."""
    return numbers.view(-1, *[1] * (values.dim() - 1))


def shifted(points: Params, shift: Params) -> Params:
    return {k: v + shift[k] if k in shift else v for k, v in points.items()}


def effects_of_shift(points: Params, shift: Params, gained: Tensor) -> Params:
    """The numbers of Bdro.effects."""

    def norm(values: Params, names: list[str]) -> Tensor:
        return sum((values[k].flatten(1).square().sum(1) for k in names), torch.zeros_like(gained)).sqrt()

    classes = [k for k in points if k != OUTSIDERS]
    outsiders = [k for k in points if k == OUTSIDERS]
    return {
        "perturbation": norm(shift, classes + outsiders),
        "class_perturbation": norm(shift, classes) / norm(points, classes).clamp(min=TINY),
        "outsider_perturbation": norm(shift, outsiders) / norm(points, outsiders).clamp(min=TINY),
        "loss_gained": gained,
    }


def noise(values: Params, data: Data, sigma: float) -> Params:
    """N(0, σ) of the values' shapes. Drawn by client id, so that it does not depend on which clients train together."""
    drawn = {}
    for place, (k, v) in enumerate(sorted(values.items())):
        rows = [
            torch.randn(v[0].numel(), generator=generator(data.seed, data.round, 59, place, int(i)))
            for i in data.ids[: len(v)]
        ]
        drawn[k] = sigma * torch.stack(rows).to(v).view(v.shape) if rows else v
    return drawn
