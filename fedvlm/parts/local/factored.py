"""DP-FPL's client (Tran et al., ICLR 2025): factors its private prompt in every round, and trains the factors only.

At the start of a round P = U V + R is factored anew (one step of subspace iteration from the last V); then p_G, U and V are
trained, and R stays. So noise for differential privacy reaches the private prompt only in a subspace of rank k, and R keeps
what the factors cannot hold.

With dp=example every gradient in (p_G, U, V) is clipped and noisy: ε is that of one example of a client, for everything it
sends over the run. The factorisation reads private values that are noisy already, and costs nothing. With dp=client the sum
of the updates of p_G is (the paper's noise at the server), and private parts get none. The paper's two separate budgets
(server, clients) are one here: run either level. Our reading: R is fixed within a round, there within a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedvlm.core.adapter import Adapter
from fedvlm.core.data import Data
from fedvlm.core.descent import optimise
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.state import Message, Params
from fedvlm.parts.adapters.factored import Factored, factors
from fedvlm.privacy.descent import covered


@dataclass(frozen=True)
class Refactor(Local):
    effects: ClassVar[Mapping[str, str]] = {"residual": "length of the residual, divided by the private prompt's"}

    def incompatible(self, adapter: Adapter) -> str:
        return "" if isinstance(adapter, Factored) else "factors a private prompt; use adapter=factored"

    @covered
    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        assert isinstance(model.adapter, Factored)  # see `incompatible`
        context = model.adapter.own_context(params)
        params |= {k: v.contiguous() for k, v in factors(context, params["right"]).items()}
        rest = params.pop("rest")
        loss = optimise(self, params, data, model.gradients(self.objective, {"rest": rest}))
        params["rest"] = rest
        share = rest.flatten(1).norm(dim=1) / context.flatten(1).norm(dim=1).clamp(min=torch.finfo(rest.dtype).tiny)
        return {"loss": loss, "residual": share.to(data.dtype)}
