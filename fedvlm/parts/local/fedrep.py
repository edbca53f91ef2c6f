"""FedRep (Collins et al., 2021): trains the private parameters first, with the shared ones fixed, then the reverse.

v ← v − η ∇_v L(w_g, v) for `private_epochs` passes, then w ← w − η ∇_w L(w, v) from w = w_g for `epochs`; w goes up.

`private=` says what is private (private=head). FedPer trains both together, which is local=sgd. FedBABU does not train
the private parameters during federated training: private_epochs=0.
"""

from dataclasses import dataclass, replace

from fedvlm.core.data import Data
from fedvlm.core.descent import optimise
from fedvlm.core.local import Local
from fedvlm.core.model import Model
from fedvlm.core.ranges import Whole
from fedvlm.core.state import Message, Params, select


@dataclass(frozen=True)
class FedRep(Local):
    private_epochs: Whole = 1  # passes that train the private parameters, before `epochs` for the shared ones; 0: none
    train_shared: bool = True  # false: the shared parameters keep their initial values (FedOT's Figure 3, local-only)

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        names = message.shared
        shared, private = select(params, names), {k: v for k, v in params.items() if k not in names}
        if self.private_epochs and private:
            first = replace(self, epochs=self.private_epochs)
            loss = optimise(first, private, data, model.gradients(self.objective, held=shared))
            if not self.train_shared:
                return {"loss": loss}
        return {"loss": optimise(self, shared, data, model.gradients(self.objective, held=private))}
