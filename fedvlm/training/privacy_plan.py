"""Turn the keys dp=, epsilon=, … into the `Privacy` of a run, or say in one sentence why this run cannot be private."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedvlm.config import catalogue
from fedvlm.core import copies
from fedvlm.core.data import Batch
from fedvlm.core.local import Local
from fedvlm.core.observers import Gaps
from fedvlm.core.records import PrivacyRecord
from fedvlm.core.state import Params, copy_per_client, is_running_statistic, nbytes
from fedvlm.data.clients import Federation
from fedvlm.errors import FedvlmError
from fedvlm.parts.merge.mean import Mean
from fedvlm.privacy.accounting import Account, ClientAccount, library, smallest_noise
from fedvlm.privacy.descent import ReleasesOnce, covered, sampling
from fedvlm.privacy.mechanism import UNCLIPPED, Privacy, secret_of
from fedvlm.privacy.noise import normal
from fedvlm.privacy.secure.graph import SMALLEST
from fedvlm.privacy.secure.settings import Secure
from fedvlm.privacy.secure.sums import Summable, needs_replies
from fedvlm.rounds.method import name_of
from fedvlm.system.formatting import six_digits
from fedvlm.training.sampling import cohort_size, sampled

if TYPE_CHECKING:
    from fedvlm.config.config import Config, Setup
    from fedvlm.rounds.method import Method

COVERED = ("n", "loss", UNCLIPPED)  # uploads beside the shared parameters that a private client sends
LARGEST = 64 << 20  # bytes of trained parameters whose gradient is computed for each example
TOLERANCE = 3e-5  # relative, between a batch's gradient and the mean over its examples: float32 leaves 2e-7, CORAL 2e-4
PAIR = 2  # examples on which that is tried


def planned(setup: Setup, federation: Federation, secret: bytes | None = None) -> Privacy | None:
    """The privacy of a run, with its account; None without dp=. The noise for a target ε is solved for here.

    `secret`: random bytes of this machine, in a deployment; None: the run's seed."""
    config = setup.config
    check_keys(config)
    if config.dp == "none":
        return None
    library("dp_accounting")  # its absence is told before anything runs
    able = federation.seen
    if config.dp == "client" and len(able) < 2:
        raise FedvlmError(f"dp=client hides a client among others, and {len(able)} can train here; use dp=example")
    privacy = Privacy(
        config.dp,
        config.noise_multiplier,
        config.clip_norm,
        config.participation * len(able) if config.sampling == "poisson" else cohort_size(config, len(able)),
        config.clip_quantile,
        config.noise_at,
        secret_of(config.seed) if secret is None else secret,
    )
    account = account_of(setup, federation, privacy)
    if config.epsilon:
        account = replace(account, noise=smallest_noise(config.epsilon, lambda z: spends(account, z, config.rounds)))
    return replace(privacy, noise=account.noise, account=account)


def spends(account: Account, noise: float, rounds: int) -> float:
    """The ε that a target is about: that of the uploads where clients add the noise, else that of the models."""
    spent = replace(account, noise=noise).spent(rounds)
    return spent.epsilon if spent.local_epsilon is None else spent.local_epsilon


def check_keys(config: Config) -> None:
    given = config.changed(catalogue.for_purpose("privacy"))
    if config.dp == "none":
        if given:
            raise FedvlmError(f"{given[0]}= has no effect without dp=; add dp=client or dp=example, or leave it out")
        return
    if bool(config.epsilon) == bool(config.noise_multiplier):
        raise FedvlmError(
            f"dp={config.dp}: give either epsilon=, a target, or noise_multiplier=, such as 1 for noise of clip_norm="
        )
    if config.dp == "example" and config.centre == "own":
        raise FedvlmError(
            "dp=example centre=own: the mean that a client takes off moves with every image, also of validation, which no "
            "clipping bounds; use centre=none"
        )
    if config.clip_quantile and (config.dp == "example" or config.noise_at == "client"):
        raise FedvlmError("clip_quantile= is for dp=client with noise_at=server; give a fixed clip_norm= instead")
    if config.clip_quantile and config.secure:
        raise FedvlmError(
            "clip_quantile= needs the clipped share, which secure=true does not sum; give a fixed clip_norm="
        )
    if config.dp == "client" and config.noise_at == "client" and config.sampling == "poisson":
        raise FedvlmError(
            "noise_at=client sampling=poisson: with few clients in a cohort there is little noise in its sum; use "
            "sampling=fixed"
        )


