"""A client that sends second moments of its features instead of a trained model (ours, 2026; docs/moments.md).

train: A_i = Σ w x xᵀ and B_i = Σ w x yᵀ go up, divided by n_i, w balancing the classes of the client.
adjust, stage "select": from the sums over all clients, the client computes the heads of every strength λ and text weight c
with and without its own moments; their accuracies on its validation examples go up. (Training examples would be new to a
model without this client only where no other client has the same objects.) Without its moments, examples of classes that
nobody else has are not scored (with adapter=named they are: its heads come from the names); where no others are left, both
accuracies are the same.
adjust, stage "personal": W_i = (A_i + ρ Σ_{j≠i} A_j + μI)⁻¹(B_i + ρ Σ_{j≠i} B_j + μ η W_g), the mean over a grid of ρ, μ and
η by accuracy on the client's own validation data (`averaged`), and then π log(its class counts + ½) in its bias, π by the
same rule; nothing of it leaves the client.
With solver=both there is a Gaussian head beside each ridge head, from the same moments (`candidates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from fedvlm.core import copies
from fedvlm.core.adapter import Adapter, HasLinearHead, Task
from fedvlm.core.data import Data
from fedvlm.core.local import Local, Trained
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative, Share
from fedvlm.core.schema import Field, Fields
from fedvlm.core.state import Message, Params, copy_per_client
from fedvlm.errors import FedvlmError
from fedvlm.parts import ridge
from fedvlm.parts.ridge import Bilinear, Gaussian, Line, Moments, Ridge
from fedvlm.privacy.descent import PrivateData

if TYPE_CHECKING:
    from fedvlm.core.merge import Merge

SECOND, CROSS = "second", "cross"  # the moments, in replies and in the message with their sums
BY_SIZE = "by_size"  # in that message: 1 where clients are weighted by their number of examples
SOLVER = "solver"  # in that message: its place in SOLVERS
Solver = Literal["ridge", "gaussian", "both"]
SOLVERS: tuple[Solver, ...] = get_args(Solver)
STRENGTHS, TEXTS = "strengths", "texts"  # in that message: the candidates for λ and c
AVERAGING = "averaging"  # in that message: see `averaged`
NEWCOMER, CLIENT = "newcomer", "client"  # replies: accuracy without and with the client's own moments, [λ, c]
SCORED = "scored"  # reply: the number of validation examples
Judged = Literal["both", "mostly-newcomers", "newcomers", "clients"]  # choose=
# weight of newcomers' accuracy; the rest is that of clients
NEWCOMERS: dict[Judged, float] = {"both": 0.5, "mostly-newcomers": 0.75, "newcomers": 1.0, "clients": 0.0}
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
    saturation: NotNegative = 0.0  # κ: with balance=true, n examples of a class count n/(n + κ); 0: all classes alike
    shares: tuple[Share, ...] = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.0)  # ρ, weight of others' moments: candidates
    pulls: tuple[NotNegative, ...] = (30.0, 10.0, 3.0, 1.0, 0.1, 0.01, 1e-3, 1e-4)  # μ, in mean eigenvalues: candidates
    towards: tuple[Share, ...] = (1.0,)  # η, share of the shared head that μ pulls towards: candidates
    priors: tuple[NotNegative, ...] = (
        0.0,
    )  # π, weight of the log of the client's class counts in its bias: candidates

    partner: ClassVar[str] = "moments"
    one_round: ClassVar[bool] = True

    def incompatible(self, adapter: Adapter) -> str:
        if any(self.priors) and adapter.open_vocabulary:
            return "priors= are added to a bias of each class, and this adapter has one map for all; use priors=0"
        if isinstance(adapter, HasLinearHead):
            return ""
        return "solves a classifier that is linear in its features; use adapter=affine"

    def uploads(self, task: Task, shared: Params) -> Fields:
        found = super().uploads(task, shared)
        if shared:
            if any(self.priors) and "bias" not in shared:
                raise FedvlmError(f"priors={self.priors} are added to a bias; use priors=0, or adapter=affine")
            size, classes = len(ridge.from_params(shared)), len(task.classes)
            found |= {SECOND: Field((size * (size + 1) // 2,), update=True), CROSS: Field((size, classes), update=True)}
        return found

    @torch.no_grad()
    def train(self, model: Model, own: Params, message: Message, data: Data) -> Trained:
        params = copy_per_client(message.shared, len(data)) | copies.adapter_params(own)
        found = []
        for i in range(len(data)):
            own_moments = self.own_moments(model, one := one_of(params, i), data, i)
            found.append(self.as_sent(own_moments, model, one, data, i))
        values = {SECOND: torch.stack([ridge.packed(m.second) for m in found])}
        values[CROSS] = torch.stack([m.cross for m in found])
        values = {k: v.to(data.dtype) for k, v in values.items()}
        losses = torch.stack([loss_of(model, one_of(params, i), data, i) for i in range(len(data))])
        shared = {k: params[k] for k in message.shared}
        return Trained(own, shared, {"n": data.sizes(), "loss": losses, **values})

    def own_moments(self, model: Model, params: Params, data: Data, at: int) -> Moments:
        examples = examples_of(model, params, data, at)
        x, y = examples.x[: examples.train], examples.y[: examples.train]
        return ridge.moments(x, y, len(model.task.classes), self.balance, self.saturation)

    def as_sent(self, own: Moments, model: Model, params: Params, data: Data, at: int) -> Moments:
        """A client's moments as it sends them: with noise (dp=example), and rounded to the dtype of its reply, so that it
        can take them off a sum."""
        if isinstance(data, PrivateData):
            n = int(data.counts("train")[at])
            length = (data.descent.clip**2 + ("bias" in params)) ** 0.5
            spread = data.descent.noise * ridge.sensitivity(length, len(model.task.classes)) / max(1, n)
            own = ridge.noised(own, spread, data.descent.secret, data.round, int(data.ids[at]))
        return Moments(*(m.to(data.dtype).double() for m in own))

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
        values[SCORED] = data.tensor(data.counts("val")).to(data.dtype)
        if message.stage != PERSONAL or not self.keep:
            return own, values
        heads = torch.stack([self.personal_head(model, one_of(params, i), message, data, i) for i in range(len(data))])
        return own | copies.store(ridge.to_params(heads, message.shared)), values

    def others(self, model: Model, params: Params, message: Message, data: Data, at: int) -> tuple[Moments, Moments]:
        """The client's own moments with their weight, and the sums of all others."""
        weight = float(data.counts("train")[at]) if float(message.extra[BY_SIZE]) else 1.0
        total = Moments(ridge.unpacked(message.extra[SECOND].double()), message.extra[CROSS].double())
        own = self.own_moments(model, params, data, at)
        others = total.plus(self.as_sent(own, model, params, data, at), -weight)
        return Moments(*(weight * m for m in own)), others

    def adjusted(self, model: Model, params: Params, message: Message, data: Data, at: int) -> Params:
        """The accuracies of all candidates; zeros in the stage that does not ask for them."""
        strengths, texts = (message.extra[k].tolist() for k in (STRENGTHS, TEXTS))
        rows = heads_of(SOLVERS[int(message.extra[SOLVER])]) * len(strengths)
        found = {k: torch.zeros(rows, len(texts)) for k in (NEWCOMER, CLIENT)}
        if message.stage != SELECT:
            return found
        mine, others = self.others(model, params, message, data, at)
        examples, prior = examples_of(model, params, data, at), text_prior(model, message.shared)
        x, y = examples.validation
        known = torch.ones_like(y, dtype=torch.bool)
        if "bias" in params and not model.adapter.open_vocabulary:
            known = ridge.occurring(others)[y]
        sets = {CLIENT: (others.plus(mine), x, y)} | ({NEWCOMER: (others, x[known], y[known])} if known.any() else {})
        for name, (moments, x, y) in sets.items():
            heads = candidates(message, model, moments, strengths, prior)
            found[name] = torch.tensor([by_class(model, head).accuracies(texts, x, y) for head in heads])
        return found if known.any() else found | {NEWCOMER: found[CLIENT]}

    def personal_head(self, model: Model, params: Params, message: Message, data: Data, at: int) -> Tensor:
        mine, others = self.others(model, params, message, data, at)
        x, y = examples_of(model, params, data, at).validation
        shared, scored = ridge.from_params(message.shared), int(data.counts("val")[at])
        heads, averaging = list[Line](), float(message.extra[AVERAGING])
        pulls, towards, priors = (grid if scored else grid[:1] for grid in (self.pulls, self.towards, self.priors))
        for share in self.shares if scored else self.shares[:1]:
            heads += candidates(message, model, mine.plus(others, share), pulls, shared)
        reached = [by_class(model, head).accuracies(towards, x, y) for head in heads]
        found = averaged(heads, towards, torch.tensor(reached), scored, averaging)
        if not any(priors):
            return found
        low, mid = (int(b) for b in data.bounds[at, :2])
        line = Line(found, class_prior(data.y[low:mid], found))
        return averaged([line], priors, torch.tensor([line.accuracies(priors, x, y)]), scored, averaging)


