"""The interface of a local rule: how a client turns the server's message and its own data into a reply.

The defaults are FedAvg's client: train the shared model, and send it back. A rule overrides the step that differs:
`gradients` (another loss), `fit` (another training loop), `personal_copy` (what a client keeps), `adapt` (what happens
at test time).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fedvlm.core import copies
from fedvlm.core.adapter import Adapter, Task
from fedvlm.core.data import Data
from fedvlm.core.descent import Gradients, OptimiserSettings, optimise
from fedvlm.core.model import Model
from fedvlm.core.schema import LOSS, SIZE, Fields
from fedvlm.core.state import Message, Params, copy_per_client, select, with_client_axis
from fedvlm.core.tasks import Objective


class Trained(NamedTuple):
    """What a client has after training, [clients, ...] each."""

    own: Params  # its new private row
    shared: Params  # the shared parameters as trained; sent to the server
    values: Params  # sent beside them, by the names in `uploads`


@dataclass(frozen=True)
class Local(OptimiserSettings):
    """How a client trains; the defaults are FedAvg's client."""

    objective: Objective = "cross-entropy"  # the training loss; contrastive is that of FedCLIP's public code
    keep: bool = False  # true: a client's personal model is the one it trained last; false: the shared model

    adapts: ClassVar[bool] = False  # whether `adapt` changes the personal model at test time
    partner: ClassVar[str] = ""  # the only merge it works with; "" any
    one_round: ClassVar[bool] = False  # True if further rounds would not change the result
    # What its mechanism does in a round, by name, with the meaning in words. `fit` returns these numbers, [clients] each,
    # beside the loss; the round's record has their medians, so that a reader sees whether the mechanism acts.
    effects: ClassVar[Mapping[str, str]] = {}

    def incompatible(self, adapter: Adapter) -> str:
        """Why it cannot be used with this adapter; "" where it can."""
        return ""

    def uploads(self, task: Task, shared: Params) -> Fields:
        """What a client sends beside the shared parameters."""
        return {"n": SIZE, "loss": LOSS}

    def private_state(self, shared: Params) -> Params:
        """What the rule stores per client beside the adapter's private parameters, as a new client starts with it."""
        return copies.empty(shared) if self.keep else {}

    def gradients(self, model: Model, message: Message, own: Params) -> Gradients:
        """The loss to minimise, with its gradient. `own` are the clients' private rows."""
        return model.gradients(self.objective)

    def fit(self, model: Model, params: Params, message: Message, own: Params, data: Data) -> Params:
        """Trains `params` (shared and private) in place; returns the mean loss of each client and other uploads."""
        return {"loss": optimise(self, params, data, self.gradients(model, message, own))}

    def personal_copy(self, model: Model, own: Params, message: Message, trained: Params, data: Data) -> Params:
        """The shared parameters of the personal model that a client stores (`keep`)."""
        return select(trained, message.shared)

    def train(self, model: Model, own: Params, message: Message, data: Data) -> Trained:
        private = copies.adapter_params(own)
        params = copy_per_client(message.shared, len(data)) | private
        values = self.fit(model, params, message, own, data)
        kept = copies.store(self.personal_copy(model, own, message, params, data)) if self.keep else {}
        return Trained(select(params, private) | kept, select(params, message.shared), {"n": data.sizes(), **values})

    def personal(self, own: Params, shared: Params) -> Params:
        """Each client's personal model; `shared` has a client axis."""
        return copies.adapter_params(own) | (copies.load_copies(own, shared) if self.keep else shared)

    def adapt(self, model: Model, own: Params, shared: Params, data: Data) -> Params:
        """The personal model at test time, for rules that first train it on the client's training data."""
        return self.personal(own, shared)


def anchor_of(message: Message) -> Params:
    """The shared model that was sent, with a client axis, for loss terms that keep parameters or features near its own."""
    return with_client_axis(message.shared)
