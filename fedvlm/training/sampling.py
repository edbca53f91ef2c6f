"""Which clients a round asks (participation=, sampling=)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedvlm.core.seeds import numpy_generator

if TYPE_CHECKING:
    from fedvlm.config.config import Config


class Sampled(NamedTuple):
    ids: np.ndarray  # sorted
    draw: np.random.Generator  # for what else is drawn in this round


def cohort_size(config: Config, able: int) -> int:
    """The size of a cohort of a fixed size; the largest expected one of a Poisson cohort, rounded up."""
    return max(1, int(np.ceil(config.participation * able)))


def sampled(config: Config, able: np.ndarray, round: int, seed: int) -> Sampled:
    """A fixed number of these clients or, with sampling=poisson, each of them independently: possibly none."""
    draw = numpy_generator(seed, 31, round)
    if config.sampling == "poisson":
        return Sampled(able[draw.random(len(able)) < config.participation], draw)
    return Sampled(np.sort(draw.permutation(able)[: cohort_size(config, len(able))]), draw)
