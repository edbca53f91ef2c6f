"""Shared code of local rules that add a term to the loss of prompts: training, and a number that shows what it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fedvlm.core.adapter import Adapter
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Gradients, optimise
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.state import Params
from fedvlm.parts.local.means import Means, relative_to_plain

PULL: Mapping[str, str] = {
    "pull": "how much the term changes the gradient, relative to that of the loss, in a client's first step of the round"
}


def fit_with_term(rule: Local, model: Model, params: Params, data: Data, whole: Gradients) -> Params:
    """Trains `params` in place with the gradients `whole`; the loss, and `pull`."""
    means, plain = Means(data), model.gradients(rule.objective)

    def measured(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        each, found = whole(now, batch)
        if batch.step == 0:
            means.add(pull=relative_to_plain(now, found, plain(now, batch)[1]))
        return each, found

    return {"loss": optimise(rule, params, data, measured), **means.found("pull")}


def has_prompts(adapter: Adapter) -> bool:
    """Whether its class features come from the text tower and are compared with by alignment terms."""
    return adapter.requires == "text tower" and adapter.alignment == "classes"
