"""PromptFolio (Pan et al., 2024): a shared and a private context; a class vector is the weighted mean of both.

text = (1 − θ) · text(shared) + θ · text(own), normalised; θ = 0.4. Both contexts start equal; a newcomer, who has no
private context, uses the shared one for both. FOCoOp's public code, in whose tables PromptFolio is a baseline, has θ = 0.2,
contexts from draws of their own (`apart`) and a mean that is not normalised.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Task
from fedvlm.core.ranges import Share
from fedvlm.core.state import Params
from fedvlm.parts.adapters.prompt import Prompt


@dataclass(frozen=True)
class Portfolio(Prompt):
    private: tuple[str, ...] = ("own",)
    share: Share = 0.4  # θ, weight of the private context in a class vector; 0: the shared one only
    apart: bool = False  # the private context starts from a draw of its own
    normalised: bool = True  # the weighted mean has length 1

    def init(self, task: Task, seed: int) -> Params:
        context = super().init(task, seed)["context"]
        return {"context": context, "own": super().init(task, seed + 1)["context"] if self.apart else context.clone()}

    def shared_only(self, params: Params) -> Params:
        return params | {"own": params["context"]}

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        shared, own = (super(Portfolio, self).class_vectors(task, {"context": params[k]}) for k in ("context", "own"))
        mixed = (1 - self.share) * shared + self.share * own
        return F.normalize(mixed, dim=-1) if self.normalised else mixed
