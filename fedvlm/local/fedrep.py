"""FedRep (Collins et al., 2021): the private part first, with the shared part still; then the shared part.

What is private is the adapter's choice (private=head). FedPer trains both together: that is local=sgd. FedBABU never
trains the private part while federating: private_epochs=0.
"""

from dataclasses import dataclass, replace

from fedvlm.core import Data, Params, only
from fedvlm.local.descent import descend
from fedvlm.local.model import Model
from fedvlm.local.sgd import Sgd


@dataclass(frozen=True)
class FedRep(Sgd):
    private_epochs: int = 1  # on the private part, before `epochs` on the shared one

    def walk(self, model: Model, params: Params, down: Params, own: Params, data: Data) -> Params:
        names = self.trained(down)
        shared, private = only(params, names), {k: v for k, v in params.items() if k not in names}
        if self.private_epochs and private:
            first = replace(self, epochs=self.private_epochs)
            descend(first, private, data, model.slopes(self.objective, held=shared))
        return {"loss": descend(self, shared, data, model.slopes(self.objective, held=private))}
