"""FedAdapter, a non-linear ablation of FedOT: a private two-layer network on the image embedding.

logits = scale · w_g n(h)/‖n(h)‖,  n(h) = h + V relu(U h + u) + v.
Our reading (the paper gives no details): the network is residual with V = v = 0 at the start, so that a newcomer has
the identity, as in FedOT; the hidden layer is as wide as the embedding.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter, Task, initial_classifier
from fedvlm.core.seeds import generator
from fedvlm.core.state import Params, linear


@dataclass(frozen=True)
class Mlp(Adapter):
    private: tuple[str, ...] = ("u", "u0", "v", "v0")
    init_from: Literal["text", "random"] = "text"  # initial classifier: embeddings of the class names, or random

    def init(self, task: Task, seed: int) -> Params:
        d = task.dim
        u = (torch.rand(d, d, generator=generator(seed, 3)) * 2 - 1) * d**-0.5
        private = {"u": u, "u0": torch.zeros(d), "v": torch.zeros(d, d), "v0": torch.zeros(d)}
        return {"head": initial_classifier(task, self.init_from, seed)} | private

    def features(self, task: Task, params: Params, x: Tensor) -> Tensor:
        hidden = torch.relu(linear(x, params["u"], params["u0"]))
        return F.normalize(x + linear(hidden, params["v"], params["v0"]), dim=-1)

    def logits(self, task: Task, params: Params, x: Tensor) -> Tensor:
        return task.scale * linear(self.features(task, params, x), params["head"])
