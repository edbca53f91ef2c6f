"""FedPGP's client (Cui et al., ICML 2024): a contrastive term between the frozen, the shared and the personal prompt.

The shared prompt's class features are pulled towards the frozen model's and pushed away from the personal prompt's:
loss + μ · −log [e^{cos(g, z)/t} / (e^{cos(g, z)/t} + e^{cos(g, p)/t})], the mean over classes, with z, g, p the class
features of the frozen model ("a photo of a …"), of the shared part alone and of the whole prompt; t = 0.5, μ = 1.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from fedvlm.core.adapter import Adapter, HasSharedTwin, class_vectors
from fedvlm.core.data import Batch
from fedvlm.core.descent import Gradients, by_autograd
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.ranges import NotNegative, Positive
from fedvlm.core.state import Message, Params


@dataclass(frozen=True)
class Contrast(Local):
    contrast: NotNegative = 1.0  # μ, weight of the contrastive term; 0: none
    temperature: Positive = 0.5  # t, of the contrastive term

    def incompatible(self, adapter: Adapter) -> str:
        fits = adapter.alignment == "classes" and isinstance(adapter, HasSharedTwin)
        return "" if fits else "compares the class features of a shared and a private prompt; use adapter=lowrank"

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        adapter, task = model.adapter, model.task
        names = task.names()
        assert isinstance(adapter, HasSharedTwin)  # see `incompatible`

        def loss(now: Params, batch: Batch) -> Tensor:
            logits, whole = adapter.logits_and_aligned(task, now, batch)
            shared = class_vectors(adapter, task, adapter.shared_only(now))
            positive, negative = (shared * names).sum(-1), (shared * whole).sum(-1)  # cosines
            term = F.softplus((negative - positive) / self.temperature).mean(-1)
            return adapter.loss(self.objective, logits, batch) + self.contrast * term

        return by_autograd(loss)
