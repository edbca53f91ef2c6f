"""FedDTL's schedule (2026, §3.3 and D.3): supervised until training accuracy stands still, then reinforced for good.

The stage ends when the clients' mean training accuracy has moved by less than `calm` for `calm_rounds` rounds running (the
first round has none before it, and is never calm).
From then on a reference goes down with the mean model: ½ (the model at the switch + the latest), or either of them.
Clients that know of stages (local=two_stage) change their training when a reference comes; others do not mind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedvlm.adapters.base import Task
from fedvlm.core import REFERENCE, Cohort, Data, FedvlmError, Params, State, told
from fedvlm.local.model import Model
from fedvlm.merge.mean import Hear, Mean

FINAL = "sft."  # before the names of the model at the switch, on the server


@dataclass(frozen=True)
class Stages(Mean):
    stage: Literal["both", "supervised", "reinforced"] = "both"  # ablations: only one of them
    calm: float = 0.003  # ε_acc
    calm_rounds: int = 2  # T_r
    reference: Literal["mix", "latest", "final"] = "mix"

    def __post_init__(self) -> None:
        if self.calm < 0 or self.calm_rounds < 1:
            raise FedvlmError(
                f"calm={self.calm:g} must not be negative and calm_rounds={self.calm_rounds} at least 1; "
                "stage=supervised never changes, stage=reinforced starts with it"
            )

    def collects(self, task: Task) -> dict[str, tuple[int, ...]]:
        return {"accuracy": ()}

    @torch.no_grad()
    def collect(self, model: Model, params: Params, data: Data) -> Params:
        score, block = model.adapter.learns.score, model.adapter.block
        params = model.adapter.read(model.task, params, {})
        right = [score(model.logits(one, x), y[None])[0][0] for one, x, y in each(params, data, block)]
        return {"accuracy": by_client(right, data, block)}

    def begin(self, model: Model, seed: int) -> tuple[Params, Params]:
        return {}, {"stage." + k: torch.zeros((), dtype=torch.float64) for k in ("rounds", "calm", "accuracy")}

    def round(self, state: State, cohort: Cohort) -> State:
        return self.train(state, cohort)

    def train(self, state: State, cohort: Cohort, hear: Hear = lambda ids, up: None) -> State:
        """The mean, and the schedule."""
        server = dict(state.server)
        own = {k: v for k, v in state.shared.items() if not told(k)}
        ready = self.stage == "reinforced" or (self.stage == "both" and int(server["stage.calm"]) >= self.calm_rounds)
        if ready and not any(k.startswith(FINAL) for k in server):
            server |= {FINAL + k: v.clone() for k, v in own.items()}
        beside = {k: v for k, v in state.shared.items() if told(k)}
        if ready:
            beside |= {REFERENCE + k: self.near(v, server[FINAL + k]) for k, v in own.items()}
        found: dict[str, list[float]] = {"accuracy": [], "clipped": [], "flat": []}

        def listen(ids: np.ndarray, up: Params) -> None:
            for k, values in found.items():
                values += up[k].tolist() if k in up else []
            hear(ids, up)

        total, _, kept = self.gather(state, cohort, own, beside=beside, hear=listen)
        accuracy = float(np.mean(found["accuracy"]))
        if not ready:
            still = int(server["stage.rounds"]) > 0 and abs(accuracy - float(server["stage.accuracy"])) < self.calm
            server["stage.calm"] = server["stage.calm"] + 1 if still else torch.zeros_like(server["stage.calm"])
            server["stage.rounds"] = server["stage.rounds"] + 1
        server["stage.accuracy"] = torch.tensor(accuracy, dtype=torch.float64)
        cohort.notes |= {"stage": "reinforced" if ready else "supervised", "train_accuracy": accuracy}
        cohort.notes |= {k: float(np.mean(v)) for k, v in found.items() if ready and v and k != "accuracy"}
        shared = state.shared | {k: total[k].to(v.dtype) for k, v in own.items()}
        return state._replace(shared=shared, server=server | kept)

    def near(self, latest: Tensor, final: Tensor) -> Tensor:
        return {"mix": (latest + final) / 2, "latest": latest, "final": final}[self.reference]


def each(params: Params, data: Data, block: int) -> Iterator[tuple[Params, Tensor, Tensor]]:
    """Every client's training examples, a block at a time: its own model, x [1, n, …] and y [n]."""
    for i, (low, high, *_) in enumerate(data.bounds):
        one = {k: v[i : i + 1] if len(v) > 1 else v for k, v in params.items()}
        for first in range(int(low), int(high), block):
            last = min(first + block, int(high))
            yield one, data.x[None, first:last], data.y[first:last]


def by_client(right: list[Tensor], data: Data, block: int) -> Tensor:
    """The mean over each client's blocks, 0 where it has none."""
    blocks, out = iter(right), []
    for count in data.counts("train"):
        mine = [next(blocks) for _ in range(-(-int(count) // block))]
        out.append(
            torch.cat(mine).to(data.kind).mean() if mine else torch.zeros((), dtype=data.kind, device=data.x.device)
        )
    return torch.stack(out)