def heads_of(solver: Solver) -> int:
    """How many heads there are of each strength."""
    return 2 if solver == "both" else 1


def candidates(
    message: Message, model: Model, moments: Moments, strengths: Sequence[float], towards: Tensor
) -> list[Line]:
    """The heads of every strength. With solver=both, those of the ridge regression, and then a Gaussian one for each, whose
    logits get the size of the ridge head's (they have none that a mean could use) and which is pulled as that is."""
    if model.adapter.open_vocabulary:
        by_name = Bilinear(moments, model.task.names().double())
        return [ridge.heads_on_line(by_name, strength, towards) for strength in strengths]
    kind = SOLVERS[int(message.extra[SOLVER])]
    if kind == "gaussian":
        gaussian = Gaussian(moments)
        return [ridge.heads_on_line(gaussian, strength, towards) for strength in strengths]
    regression = Ridge(moments)
    found = [ridge.heads_on_line(regression, strength, towards) for strength in strengths]
    if kind == "both":
        gaussian, nothing = Gaussian(moments), torch.zeros_like(towards)
        for strength, (start, slope) in zip(strengths, list(found), strict=True):
            other = gaussian.solve(strength, nothing)
            size = regression.logit_size(start) / regression.logit_size(other)
            found.append(Line(size * other, slope))
    return found


