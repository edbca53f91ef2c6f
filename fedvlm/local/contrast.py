"""FedPGP's client (Cui et al., ICML 2024): the shared prompt is drawn to the frozen model's own words for a class, and away
from the client's personal prompt.

loss + μ · −log [e^{cos(g, z)/t} / (e^{cos(g, z)/t} + e^{cos(g, p)/t})], the mean over classes, with z, g, p the class
features of the frozen model ("a photo of a …"), of the shared part alone and of the whole; t = 0.5, μ = 1.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from fedvlm.adapters.base import Adapter
from fedvlm.core import Batch, FedvlmError, Params
from fedvlm.local.descent import Slopes, by_autograd
from fedvlm.local.model import Model
from fedvlm.local.sgd import Sgd


@dataclass(frozen=True)
class Contrast(Sgd):
    contrast: float = 1.0  # μ
    temperature: float = 0.5  # t

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise FedvlmError(f"temperature={self.temperature:g} must be above 0")

    def refuses(self, adapter: Adapter) -> str:
        fits = adapter.aligns == "classes" and adapter.pairs
        return "" if fits else "compares the class features of a shared and a private prompt; use adapter=lowrank"

    def slopes(self, model: Model, anchor: Params, own: Params) -> Slopes:
        adapter, task = model.adapter, model.task
        names = task.names()

        def loss(now: Params, batch: Batch) -> Tensor:
            logits, whole = adapter.both(task, now, batch)
            shared = adapter.classes(task, adapter.public(now))
            toward, away = (shared * names).sum(-1), (shared * whole).sum(-1)
            apart = F.softplus((away - toward) / self.temperature).mean(-1)
            return adapter.loss(self.objective, logits, batch) + self.contrast * apart

        return by_autograd(loss)