def account_of(setup: Setup, federation: Federation, privacy: Privacy) -> Account:
    config, able = setup.config, federation.seen
    sizes = federation.data.counts("train")[able]
    own = privacy.level == "example"
    everybody = privacy.cohort >= len(able)
    delta = config.delta or 1 / (int(sizes.min()) if own else len(able)) ** 1.1
    if delta == 1:
        raise FedvlmError(
            "dp=example: a client has one training example, so delta= has no default; give one, such as 1e-5"
        )
    local = not own and privacy.noise_at == "client"
    once = isinstance(setup.local, ReleasesOnce)
    rates = [(1.0, 1) if once else sampling(int(n), setup.local.batch, setup.local.epochs) for n in sizes]
    return Account(
        privacy.level,
        privacy.noise,
        delta,
        len(able),
        privacy.cohort,
        "all" if everybody else config.sampling,
        noisy_uploads=max(1, int(np.ceil(config.quorum * privacy.cohort))) if local else 0,
        asked=times_asked(config, able, privacy.seed) if own or local else None,
        clients=tuple(ClientAccount(*rate) for rate in rates) if own else (),
    )


def times_asked(config: Config, able: np.ndarray, seed: int) -> np.ndarray:
    """[rounds + 1, clients]: in how many of the first rounds each client is asked."""
    asked = np.zeros((config.rounds + 1, len(able)), np.int64)
    for round in range(1, config.rounds + 1):
        asked[round] = asked[round - 1] + np.isin(able, sampled(config, able, round, seed).ids)
    return asked


def check_method(method: Method, federation: Federation) -> None:
    """An error where what this method does is not covered."""
    assert method.privacy is not None
    level = method.privacy.level
    reason = refusal(method) or (example_refusal(method, federation) if level == "example" else "")
    if reason:
        raise FedvlmError(f"dp={level}: {reason}")


def refusal(method: Method) -> str:
    from fedvlm.rounds.method import name_of

    level = method.privacy.level if method.privacy else "client"
    merge = f"merge={name_of(method.merge)}"
    if not method.initial:
        return "no trained parameter is shared, so none leaves a client; leave dp= out"
    own = method.local.uploads(method.task, method.initial) if isinstance(method.local, ReleasesOnce) else {}
    further = [k for k in method.uploads if k not in COVERED and not (k in own and level == "example")]
    if further and set(further) <= set(Gaps.uploads) and type(method.merge).round is Mean.round:
        return "clients also send their losses before and after training, which no noise covers; give gaps=false"
    if further:
        names = ", ".join(further[:3]) + (f" and {len(further) - 3} more" if len(further) > 3 else "")
        what = f" ({method.merge.reveals})" if method.merge.reveals else ""
        return f"clients also send {names}{what}, which no noise covers; use merge=mean with local=sgd or local=prox"
    if statistics := [k for k in method.initial if is_running_statistic(k)]:
        return f"{statistics[0]} is a running statistic, which noise makes unusable; use an adapter without (norm=instance)"
    if level == "client" and type(method.merge).round is not Mean.round:
        return f"{merge} reads single updates, and only their noisy sum is covered; use merge=mean"
    return ""


def example_refusal(method: Method, federation: Federation) -> str:
    from fedvlm.rounds.method import name_of

    local = f"local={name_of(method.local)}"
    if isinstance(method.local, ReleasesOnce):
        return method.local.uncovered(method.merge)
    for part in ("train", "fit", "personal_copy"):
        own = getattr(type(method.local), part)
        if own is not getattr(Local, part) and not covered.is_on(own):
            return f"{local} trains in its own way, and only the plain training loop is covered; use local=sgd or local=prox"
    size = nbytes(method.initial) + nbytes(copies.adapter_params(method.newcomer))
    if size > LARGEST:
        return (
            f"the gradient of each example is as large as the {size >> 20} MiB of trained parameters, and {LARGEST >> 20} "
            f"MiB is the most; use a smaller adapter, or dp=client"
        )
    if mixes_examples(method, federation):
        return (
            f"{local} with adapter={name_of(method.adapter)} and objective={method.local.objective} mixes the examples of a "
            "batch, so no example has a gradient of its own; use local=sgd or local=prox with objective=cross-entropy"
        )
    return ""


