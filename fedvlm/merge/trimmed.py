"""Coordinate-wise trimmed mean (Yin et al., 2018): the mean of what is left when the extremes are cut at both ends."""

from dataclasses import dataclass
from typing import Literal

from fedvlm.core import Cohort, State
from fedvlm.merge.mean import Mean


@dataclass(frozen=True)
class Trimmed(Mean):
    weights: Literal["uniform"] = "uniform"  # a liar would give any size
    trim: float = 0.2  # share of clients cut at each end, at least one where three or more answered

    def round(self, state: State, cohort: Cohort) -> State:
        ids, up = cohort.ask("train", state.shared)
        gaps = self.watch(state, cohort, ids, up)
        cut = min(max(int(self.trim * len(ids)), 1), (len(ids) - 1) // 2)
        cohort.notes |= {"weights": dict.fromkeys(ids.tolist(), 1 / len(ids)), "loss": float(up["loss"].median())}
        kept = slice(cut, len(ids) - cut)
        shared = {k: up[k].sort(0).values[kept].mean(0) for k in state.shared}
        return state._replace(shared=shared, server=state.server | gaps.kept)
