"""pFedMoAP's client (Luo et al., ICLR 2025): goes on with its own prompt, beside the nearest prompts of other clients.

In each round the client takes, from the prompts that the server has (merge=experts), the K nearest to its own (Euclidean),
and trains its prompt and its gate, with the others fixed. Where there are fewer than K its own prompt takes their places.
The personal model has the client's own prompt, never the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedvlm.core import copies
from fedvlm.core.adapter import Adapter
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import optimise
from fedvlm.core.local import Local, anchor_of
from fedvlm.core.model import Model
from fedvlm.core.state import Message, Params
from fedvlm.errors import FedvlmError
from fedvlm.parts.adapters.experts import OTHERS, Experts
from fedvlm.parts.adapters.several import encode_contexts
from fedvlm.parts.local.means import Means

POOL, KNOWN = "pool", "known"  # in the message: everybody's last prompt, [population, …], and 1 where there is one


@dataclass(frozen=True)
class NearestExperts(Local):
    keep: bool = True  # always true: the client's own prompt is that of its personal model

    partner: ClassVar[str] = "experts"
    effects: ClassVar[Mapping[str, str]] = {
        "experts": "prompts of other clients that a client has",
        "borrowed": "weight that its gate gives to them, mean over the examples of the first step",
    }

    def __post_init__(self) -> None:
        if not self.keep:
            raise FedvlmError("keep=false: a client of pFedMoAP goes on with its own prompt; leave keep out")

    def incompatible(self, adapter: Adapter) -> str:
        return "" if isinstance(adapter, Experts) else "mixes prompts of several clients; use adapter=experts"

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        adapter = model.adapter
        assert isinstance(adapter, Experts)  # see `incompatible`
        params["context"].copy_(copies.load_copies(own, anchor_of(message))["context"])
        others, count = nearest_prompts(params["context"], adapter.experts, message, data)
        params.pop("others")
        held = {"others": others, OTHERS: encode_contexts(adapter, model.task, others)}
        means, plain = Means(data), model.gradients(self.objective, held)

        def gradients(now: Params, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
            if batch.step == 0:
                n = len(batch.y)
                weight = adapter.gate(now, adapter.texts(model.task, now | {OTHERS: held[OTHERS][:n]}), batch.x)
                means.add(borrowed=batch.mean(weight[..., 1:].sum(-1).mean(-1)) * (count[:n] > 0))
            return plain(now, batch)

        loss = optimise(self, params, data, gradients)
        params["others"] = others
        return {"loss": loss, "experts": count, **means.found("borrowed")}


def nearest_prompts(context: Tensor, count: int, message: Message, data: Data) -> tuple[Tensor, Tensor]:
    """The prompts [clients, count, …] nearest to each client's own, and how many of them are other clients'."""
    pool, known = message.extra[POOL].to(context), message.extra[KNOWN] > 0
    distance = torch.cdist(context.flatten(1), pool.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
    itself = data.tensor(data.ids)[:, None] == torch.arange(len(pool), device=pool.device)
    distance = distance.masked_fill(itself | ~known, torch.inf)
    found, at = distance.topk(min(count, len(pool)), largest=False)
    others = context[:, None].repeat(1, count, *[1] * (context.dim() - 1))
    real = found.isfinite()
    chosen = torch.where(real.view(*real.shape, *[1] * (context.dim() - 1)), pool[at], context[:, None])
    others[:, : at.shape[1]] = chosen
    return others, real.sum(1).to(data.dtype)
