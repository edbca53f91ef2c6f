"""CoCoOp with a shared context and private meta-nets, FedOT's "Server CoOp".

vⱼ(h) = vⱼ + B relu(A h + a) + b as in adapter=conditional, with v shared, and A, a, B, b private.

The server averages the context alone (FedOT's Table 3: d · n numbers at the server, the meta-net on the client). Our
reading of the supplement's two rows of this kind: in "Server CoOp" a newcomer uses the server's context as it is, which
is CoOp; in "Meta-Net Random Init" (random=true) it uses the context with a meta-net as it was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedvlm.core.state import Params
from fedvlm.parts.adapters.conditional import Conditional

NETWORK = ("a", "a0", "b", "b0")


@dataclass(frozen=True)
class ServerCoop(Conditional):
    private: tuple[str, ...] = NETWORK
    # true: a newcomer's meta-net is as it was drawn; false: it has none, the context is not shifted
    random: bool = False

    def shared_only(self, params: Params) -> Params:
        if self.random:
            return params
        return params | {k: torch.zeros_like(params[k]) for k in ("b", "b0")}
