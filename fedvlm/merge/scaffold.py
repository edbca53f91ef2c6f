"""SCAFFOLD's server (Karimireddy et al., 2020): the mean model, and c, the mean drift: c += |S|/N · mean(c_i⁺ − c_i)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedvlm.core import Cohort, State
from fedvlm.local.scaffold import CONTROL
from fedvlm.merge.mean import Mean


@dataclass(frozen=True)
class Scaffold(Mean):
    partner: ClassVar[str] = "scaffold"

    def round(self, state: State, cohort: Cohort) -> State:
        control = {CONTROL + k: state.server.get(CONTROL + k, torch.zeros_like(v)) for k, v in state.shared.items()}
        total, answered, kept = self.gather(state, cohort, state.shared | control, plain=control)
        shared = {k: total[k].to(v.dtype) for k, v in state.shared.items()}
        moved = {k: v + (total[k] / max(cohort.population, answered)).to(v.dtype) for k, v in control.items()}
        return state._replace(shared=shared, server=state.server | moved | kept)
