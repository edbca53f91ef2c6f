"""Coordinate-wise median (Yin et al., 2018): fewer than half of the clients cannot move it far, whatever they send."""

from dataclasses import dataclass
from typing import Literal

from fedvlm.core import Cohort, State
from fedvlm.merge.mean import Mean


@dataclass(frozen=True)
class Median(Mean):
    weights: Literal["uniform"] = "uniform"  # a liar would give any size

    def round(self, state: State, cohort: Cohort) -> State:
        ids, up = cohort.ask("train", state.shared)
        gaps = self.watch(state, cohort, ids, up)
        cohort.notes |= {"weights": dict.fromkeys(ids.tolist(), 1 / len(ids)), "loss": float(up["loss"].median())}
        middle = [(len(ids) - 1) // 2, len(ids) // 2]  # torch's quantile refuses large layers
        shared = {k: up[k].sort(0).values[middle].mean(0) for k in state.shared}
        return state._replace(shared=shared, server=state.server | gaps.kept)