def class_prior(y: Tensor, head: Tensor) -> Tensor:
    """The logarithm of the class counts + ½, less its mean, as the bias of a head like this one, in units of the root mean
    square of the regression's targets, one-hot less 1/K."""
    classes = head.shape[1]
    log = (torch.bincount(y, minlength=classes).double() + 0.5).log()
    found = torch.zeros_like(head)
    found[-1] = (log - log.mean()) * ((1 - 1 / classes) / classes) ** 0.5
    return found


def by_class(model: Model, heads: Line) -> Line:
    """The heads of each class [features, classes]: of adapter=named, from its name."""
    return Line(*(h @ model.task.names().double().mT for h in heads)) if model.adapter.open_vocabulary else heads


def averaged(heads: Sequence[Line], times: Sequence[float], accuracies: Tensor, count: int, averaging: float) -> Tensor:
    """The mean of heads[row].at(times[column]) with weights exp(accuracy[row, column]/(averaging · s)), s = 1/(2√count) the
    largest standard error that the accuracy on so many examples can have: candidates that the examples cannot tell apart
    count alike. averaging = 0: the first of the best."""
    if not averaging:
        row, column = first_best(accuracies)
        return heads[row].at(times[column])
    weights = torch.softmax(accuracies.double().reshape(-1) * (2 * max(1, count) ** 0.5 / averaging), 0)
    weights = weights.view(accuracies.shape)
    lengths = weights @ torch.tensor(times, dtype=torch.float64)
    each = zip(heads, weights.sum(1).tolist(), lengths.tolist(), strict=True)
    return torch.stack([weight * head.start + length * head.slope for head, weight, length in each]).sum(0)


def one_of(params: Params, at: int) -> Params:
    return {k: v[at : at + 1] for k, v in params.items()}


def examples_of(model: Model, params: Params, data: Data, at: int) -> Examples:
    low, mid, high = (int(b) for b in data.bounds[at, :3])
    x = model.adapter.features(model.task, params, data.part(low, high)[None])[0].double()
    if isinstance(data, PrivateData):
        x = x * (data.descent.clip / x.norm(dim=-1, keepdim=True)).clamp(max=1)
    return Examples(ridge.with_one(x) if "bias" in params else x, data.y[low:high], mid - low)


def loss_of(model: Model, params: Params, data: Data, at: int) -> Tensor:
    """The mean training loss of the model that was sent."""
    low, mid = (int(b) for b in data.bounds[at, :2])
    each = model.adapter.losses(model.logits(params, data.part(low, mid)[None]), data.y[None, low:mid])
    return each.mean() if mid > low else data.x.new_zeros(())


def text_prior(model: Model, shared: Params) -> Tensor:
    """The class names' embeddings as a head [features, classes], 0 for features beyond the embedding and for the bias; of
    adapter=named, the identity, which maps names to these."""
    found, task = torch.zeros_like(ridge.from_params(shared)), model.task
    if model.adapter.open_vocabulary:
        found[: task.dim] = torch.eye(task.dim, dtype=found.dtype)
    elif task.text is not None:
        found[: task.dim] = task.text.double().mT
    return found


def mean_accuracy(replies: Params, choose: Judged) -> Tensor:
    """The accuracy of each candidate, [λ, c]: as a newcomer's (these count as NEWCOMERS says) and as a client's; mean
    over clients."""
    share = NEWCOMERS[choose]
    return share * replies[NEWCOMER].double().mean(0) + (1 - share) * replies[CLIENT].double().mean(0)


def first_best(scores: Tensor) -> tuple[int, int]:
    """Row and column of the largest, the first of equal ones."""
    row, column = np.unravel_index(int(scores.argmax()), tuple(scores.shape))
    return int(row), int(column)
