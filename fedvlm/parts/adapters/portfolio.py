"""PromptFolio (Pan et al., 2024): a shared and a private context; a class vector is the weighted mean of both.

text = (1 − θ) · text(shared) + θ · text(own), normalised; θ = 0.4. Both contexts start equal; a newcomer, who has no
private context, uses the shared one for both.
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

    def init(self, task: Task, seed: int) -> Params:
        context = super().init(task, seed)["context"]
        return {"context": context, "own": context.clone()}

    def shared_only(self, params: Params) -> Params:
        return params | {"own": params["context"]}

    def class_vectors(self, task: Task, params: Params) -> Tensor:
        shared, own = (super(Portfolio, self).class_vectors(task, {"context": params[k]}) for k in ("context", "own"))
        return F.normalize((1 - self.share) * shared + self.share * own, dim=-1)
