"""pFedMoAP's server (Luo et al., ICLR 2025): keeps everybody's last prompt, and sends them to the clients as experts.

The shared model, for newcomers, is the mean. **Each client's prompt goes to the others**, without its name. In the paper the
server chooses K prompts for a client; here the message is the same for all, with every prompt that there is, and the client
chooses (local=experts): the same experts, at population × prompt instead of K × prompt down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Start
from fedvlm.core.model import Model
from fedvlm.core.state import Reply, State
from fedvlm.parts.local.experts import KNOWN, POOL
from fedvlm.parts.merge.mean import Mean


@dataclass(frozen=True)
class PromptPool(Mean):
    requires_parameters: ClassVar[tuple[str, ...]] = ("context",)
    partner: ClassVar[str] = "experts"
    tells: ClassVar[tuple[str, ...]] = (POOL, KNOWN)
    effects: ClassVar[Mapping[str, str]] = {"prompts": "clients whose prompt the server has"}

    def init(self, model: Model, clients: int, seed: int) -> Start:
        start = super().init(model, clients, seed)
        context = model.adapter.init(model.task, seed)["context"]
        pool = {POOL: context.new_zeros(clients, *context.shape), KNOWN: context.new_zeros(clients)}
        return start._replace(server=start.server | pool)

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        pool = {k: state.server[k].clone() for k in (POOL, KNOWN)}

        def store(reply: Reply) -> None:
            at = torch.from_numpy(reply.ids)
            pool[POOL][at] = reply.shared["context"].to(pool[POOL])
            pool[KNOWN][at] = 1

        message = state.message(extra={k: state.server[k] for k in pool})
        found = self.average(state, cohort, message, on_reply=store)
        cohort.acted(prompts=float(pool[KNOWN].sum()))
        return state._replace(shared=found.mean, server=state.server | pool)
