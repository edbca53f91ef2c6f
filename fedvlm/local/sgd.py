"""Plain local training, FedAvg's client (McMahan et al., 2017): train the shared model and send it back."""

from dataclasses import dataclass

from fedvlm.local.base import Local


@dataclass(frozen=True)
class Sgd(Local):
    pass
