"""SCAFFOLD's server (Karimireddy et al., 2020): mean model, and control variate c ← c + |S|/N · mean(c_i⁺ − c_i)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedvlm.core.cohort import Cohort
from fedvlm.core.model import Model
from fedvlm.core.state import State
from fedvlm.parts.local.scaffold import CONTROL
from fedvlm.parts.merge.mean import Mean


@dataclass(frozen=True)
class Scaffold(Mean):
    partner: ClassVar[str] = "scaffold"
    tells_by_parameter: ClassVar[bool] = True  # the control variates

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        control = {k: state.server.get(CONTROL + k, torch.zeros_like(v)) for k, v in state.shared.items()}
        changes = {CONTROL + k: v for k, v in control.items()}
        found = self.average(state, cohort, state.message(extra=control), sums=changes)
        clients = max(cohort.population, found.answered)
        moved = {k: v + (found.sums[k] / clients).to(v.dtype) for k, v in changes.items()}
        return state._replace(shared=found.mean, server=state.server | moved)
