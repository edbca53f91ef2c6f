"""A client that sends second moments of its features instead of a trained model (ours, 2026; docs/moments.md).

train: A_i = Σ w x xᵀ and B_i = Σ w x yᵀ go up, divided by n_i, w balancing the classes of the client.
adjust, stage "select": from the sums over all clients, the client computes the heads of every strength λ and text weight c
with and without its own moments; their accuracies go up.
adjust, stage "personal": W_i = (A_i + ρ Σ_{j≠i} A_j + μI)⁻¹(B_i + ρ Σ_{j≠i} B_j + μ W_g), ρ and μ chosen on the client's own
validation data; W_i, ρ and μ never leave it. Of equally good ones, the one nearest to the shared head is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvlm import ridge
from fedvlm.adapters.base import Adapter, HasLinearHead, Task
from fedvlm.core import Data, Message, Params, copy_per_client
from fedvlm.keys import NotNegative, Share
from fedvlm.local import copies
from fedvlm.local.base import Local, Trained
from fedvlm.local.model import Model
from fedvlm.ridge import Gaussian, Moments, Ridge
from fedvlm.schema import Field, Fields

if TYPE_CHECKING:
    from fedvlm.merge.base import Merge

SECOND, CROSS = "second", "cross"  # the moments, in replies and in the message with their sums
BY_SIZE = "by_size"  # in that message: 1 where clients are weighted by their number of examples
GAUSSIAN = "gaussian"  # in that message: 1 where heads are those of Gaussian discriminant analysis
STRENGTHS, TEXTS = "strengths", "texts"  # in that message: the candidates for λ and c
NEWCOMER, CLIENT = "newcomer", "client"  # replies: accuracy without and with the client's own moments, [λ, c]
SELECT, PERSONAL = "select", "personal"  # stages of the step `adjust`


class Examples(NamedTuple):
    """A client's labelled examples, as features with a 1 appended where the classifier has a bias, in float64."""

    x: Tensor
    y: Tensor
    train: int  # the first so many are training examples, the rest validation examples

    @property
    def validation(self) -> tuple[Tensor, Tensor]:
        """The training examples where there are no others."""
        low = self.train if len(self.y) > self.train else 0
        return self.x[low:], self.y[low:]


