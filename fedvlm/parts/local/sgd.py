"""Plain local training, FedAvg's client (McMahan et al., 2017): train the shared model and send it back.

From w = w_g, `epochs` times over the client's batches: w ← w − η ∇L(w; batch), or a step of another optimiser; w goes up.
Private parameters take the same steps and stay.
"""

from dataclasses import dataclass

from fedvlm.core.local import Local


@dataclass(frozen=True)
class Sgd(Local):
    pass
