"""What a run spends: ε at a given δ, computed by Google's dp_accounting (the extra `dp`).

Poisson cohorts, and everybody in every round: privacy loss distributions (Koskela et al., 2020; Doroshenko et al., 2022)
of the Gaussian mechanism, for one client (or example) more or less. Cohorts of a fixed size: Rényi DP of sampling without
replacement (Wang, Balle and Kasiviswanathan, 2019, Theorem 27), for one client replaced by another. A sum of updates of
length at most C changes by C in the first case and by 2C in the second, so a noise multiplier of z, the noise's standard
deviation divided by C, is there z/2 in units of the sensitivity, which is what dp_accounting asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from fedvlm.errors import FedvlmError

Level = Literal["client", "example"]
STEP = 1e-3  # of the privacy loss at z ≤ 1; rounded up, so that ε is never too small: by less than 1e-3 of it
DIGITS = 5  # of a noise multiplier that was solved for
SMALLEST, LARGEST = 0.05, 2.0**20  # noise multipliers among which a target is looked for


def library(module: str) -> Any:
    """A module of dp_accounting, imported where it is needed: it takes seconds."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise FedvlmError(
            "dp= needs dp-accounting, which counts what is spent; install it with `pip install 'fedvlm[dp]'`"
        ) from None


class Release(NamedTuple):
    """Sums with noise of `noise` sensitivities, each over a Poisson sample with this rate."""

    noise: float
    rate: float
    times: int


def poisson_epsilon(noise: float, rate: float, count: int, delta: float) -> float:
    """ε of such sums; one more or less."""
    return composed_epsilon((Release(noise, rate, count),), delta)


@lru_cache(maxsize=4096)
def composed_epsilon(releases: tuple[Release, ...], delta: float) -> float:
    """ε of all of these together; one more or less."""
    counted = [r for r in releases if r.times and r.rate]
    if not counted:
        return 0.0
    step = STEP / max(1.0, *(r.noise for r in counted))  # losses shrink with the noise
    first, *others = (_loss_distribution(r.noise, r.rate, step).self_compose(r.times) for r in counted)
    for other in others:
        first = first.compose(other)
    return float(first.get_epsilon_for_delta(delta))


@lru_cache(maxsize=128)
def _loss_distribution(noise: float, rate: float, step: float) -> Any:
    loss = library("dp_accounting.pld.privacy_loss_distribution")
    return loss.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=step)


@lru_cache(maxsize=4096)
def fixed_epsilon(noise: float, population: int, sample: int, count: int, delta: float) -> float:
    """ε of `count` sums with noise of `noise` sensitivities, each over a sample of a fixed size; one replaced."""
    if count == 0:
        return 0.0
    orders, divergence = _divergences(noise, population, sample)
    return float(library("dp_accounting.rdp").compute_epsilon(orders, count * divergence, delta)[0])


@lru_cache(maxsize=32)
def _divergences(noise: float, population: int, sample: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders, and the Rényi divergence of one sum at each."""
    dp, rdp = library("dp_accounting"), library("dp_accounting.rdp")
    event = dp.SampledWithoutReplacementDpEvent(population, sample, dp.GaussianDpEvent(noise))
    found = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE).compose(event)
    return found.orders, found.rdp


class Spent(NamedTuple):
    epsilon: float  # for whoever sees the models of all rounds
    local_epsilon: float | None = None  # for whoever sees a client's uploads, too; None: not limited


class ClientAccount(NamedTuple):
    """A client's own accounting at the level of examples."""

    rate: float  # at which an example is in a batch
    steps: int  # of a round


@dataclass(frozen=True, eq=False)
class Account:
    """What each round of a run spends."""

    level: Level
    noise: float  # standard deviation of the noise, in units of the clipping norm
    delta: float
    population: int  # clients that can be sampled
    sample: float  # clients of a round: exactly (fixed) or expected (Poisson)
    sampling: Literal["all", "fixed", "poisson"]  # all: everybody is in every round
    noisy_uploads: int = 0  # noise_at=client: uploads of a round, at least; 0: the server adds the noise
    asked: np.ndarray | None = None  # [rounds + 1, clients]: in how many of the first rounds a client is asked
    clients: tuple[ClientAccount, ...] = ()  # at the level of examples

    @property
    def upload(self) -> Release:
        """What an upload of a round releases of its only client (example), or of a client (replaced by another)."""
        if self.level == "client":
            return Release(self.noise / 2, 1.0, 1)
        return Release(self.noise, self.clients[0].rate, self.clients[0].steps)

    def spent(self, rounds: int) -> Spent:
        """What is spent after so many rounds."""
        if self.level == "example":
            most = self._worst_client(rounds)
            return Spent(most, most)
        if not self.noisy_uploads:
            return Spent(self._central(self.noise, rounds))
        local = poisson_epsilon(self.noise / 2, 1.0, int(self._asked(rounds).max(initial=0)), self.delta)
        return Spent(self._central(self.noise * math.sqrt(self.noisy_uploads), rounds), local)

    def _central(self, noise: float, rounds: int) -> float:
        """ε of the sum; with the clients' own noise a client can only be replaced: without it there is less noise."""
        if self.sampling == "fixed":
            return fixed_epsilon(noise / 2, self.population, int(self.sample), rounds, self.delta)
        own = 2 if self.noisy_uploads else 1
        return poisson_epsilon(noise / own, min(1.0, self.sample / self.population), rounds, self.delta)

    def _worst_client(self, rounds: int) -> float:
        """ε grows with the rate and with the steps, so the largest of both in a group is a bound for the group: groups that
        cannot hold the worst client are left out, others are halved."""
        found = {(c.rate, c.steps * int(n)) for c, n in zip(self.clients, self._asked(rounds), strict=True)}
        groups, worst = [sorted(found)], 0.0
        while groups:
            group = groups.pop()  # the highest rates first
            bound = poisson_epsilon(self.noise, group[-1][0], max(steps for _, steps in group), self.delta)
            if bound > worst and len(group) == 1:
                worst = bound
            elif bound > worst:
                groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        return worst

    def _asked(self, rounds: int) -> np.ndarray:
        assert self.asked is not None  # where something is counted for each client
        return self.asked[rounds]  # type: ignore[no-any-return]


def smallest_noise(epsilon: float, spent: Callable[[float], float]) -> float:
    """The smallest noise multiplier, to DIGITS digits, that spends at most `epsilon`; `spent` gives ε for a multiplier."""

    def excess(log_noise: float) -> float:
        return math.log(max(spent(math.exp(log_noise)), 1e-12) / epsilon)

    low = high = 0.0  # logarithms: ε is nearly a power of the noise
    while excess(high) > 0:
        low, high = high, high + math.log(2)
        if high > math.log(LARGEST):
            raise FedvlmError(f"epsilon={epsilon:g} cannot be reached; give a larger one, or fewer rounds=")
    while low == high or excess(low) <= 0:
        low, high = low - math.log(2), min(high, low)
        if low < math.log(SMALLEST):
            return SMALLEST
    found = math.exp(library("scipy.optimize").brentq(excess, low, high, xtol=10.0**-DIGITS))
    step = 10.0 ** (math.floor(math.log10(found)) + 1 - DIGITS)
    found = round(math.ceil(found / step) * step, 12)
    while spent(found) > epsilon:
        found = round(found + step, 12)
    return found