@dataclass(frozen=True)
class SecondMoments(Local):
    keep: bool = True  # true: each client solves a head of its own; false: it uses the shared one
    balance: bool = True  # true: every class of a client counts the same; false: every example does
    shares: tuple[Share, ...] = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.0)  # ρ, weight of others' moments: candidates
    pulls: tuple[NotNegative, ...] = (30.0, 10.0, 3.0, 1.0, 0.1, 0.01, 1e-3, 1e-4)  # μ, in mean eigenvalues: candidates

    partner: ClassVar[str] = "moments"
    one_round: ClassVar[bool] = True

    def incompatible(self, adapter: Adapter) -> str:
        if isinstance(adapter, HasLinearHead):
            return ""
        return "solves a classifier that is linear in its features; use adapter=affine"

    def uploads(self, task: Task, shared: Params) -> Fields:
        found = super().uploads(task, shared)
        if shared:
            size, classes = ridge.from_params(shared).shape
            found |= {SECOND: Field((size * (size + 1) // 2,), update=True), CROSS: Field((size, classes), update=True)}
        return found

    @torch.no_grad()
    def train(self, model: Model, own: Params, message: Message, data: Data) -> Trained:
        params = copy_per_client(message.shared, len(data)) | copies.adapter_params(own)
        found = [self.sent(model, one_of(params, i), data, i) for i in range(len(data))]
        values = {SECOND: torch.stack([ridge.packed(m.second) for m in found])}
        values[CROSS] = torch.stack([m.cross for m in found])
        values = {k: v.to(data.dtype) for k, v in values.items()}
        losses = torch.stack([loss_of(model, one_of(params, i), data, i) for i in range(len(data))])
        shared = {k: params[k] for k in message.shared}
        return Trained(own, shared, {"n": data.sizes(), "loss": losses, **values})

    def own_moments(self, model: Model, params: Params, data: Data, at: int) -> Moments:
        examples = examples_of(model, params, data, at)
        x, y = examples.x[: examples.train], examples.y[: examples.train]
        return ridge.moments(x, y, len(model.task.classes), self.balance)

    def sent(self, model: Model, params: Params, data: Data, at: int) -> Moments:
        """A client's moments as it sends them: with noise (dp=example), and rounded to the dtype of its reply, so that it
        can take them off a sum."""
        found = self.own_moments(model, params, data, at)
        if data.private is not None:
            n = int(data.counts("train")[at])
            length = (data.private.clip**2 + ("bias" in params)) ** 0.5
            spread = data.private.noise * ridge.sensitivity(length, len(model.task.classes)) / max(1, n)
            found = ridge.noised(found, spread, data.private.secret, data.round, int(data.ids[at]))
        return Moments(*(m.to(data.dtype).double() for m in found))

    def uncovered(self, merge: Merge) -> str:
        """The choice of λ and c asks for accuracies, and balancing by class depends on all labels."""
        if len(getattr(merge, STRENGTHS)) * len(getattr(merge, TEXTS)) > 1:
            return "candidates are compared on labelled examples; give one of each, such as strengths=10 texts=4"
        return "balance=true weights an example by the others' labels; give balance=false" if self.balance else ""

    @torch.no_grad()
    def adjust(self, model: Model, own: Params, message: Message, data: Data) -> tuple[Params, Params]:
        params = copy_per_client(message.shared, len(data)) | copies.adapter_params(own)
        found = [self.adjusted(model, one_of(params, i), message, data, i) for i in range(len(data))]
        values = {k: torch.stack([f[k] for f in found]).to(data.dtype) for k in (NEWCOMER, CLIENT)}
        if message.stage != PERSONAL or not self.keep:
            return own, values
        heads = torch.stack([self.personal_head(model, one_of(params, i), message, data, i) for i in range(len(data))])
        return own | copies.store(ridge.to_params(heads, message.shared)), values

    def others(self, model: Model, params: Params, message: Message, data: Data, at: int) -> tuple[Moments, Moments]:
        """The client's own moments with their weight, and the sums of all others."""
        weight = float(data.counts("train")[at]) if float(message.extra[BY_SIZE]) else 1.0
        total = Moments(ridge.unpacked(message.extra[SECOND].double()), message.extra[CROSS].double())
        others = total.plus(self.sent(model, params, data, at), -weight)
        return Moments(*(weight * m for m in self.own_moments(model, params, data, at))), others

    def adjusted(self, model: Model, params: Params, message: Message, data: Data, at: int) -> Params:
        """The accuracies of all candidates; zeros in the stage that does not ask for them."""
        strengths, texts = (message.extra[k].tolist() for k in (STRENGTHS, TEXTS))
        found = {k: torch.zeros(len(strengths), len(texts)) for k in (NEWCOMER, CLIENT)}
        if message.stage != SELECT:
            return found
        mine, others = self.others(model, params, message, data, at)
        examples, prior = examples_of(model, params, data, at), text_prior(model.task, message.shared)
        # nothing of this client is in `others`, so its training examples are as new as its validation examples
        solver = solver_of(message)
        sets = {
            NEWCOMER: (solver(others), examples.x, examples.y),
            CLIENT: (solver(others.plus(mine)), *examples.validation),
        }
        for name, (solved, x, y) in sets.items():
            for row, strength in enumerate(strengths):
                for column, text in enumerate(texts):
                    found[name][row, column] = ridge.accuracy(solved.solve(strength, text * prior), x, y)
        return found

    def personal_head(self, model: Model, params: Params, message: Message, data: Data, at: int) -> Tensor:
        mine, others = self.others(model, params, message, data, at)
        x, y = examples_of(model, params, data, at).validation
        shared, best, most = ridge.from_params(message.shared), ridge.from_params(message.shared), -1.0
        has_validation = data.counts("val")[at] > 0
        for share in self.shares if has_validation else self.shares[:1]:
            solved = solver_of(message)(mine.plus(others, share))
            for pull in self.pulls if has_validation else self.pulls[:1]:
                head = solved.solve(pull, shared)
                if (reached := ridge.accuracy(head, x, y)) > most:
                    best, most = head, reached
        return best


def solver_of(message: Message) -> type[Ridge] | type[Gaussian]:
    return Gaussian if float(message.extra[GAUSSIAN]) else Ridge


def one_of(params: Params, at: int) -> Params:
    return {k: v[at : at + 1] for k, v in params.items()}


def examples_of(model: Model, params: Params, data: Data, at: int) -> Examples:
    low, mid, high = (int(b) for b in data.bounds[at, :3])
    x = model.adapter.features(model.task, params, data.x[None, low:high])[0].double()
    if data.private is not None:
        x = x * (data.private.clip / x.norm(dim=-1, keepdim=True)).clamp(max=1)
    return Examples(ridge.with_one(x) if "bias" in params else x, data.y[low:high], mid - low)


def loss_of(model: Model, params: Params, data: Data, at: int) -> Tensor:
    """The mean training loss of the model that was sent."""
    low, mid = (int(b) for b in data.bounds[at, :2])
    each = model.adapter.losses(model.logits(params, data.x[None, low:mid]), data.y[None, low:mid])
    return each.mean() if mid > low else data.x.new_zeros(())


def text_prior(task: Task, shared: Params) -> Tensor:
    """The class names' embeddings as a head [features, classes], 0 for features beyond the embedding and for the bias."""
    found = torch.zeros_like(ridge.from_params(shared))
    if task.text is not None:
        found[: task.dim] = task.text.double().mT
    return found


def mean_accuracy(replies: Params, choose: str) -> Tensor:
    """Of each candidate, [λ, c]: as a newcomer's, as a client's, or both alike; mean over clients."""
    names = {"newcomers": (NEWCOMER,), "clients": (CLIENT,)}.get(choose, (NEWCOMER, CLIENT))
    return torch.stack([replies[k].double().mean(0) for k in names]).mean(0)


def first_best(scores: Tensor) -> tuple[int, int]:
    """Row and column of the largest, the first of equal ones."""
    row, column = np.unravel_index(int(scores.argmax()), tuple(scores.shape))
    return int(row), int(column)
