"""A server that adds up the clients' second moments and solves the shared head (ours, 2026; docs/moments.md).

W_g = (ΣA + λI)⁻¹(ΣB + λ c T) with T the class names' embeddings: ridge regression on everybody's examples, shrunk towards
the zero-shot classifier. λ and c are the candidates of `strengths` and `texts` that clients find best
(parts/local/moments.py): without their own moments, as a newcomer would, and with them; W_g is the mean over candidates,
weighted by that accuracy; solver=both has a Gaussian head beside each. With one λ and one c there is no such exchange, and
of both solvers the ridge head is taken. Only sums are used, so secure=true gives the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvlm.core import copies
from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Merge, by_client
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative, Positive, default
from fedvlm.core.schema import SHARE, Field, Fields
from fedvlm.core.state import Params, Reply, State
from fedvlm.errors import FedvlmError
from fedvlm.parts import ridge
from fedvlm.parts.local.moments import (
    AVERAGING,
    BY_SIZE,
    CLIENT,
    CROSS,
    NEWCOMER,
    PERSONAL,
    SCORED,
    SECOND,
    SELECT,
    SOLVER,
    SOLVERS,
    STRENGTHS,
    TEXTS,
    Judged,
    Solver,
    averaged,
    candidates,
    first_best,
    heads_of,
    mean_accuracy,
    text_prior,
)
from fedvlm.parts.ridge import Moments
from fedvlm.privacy.secure.sums import Summand, sums_of, sums_only, weight_and_loss

LARGEST = 16.0  # of an entry of a client's moments (secure=true): features of length 1 and a 1 give at most 1


@dataclass(frozen=True)
class SumOfMoments(Merge):
    solver: Solver = "ridge"  # a ridge regression, Gaussian discriminant analysis (TOFA), or the mean of both heads
    weights: Literal["size", "uniform"] = default("uniform", "effort")  # by training examples, or the same for all
    strengths: tuple[Positive, ...] = (100, 30, 10, 3, 1, 0.3, 0.1, 0.03, 0.01)  # λ, in mean eigenvalues: candidates
    texts: tuple[NotNegative, ...] = (1, 2, 4, 8, 0)  # c, length of class names' embeddings: candidates; 0: not used
    choose: Judged = "both"  # by accuracy without clients' own moments (newcomers), with them, or both, alike or 3 to 1
    averaging: NotNegative = 0.0  # heads count by exp(accuracy/this many standard errors); 0: the best candidate alone

    partner: ClassVar[str] = "moments"
    asks: ClassVar[tuple[str, ...]] = ("train", "adjust", "adjust")
    tells: ClassVar[tuple[str, ...]] = (SECOND, CROSS, BY_SIZE, STRENGTHS, TEXTS, SOLVER, AVERAGING)
    effects: ClassVar[Mapping[str, str]] = {
        "strength": "λ of the best candidate, in units of the mean eigenvalue of the summed moments",
        "text": "c of the best candidate, the length of the class names' embeddings that the head is shrunk towards",
        "as_newcomer": "accuracy of the best candidate on clients whose moments were left out of it",
    }

    def __post_init__(self) -> None:
        if self.observers:
            raise FedvlmError(
                f"{'cosine' if self.cosine else 'gaps'}=true compares clients' updates, and moments are none; leave it out"
            )
        if not (self.strengths and self.texts and min(self.strengths) > 0 and min(self.texts) >= 0):
            raise FedvlmError(
                f"strengths={self.strengths} must be numbers above 0, texts={self.texts} numbers of at least 0, "
                "such as strengths=1,0.1 texts=0,4"
            )

    @property
    def requires_parameters(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("head",) if self.solver == "ridge" else ("head", "bias")

    def incompatible(self, adapter: Adapter) -> str:
        if self.solver != "ridge" and adapter.open_vocabulary:
            return f"solver={self.solver} has a mean for each class, and this adapter one map for all; use solver=ridge"
        return super().incompatible(adapter)

    def adjusts(self, task: Task) -> Fields:
        """What clients answer to the step `adjust` (rounds/steps/adjust.py)."""
        shape = (heads_of(self.solver) * len(self.strengths), len(self.texts))
        scored = Field(low=0, high=1, per="val", whole=True)
        return {k: SHARE._replace(shape=shape) for k in (NEWCOMER, CLIENT)} | {SCORED: scored}

    @sums_only
    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        if cohort.secure:
            sums = sums_of(self, model, state, cohort)
            total = Moments(ridge.unpacked(sums[SECOND]), sums[CROSS])
        else:
            total = self.sum(state, cohort)
        extra = {SECOND: ridge.packed(total.second), CROSS: total.cross, BY_SIZE: torch.tensor(self.weights == "size")}
        extra |= {STRENGTHS: torch.tensor(self.strengths), TEXTS: torch.tensor(self.texts)}
        extra |= {SOLVER: torch.tensor(SOLVERS.index(self.solver)), AVERAGING: torch.tensor(self.averaging)}
        dtype = torch.get_default_dtype()
        message = state.message(stage=SELECT, extra={k: v.to(dtype) for k, v in extra.items()})
        heads, count = candidates(message, model, total, self.strengths, text_prior(model, state.shared)), 0
        accuracies = torch.zeros(len(heads), len(self.texts))
        if len(self.strengths) * len(self.texts) == 1:
            heads, accuracies = heads[:1], accuracies[:1]  # nobody judges: of both solvers, the regression
        else:
            replies = cohort.ask("adjust", message).values
            accuracies, count = mean_accuracy(replies, self.choose), int(replies[SCORED].sum())
            cohort.acted(as_newcomer=float(replies[NEWCOMER].double().mean(0)[first_best(accuracies)]))
        head, (row, column) = averaged(heads, self.texts, accuracies, count, self.averaging), first_best(accuracies)
        shared = state.shared | ridge.to_params(head, state.shared)
        cohort.effects |= {"strength": [self.strengths[row % len(self.strengths)]], "text": [self.texts[column]]}
        after = state._replace(shared=shared, server=state.server | {k: message.extra[k] for k in (SECOND, CROSS)})
        if copies.STARTED in state.private:  # clients have heads of their own (keep=)
            cohort.ask("adjust", after.message(stage=PERSONAL, extra=message.extra))
        return after

    def sum(self, state: State, cohort: Cohort) -> Moments:
        reply = cohort.ask("train", state.message())
        weight = self.weight(reply).double()
        cohort.notes |= {"weights": by_client(reply.ids, weight / weight.sum())}
        cohort.notes["loss"] = float(weight @ reply.values["loss"].double() / weight.sum())
        second, cross = (torch.tensordot(weight, reply.values[k].double(), dims=1) for k in (SECOND, CROSS))
        return Moments(ridge.unpacked(second), cross)

    def weight(self, reply: Reply) -> Tensor:
        n = reply.values["n"]
        return n if self.weights == "size" else torch.ones_like(n)

    def ranges(self, model: Model, sent: Params, limit: float) -> dict[str, Summand]:
        size, classes = len(ridge.from_params(sent)), len(model.task.classes)
        shapes: dict[str, tuple[int, ...]] = {SECOND: (size * (size + 1) // 2,), CROSS: (size, classes)}
        moments = {k: Summand(shape, min(limit, LARGEST), weight="weight") for k, shape in shapes.items()}
        return weight_and_loss(self.weights) | moments

    def summands(self, reply: Reply, sent: Params) -> Params:
        return {"weight": self.weight(reply)} | {k: reply.values[k] for k in ("loss", SECOND, CROSS)}
