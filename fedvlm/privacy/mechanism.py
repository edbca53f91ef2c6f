"""Differential privacy: what is done to a client's reply before it leaves, and to the sum before it becomes the model.

dp=client (McMahan et al., 2018): a client clips its whole update to the norm C; the server releases
w + (Σ clipped updates + N(0, z²C²))/m with m the expected number of clients, not the number that answered, which would
depend on who is there. With noise_at=client each client adds N(0, z²C²) itself. Everybody counts the same, whatever the
merge's weights: a client's size would leave it.

dp=example (Abadi et al., 2016): clients train with privacy/descent.py, and what they send is private already.

clip_quantile=γ adapts C (Andrew et al., 2021): C ← C·exp(−0.2 (b̃ − γ)) with b̃ the share of updates no longer than C,
measured with noise of σ_b on the count; the updates get z_Δ = (z⁻² − (2σ_b)⁻²)^−½, so that both together cost what one
release with z costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
from torch import Tensor

from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data
from fedvlm.core.schema import Field, Fields
from fedvlm.core.state import Message, Params, State
from fedvlm.privacy.accounting import Account, Level
from fedvlm.privacy.descent import PrivateData, PrivateDescent
from fedvlm.privacy.noise import normal, uniform
from fedvlm.privacy.secure.sums import UPDATE, Summable

if TYPE_CHECKING:
    from fedvlm.core.adapter import Adapter
    from fedvlm.core.merge import Merge
    from fedvlm.core.model import Model
    from fedvlm.core.state import Answer

CLIP = "dp.clip"  # the adapted C, in the server's state and in a message's extra
UNCLIPPED = "unclipped"  # in a reply: 1 where the update was no longer than C
SEED_BYTES = 8  # of a secret that is a run's seed; real ones are longer
ADAPTATION = 0.2  # learning rate of log C
COUNT_NOISE = 1 / 20  # σ_b, as a share of the cohort; more where z is larger


class Sum(NamedTuple):
    total: Params  # of the clipped updates, in float64
    longest: float  # the part of one client, at most; rounding makes it longer than C
    unclipped: float = 0.0  # the sum of b − ½, b = 1 where an update was no longer than C


@dataclass(frozen=True)
class Privacy:
    level: Level
    noise: float  # z, the noise's standard deviation in units of C
    clip: float  # C, the norm that updates (example: gradients) are clipped to; the first one, if it is adapted
    cohort: float  # m, the expected number of clients of a round
    quantile: float = 0.0  # γ; 0: C is fixed
    noise_at: Literal["server", "client"] = "server"
    # what random numbers depend on beside round and client. In a simulation the run's seed; a deployment must use random
    # bytes that never leave the machine: whoever knows them can subtract the noise
    secret: bytes = field(default=b"", repr=False)
    account: Account | None = field(default=None, compare=False, repr=False)  # the server's

    def plain(self) -> dict[str, float | str]:
        """What a client needs to know, as plain data: neither the server's secret nor its account."""
        return {k: v for k, v in asdict(replace(self, account=None)).items() if k not in ("secret", "account")}

    @property
    def uploads(self) -> Fields:
        return {UNCLIPPED: Field(low=0, high=1, whole=True)} if self.quantile else {}

    @property
    def seed(self) -> int:
        """The seed that draws cohorts: a run's seed as it is; of a real secret a hash, because clients see who is
        asked."""
        if len(self.secret) == SEED_BYTES:
            return int.from_bytes(self.secret, "little")
        return int(uniform(self.secret, "cohorts", count=1)[0] * 2**53)

    @property
    def count_noise(self) -> float:
        """σ_b."""
        return max(COUNT_NOISE * self.cohort, self.noise)

    @property
    def update_noise(self) -> float:
        """z_Δ."""
        return self.noise / math.sqrt(1 - (self.noise / (2 * self.count_noise)) ** 2) if self.quantile else self.noise

    def server_state(self) -> Params:
        return {CLIP: torch.tensor(self.clip, dtype=torch.float64)} if self.quantile else {}

    def clipping_norm(self, params: Params) -> float:
        """The clipping norm in the server's state or a message's extra."""
        return float(params[CLIP]) if CLIP in params else self.clip

    def data(self, data: Data, adapter: Adapter) -> PrivateData:
        """The data that a client trains on (dp=example)."""
        return PrivateDescent(self.noise, self.clip, self.secret, adapter.limits.clients).on(data)

    def protected(self, answer: Answer, message: Message, data: Data) -> Answer:
        """A client's reply as it may leave. The loss stays, and at the level of clients the number of examples, too."""
        values = answer.values | {"loss": torch.zeros_like(answer.values["loss"])}
        answer = answer._replace(
            own={k: v.nan_to_num(0, 0, 0) for k, v in answer.own.items()}
        )  # no failure depends on them
        if self.level == "example":
            return answer._replace(values=values)
        limit = self.clipping_norm(message.extra)
        update = {k: v.double() - message.shared[k].double() for k, v in answer.shared.items()}
        finite = norms(update).isfinite()  # an update that is not counts as zero
        update = {k: v.where(finite.view(-1, *[1] * (v.dim() - 1)), 0) for k, v in update.items()}
        lengths = norms(update)
        update = scaled(update, clipping_factors(lengths, limit))
        if self.noise_at == "client":
            drawn = [self.gaussian(message.shared, "client", data.round, i) for i in data.ids.tolist()]
            update = {k: v + limit * torch.stack([one[k] for one in drawn]) for k, v in update.items()}
        shared = {k: (message.shared[k].double() + v).to(answer.shared[k].dtype) for k, v in update.items()}
        values["n"] = torch.ones_like(values["n"])
        if self.quantile:
            values[UNCLIPPED] = (lengths <= limit).to(values["n"].dtype)
        return answer._replace(values=values, shared=shared)

    def round(self, merge: Merge, model: Model, state: State, cohort: Cohort) -> State:
        """A round at the level of clients: the server's part. A Poisson cohort without clients releases noise alone."""
        limit = self.clipping_norm(state.server)
        message = state.message(extra={CLIP: state.server[CLIP]} if self.quantile else {})
        cohort.notes |= {"answered": 0, "clip": limit}
        masked = cohort.secure and len(cohort.ids)
        found = self.masked_sum(merge, model, message, cohort, limit) if masked else self.sum(message, cohort, limit)
        total = found.total
        if self.noise_at == "server":
            drawn = self.gaussian(total, "server", cohort.round)
            total = {k: v + found.longest * drawn[k] for k, v in total.items()}
        shared = {k: (v.double() + total[k] / self.cohort).to(v.dtype) for k, v in state.shared.items()}
        return state._replace(shared=shared, server=state.server | self.adapted(limit, found.unclipped, cohort.round))

    def sum(self, message: Message, cohort: Cohort, limit: float) -> Sum:
        start = {k: v.double() for k, v in message.shared.items()}
        total, unclipped = {k: torch.zeros_like(v) for k, v in start.items()}, 0.0
        for reply in cohort.stream("train", message) if len(cohort.ids) else ():
            update = {k: v.double() - start[k] for k, v in reply.shared.items()}
            if self.noise_at == "server":  # once more: float32 rounds, and a client may not have done it
                update = scaled(update, clipping_factors(norms(update), limit))
            total = {k: v + update[k].sum(0) for k, v in total.items()}
            unclipped += float((reply.values[UNCLIPPED] - 0.5).sum()) if self.quantile else 0.0
        return Sum(total, limit, unclipped)

    def masked_sum(self, merge: Merge, model: Model, message: Message, cohort: Cohort, limit: float) -> Sum:
        """The same of fixed-point numbers of which only the sum is seen (secure=true)."""
        assert isinstance(merge, Summable)  # see needs_replies
        sums = cohort.sums(merge, model, message)
        total = {k: sums[UPDATE + k] for k in message.shared}
        rounding = float(cast(float, cohort.notes["fixed_point_step"]))
        return Sum(total, limit + rounding * math.sqrt(sum(v.numel() for v in total.values())))

    def gaussian(self, like: Params, purpose: str, *numbers: int) -> Params:
        """Noise of z_Δ in each parameter."""
        names = sorted(like)
        sizes = [like[k].numel() for k in names]
        flat = torch.from_numpy(normal(self.secret, purpose, *numbers, count=sum(sizes))) * self.update_noise
        return {k: v.view(like[k].shape).to(like[k].device) for k, v in zip(names, flat.split(sizes), strict=True)}

    def adapted(self, limit: float, unclipped: float, round: int) -> Params:
        """The next C, from the sum of b − ½ over the clients."""
        if not self.quantile:
            return {}
        noise = self.count_noise * float(normal(self.secret, "count", round, count=1)[0])
        share = (unclipped + noise) / self.cohort + 0.5
        return {CLIP: torch.tensor(limit * math.exp(ADAPTATION * (self.quantile - share)), dtype=torch.float64)}


def norms(update: Params) -> Tensor:
    """The norm of all parameters together, [clients]."""
    each = torch.stack([torch.linalg.vector_norm(v.flatten(1), dim=1) for v in update.values()])
    found: Tensor = torch.linalg.vector_norm(each, dim=0)
    return found


def clipping_factors(lengths: Tensor, limit: float) -> Tensor:
    return (limit / lengths).clamp(max=1.0)  # 1 for a length of 0


def scaled(update: Params, by: Tensor) -> Params:
    return {k: v * by.view(-1, *[1] * (v.dim() - 1)) for k, v in update.items()}


def secret_of(seed: int) -> bytes:
    """The secret of a simulation: noise depends on the run's seed, so that a run can be repeated."""
    return seed.to_bytes(SEED_BYTES, "little")


def joined(answers: Iterable[Answer]) -> Answer:
    """Answers of single clients as one."""
    found = list(answers)
    parts = zip(*found, strict=True)
    return type(found[0])(*({k: torch.cat([p[k] for p in part]) for k in part[0]} for part in parts))
