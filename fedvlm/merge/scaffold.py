"""SCAFFOLD's server (Karimireddy et al., 2020): the mean model, and c, the mean drift: c += |S|/N · mean(c_i⁺ − c_i)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedvlm.core import Cohort, State
from fedvlm.local.scaffold import CONTROL
from fedvlm.merge.mean import Agreement, Gaps, Mean


@dataclass(frozen=True)
class Scaffold(Mean):
    partner: ClassVar[str] = "scaffold"

    def round(self, state: State, cohort: Cohort) -> State:
        control = {CONTROL + k: state.server.get(CONTROL + k, torch.zeros_like(v)) for k, v in state.shared.items()}
        total = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in (state.shared | control).items()}
        weights: dict[int, float] = {}
        agreement, gaps = Agreement(self.cosine), Gaps(state.server)
        losses = 0.0
        for ids, up in cohort.stream("train", state.shared | control):
            weight = up["n"] if self.weights == "size" else torch.ones_like(up["n"])
            for k, v in total.items():
                v += up[k].double().sum(0) if k in control else torch.tensordot(weight, up[k], dims=1)
            weights |= zip(ids.tolist(), weight.tolist(), strict=True)
            losses += float(weight @ up["loss"])
            agreement.add(up, state.shared)
            gaps.add(ids, up)
        scale = sum(weights.values())
        cohort.notes |= {"weights": {i: w / scale for i, w in weights.items()}, "loss": losses / scale}
        cohort.notes |= gaps.notes() | agreement.notes()
        shared = {k: (total[k] / scale).to(v.dtype) for k, v in state.shared.items()}
        moved = {k: v + (total[k] / max(cohort.population, len(weights))).to(v.dtype) for k, v in control.items()}
        return state._replace(shared=shared, server=state.server | moved | gaps.kept)
