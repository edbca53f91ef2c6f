"""Coordinate-wise median (Yin et al., 2018): fewer than half of the clients cannot move it far, whatever they send."""

from dataclasses import dataclass

from fedvlm.core import Cohort, State
from fedvlm.merge.mean import Mean


@dataclass(frozen=True)
class Median(Mean):
    def round(self, state: State, cohort: Cohort) -> State:
        ids, up = cohort.ask("train", state.shared)
        cohort.notes |= {"weights": dict.fromkeys(ids.tolist(), 1 / len(ids)), "loss": float(up["loss"].median())}
        return state._replace(shared={k: up[k].quantile(0.5, dim=0) for k in state.shared})
