"""Coordinate-wise median (Yin et al., 2018): fewer than half of the clients cannot move it far, whatever they send.

w_g[k] ← median over clients of w_i[k], the mean of the middle two where their number is even; sizes are not used.
Of running statistics too: a mean of these would let a single client spoil the network. As moments their medians still fit
together: half of the clients have E[x]² ≥ m² with m the median of E[x], and so the median of E[x²] is not below m².
"""

from dataclasses import dataclass

from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Merge
from fedvlm.core.model import Model
from fedvlm.core.state import State


@dataclass(frozen=True)
class Median(Merge):
    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        replies = self.gather(state, cohort)
        n = len(replies.ids)
        middle = [(n - 1) // 2, n // 2]  # torch.quantile refuses tensors above 16 million elements
        shared = {k: v.sort(0).values[middle].mean(0) for k, v in replies.shared.items()}
        return self.finish(state, cohort, replies, shared, replies.uniform(), replies.median_loss())
