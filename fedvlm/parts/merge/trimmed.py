"""Coordinate-wise trimmed mean (Yin et al., 2018): the mean without each coordinate's largest and smallest values.

With the n values of coordinate k sorted, w_g[k] ← (1/(n − 2c)) Σ w_(i)[k] over i = c + 1 … n − c, c = ⌊trim · n⌋, at least 1
and at most (n − 1)/2. Sizes are not used.
"""

from dataclasses import dataclass
from typing import Annotated

from fedvlm.core.cohort import Cohort
from fedvlm.core.merge import Merge
from fedvlm.core.model import Model
from fedvlm.core.ranges import Range
from fedvlm.core.state import State


@dataclass(frozen=True)
class Trimmed(Merge):
    trim: Annotated[float, Range(0, 0.5)] = 0.2  # share of clients removed at each end; of three or more at least one

    def round(self, model: Model, state: State, cohort: Cohort) -> State:
        replies = self.gather(state, cohort)
        n = len(replies.ids)
        cut = min(max(int(self.trim * n), 1), (n - 1) // 2)
        kept = slice(cut, n - cut)
        shared = {k: v.sort(0).values[kept].mean(0) for k, v in replies.shared.items()}
        return self.finish(state, cohort, replies, shared, replies.uniform(), replies.median_loss())