@torch.no_grad()
def mixes_examples(method: Method, federation: Federation) -> bool:
    """Whether the gradient of a batch is not the mean over its examples, tried on the largest client near the start: at the
    start itself terms that compare with the model that was sent are 0."""
    if not len(federation.data.x):  # a federation's server: each site tries it on its own
        return False
    counts = federation.data.counts("train")
    low = int(federation.data.bounds[int(counts.argmax()), 0])
    rows = torch.arange(low, low + min(PAIR, int(counts.max())))
    own, message = copy_per_client(method.newcomer, 1), method.init(len(federation.names)).message()
    gradients = method.local.gradients(method.model, message, own)
    params = nudged(copy_per_client(message.shared, 1) | copies.adapter_params(own))
    x, y = federation.data.take(rows[None]), federation.data.y[rows][None]
    for step in range(2):  # some rules treat every second step differently
        weight = torch.full((1, len(rows)), 1 / len(rows), dtype=federation.data.dtype)
        _, whole = gradients(params, Batch(x, y, weight, step))
        _, each = gradients(
            repeated(params, len(rows)), Batch(x[0][:, None], y[0][:, None], weight[0][:, None] * len(rows), step)
        )
        if difference(whole, each) > TOLERANCE:
            return True
    return False


def nudged(params: Params, by: float = 0.1) -> Params:
    flat = {k: torch.from_numpy(normal(b"", k, count=v.numel())) for k, v in params.items()}
    return {k: v + by * flat[k].view(v.shape).to(v) for k, v in params.items()}


def repeated(params: Params, times: int) -> Params:
    return {k: v.expand(times, *v.shape[1:]) for k, v in params.items()}


def difference(whole: Sequence[Tensor], each: Sequence[Tensor]) -> float:
    """The difference between a gradient [1, …] and the mean over [examples, …], relative to the examples' gradients."""
    apart = sum(float((w[0] - e.mean(0)).square().sum()) for w, e in zip(whole, each, strict=True))
    size = sum(float(e.square().sum()) / len(e) for e in each) + sum(float(w.square().sum()) for w in whole)
    return (apart / size) ** 0.5 if size else 0.0


def recorded(privacy: Privacy, rounds: int) -> PrivacyRecord:
    """What was spent in so many rounds, and under which conditions."""
    account = privacy.account
    assert account is not None
    epsilon, local = account.spent(rounds)
    replaced = account.level == "client" and (account.sampling == "fixed" or bool(account.noisy_uploads))
    return PrivacyRecord(
        account.level,
        six_digits(epsilon),
        account.delta,
        None if local is None else six_digits(local),
        privacy.noise,
        privacy.clip,
        privacy.quantile,
        "client" if account.level == "example" else privacy.noise_at,
        account.sampling,
        "replaced" if replaced else "added or removed" if account.level == "client" else "zeroed out",
    )


def check_secure(setup: Setup, method: Method, clients: int) -> None:
    """An error where a run with secure=true cannot be, before anything is trained. `clients`: how many a round asks."""
    config = setup.config
    secure = Secure.of(config)
    if secure is None:
        return
    if reason := needs_replies(method.merge):
        raise FedvlmError(f"secure=true: the server sees only sums, and merge={name_of(method.merge)} {reason}")
    if setup.given.get("bound") and config.bound:
        raise FedvlmError(
            f"bound={config.bound:g} needs the length of each update, which secure=true hides; leave it out"
        )
    if clients < SMALLEST:
        raise FedvlmError(
            f"secure=true: a round asks {clients} clients, and a sum needs {SMALLEST} (of two, each could subtract its "
            "own); use more clients, a larger participation=, or secure=false"
        )
    assert isinstance(method.merge, Summable)
    secure.summation(method.merge, method.model, method.initial, clients)  # refuses what does not fit into 64 bits
