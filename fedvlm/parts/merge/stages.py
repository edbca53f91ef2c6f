"""FedDTL's schedule (2026, §3.3 and D.3): supervised training until the accuracy no longer changes, then reinforcement.

The first stage ends when the clients' mean training accuracy has changed by less than `tolerance` in each of `patience`
rounds in a row (the first round has nothing to compare with and never counts). From then on a reference model is sent
beside the mean model: ½ (the model at the switch + the latest), or one of the two. local=two_stage changes its training
in the second stage; other rules ignore the stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedvlm.core.adapter import Task
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data
from fedvlm.core.merge import Start
from fedvlm.core.model import Model
from fedvlm.core.ranges import Count, NotNegative
from fedvlm.core.schema import SHARE, Fields
from fedvlm.core.state import Params, Reply, State
from fedvlm.errors import FedvlmError
from fedvlm.parts.local.two_stage import REINFORCED
from fedvlm.parts.merge.mean import Mean, OnReply

FINAL = "sft."  # prefix of the model at the switch, in the server's state


@dataclass(frozen=True)
class Stages(Mean):
    stage: Literal["both", "supervised", "reinforced"] = "both"  # both, or (ablations) only one of them
    tolerance: NotNegative = 0.003  # ε_acc, the change of training accuracy below which a round counts as converged
    patience: Count = 2  # T_r, converged rounds in a row that end the first stage
    reference: Literal["mix", "latest", "final"] = "mix"  # the latest model, the one at the switch, or their mean (mix)

    def __post_init__(self) -> None:
        if self.tolerance < 0 or self.patience < 1:
            raise FedvlmError(
                f"tolerance={self.tolerance:g} must not be negative and patience={self.patience} at least 1; "
                "stage=supervised has no second stage, stage=reinforced no first one"
            )

    def uploads(self, task: Task) -> Fields:
        return {"accuracy": SHARE}

    @torch.no_grad()
    def client_values(self, model: Model, params: Params, data: Data) -> tuple[Params, dict[str, Tensor]]:
        score, block = model.adapter.task_type.score, model.adapter.limits.examples
        params = model.adapter.prepare(model.task, params, {})
        correct = [score(model.logits(one, x), y[None])[0] for one, x, y in training_blocks(params, data, block)]
        return {"accuracy": mean_by_client(correct, data, block)}, {}

    def init(self, model: Model, clients: int, seed: int) -> Start:
        start = super().init(model, clients, seed)
        counters = {"stage." + k: torch.zeros((), dtype=torch.float64) for k in ("rounds", "calm", "accuracy")}
        return start._replace(server=start.server | counters)

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        return self.train(state, cohort)

    def train(self, state: State, cohort: Cohort, on_reply: OnReply | None = None) -> State:
        """One round: averages the replies and applies the schedule."""
        server = dict(state.server)
        second = self.stage == "reinforced" or (self.stage == "both" and int(server["stage.calm"]) >= self.patience)
        if second and not any(k.startswith(FINAL) for k in server):
            server |= {FINAL + k: v.clone() for k, v in state.shared.items()}
        reference = {k: self.reference_value(v, server[FINAL + k]) for k, v in state.shared.items()} if second else {}
        stage = REINFORCED if second else "supervised"
        accuracies: list[float] = []

        def collect(reply: Reply) -> None:
            accuracies.extend(reply.values["accuracy"].tolist())
            if on_reply:
                on_reply(reply)

        averaged = self.average(state, cohort, state.message(stage, reference), on_reply=collect)
        accuracy = float(np.mean(accuracies))
        if not second:
            converged = (
                int(server["stage.rounds"]) > 0 and abs(accuracy - float(server["stage.accuracy"])) < self.tolerance
            )
            server["stage.calm"] = server["stage.calm"] + 1 if converged else torch.zeros_like(server["stage.calm"])
            server["stage.rounds"] = server["stage.rounds"] + 1
        server["stage.accuracy"] = torch.tensor(accuracy, dtype=torch.float64)
        cohort.notes |= {"stage": stage, "train_accuracy": accuracy}
        return state._replace(shared=averaged.mean, server=server)

    def reference_value(self, latest: Tensor, final: Tensor) -> Tensor:
        return {"mix": (latest + final) / 2, "latest": latest, "final": final}[self.reference]


def training_blocks(params: Params, data: Data, block: int) -> Iterator[tuple[Params, Tensor, Tensor]]:
    """The training examples of each client in blocks of at most `block`: the client's model, x [1, n, …] and y [n]."""
    for i, (low, high, *_) in enumerate(data.bounds):
        one = {k: v[i : i + 1] if len(v) > 1 else v for k, v in params.items()}
        for first in range(int(low), int(high), block):
            last = min(first + block, int(high))
            yield one, data.part(first, last)[None], data.y[first:last]


def mean_by_client(blocks: list[Tensor], data: Data, block: int) -> Tensor:
    """The mean over each client's blocks, which come in the order of `training_blocks`; 0 where a client has none."""
    remaining, out = iter(blocks), []
    for count in data.counts("train"):
        mine = [next(remaining) for _ in range(-(-int(count) // block))]
        none = torch.zeros((), dtype=data.dtype, device=data.x.device)
        out.append(torch.cat(mine).to(data.dtype).mean() if mine else none)
    return torch.stack(out)
