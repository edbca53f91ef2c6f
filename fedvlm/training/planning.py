"""Plan runs: which single runs a setup stands for, where they go, and what a round will cost."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch

from fedvlm.config.config import COMMAND_LINE, Setup
from fedvlm.core.cohort import Cohort
from fedvlm.core.descent import OptimiserSettings
from fedvlm.core.state import Message, Reply, State, copy_per_client, nbytes
from fedvlm.data.clients import Federation, partition_of
from fedvlm.data.pool import Pool, Pools
from fedvlm.data.wording import doubtful_names
from fedvlm.engines.base import Engine, device_of
from fedvlm.errors import FedvlmError, NoQuorum, nearest
from fedvlm.parts.failures import explained
from fedvlm.rounds import steps
from fedvlm.rounds.method import Method
from fedvlm.system import console
from fedvlm.system.formatting import counted
from fedvlm.training import slurm, trackers
from fedvlm.training.planned_run import PlannedRun

FEW = 10  # test images of a client
LEAVE_ONE_OUT = "leave-one-domain-out"


class Cost(NamedTuple):
    """The estimated cost of one round."""

    asked: int  # clients
    down: float  # bytes
    up: float
    seconds: float


def plan(setups: list[Setup], pools: Pools) -> list[PlannedRun]:
    """Every single run of these setups; says what of private data would leave a client. With `out=`, the folder of one that
    is alone is that."""
    check_parts(setups)
    firsts = [checked(s, pools) for s in setups]
    encoded = [pools.encode(s) for s in setups]
    for setup in setups:
        if setup.merge.reveals:
            console.warn(f"{setup.method.label}: clients send {setup.merge.reveals}")
    found = [
        first.on(pool) if one == first.setup else PlannedRun(one, pool)
        for setup, first, pool in zip(setups, firsts, encoded, strict=True)
        for one in single_runs(setup, pool)
    ]
    if len(found) == 1 and len(setups) == 1 and setups[0].config.out:
        found[0].given = Path(setups[0].config.out)
    return found


def check_parts(setups: list[Setup]) -> None:
    """Settings that a part refuses are reported before anything is encoded; also trackers that are not installed."""
    for setup in setups:
        trackers.check_trackers(setup.config.log)
        slurm.check_launcher(setup.config.launcher)
        _ = (setup.adapter, setup.local, setup.merge, setup.metrics)


def single_runs(setup: Setup, pool: Pool) -> list[Setup]:
    """What a setup stands for, targets × seeds."""
    config = setup.config
    if reason := setup.adapter.incompatible(pool.x.shape[1:]):
        raise FedvlmError(
            f"backbone={config.backbone} does not go with adapter={setup.parts['adapter'].name}: {reason}"
        )
    targets: list[tuple[str, ...]] = [config.unseen]
    if config.protocol == LEAVE_ONE_OUT:
        cut = config.partition in ("domain-iid", "domain-dirichlet") and config.clients > 1
        domains = pool.source.domains
        if len(domains) < (2 if cut else 3):  # somebody must be left to federate
            raise FedvlmError(
                f"protocol={LEAVE_ONE_OUT} needs three domains or more (two, with partition=domain-iid clients=3), and "
                f"data={config.data} has {len(domains)}; use a folder of domain/class/image"
            )
        for wanted in set(config.unseen) - set(domains):
            raise FedvlmError(f"unseen={wanted}: no such domain; {nearest(wanted, domains)}")
        targets = [(d,) for d in domains if not config.unseen or d in config.unseen]
    return [setup.with_(unseen=t, seed=s, seeds=()) for t in targets for s in (config.seeds or (config.seed,))]


def checked(setup: Setup, pools: Pools) -> PlannedRun:
    """The first run of a setup on data without features, after every check that needs no encoding; says how the data were
    understood."""
    found = pools.outline(setup).pool
    for text in found.source.notes:
        pools.say(f"data={found.source.name}: {text}", console.note)
    if (
        found.task.text is not None
        and found.source.embeddings is None
        and (doubt := doubtful_names(found.task.classes))
    ):
        pools.say(f"data={found.source.name}: {doubt}", console.warn)
    given = [key for key in unused_keys(setup) if setup.origins.get(f"local.{key}") == COMMAND_LINE]
    no_descent = [f"{key}= has no effect on {setup.method.label}, which takes no gradient steps" for key in given]
    for text in (*found.notes, *no_descent):
        pools.say(text, console.note)
    device_of(setup)
    check_partition_keys(setup, found)
    first = PlannedRun(single_runs(setup, found)[0], replace(found, x=torch.zeros(len(found.x), 0)))
    if few := few_tests(first.shares):
        pools.say(f"data={found.source.name}: {few}", console.warn)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, setup.config.threads))  # as in training: it is built only once
    try:
        _ = first.plain_method  # differential privacy is tried on examples, later
    finally:
        torch.set_num_threads(threads)  # images are encoded on all cores
    return first


def unused_keys(setup: Setup) -> list[str]:
    """The optimiser's keys, where a closed form replaces it."""
    return [f.name for f in fields(OptimiserSettings)] if setup.local.one_round else []


def check_partition_keys(setup: Setup, outlined: Pool) -> None:
    """An error where the user gave a key that the partition does not use."""
    config = setup.config
    kind = partition_of(config, outlined.source.items)
    used = {"clients": kind not in ("client", "domain", "pooled"), "alpha": "dirichlet" in kind}
    used |= {"per_client": kind in ("pathological", "disjoint")}
    for key, does in used.items():
        if does or setup.origins.get(f"run.{key}") != COMMAND_LINE:
            continue
        why = {"client": "the data name their clients", "domain": "each domain of the data is one client"}.get(kind, "")
        other = "domain-dirichlet" if key == "alpha" else "domain-iid" if key == "clients" else "pathological"
        raise FedvlmError(
            f"{key}={getattr(config, key)} has no effect with partition={kind}{f' ({why})' if why else ''}; leave it out, "
            f"or give another partition=, such as {other}"
        )


def few_tests(federation: Federation) -> str:
    """A warning where clients have so few test images that their scores say little; "" where all have enough."""
    counts = federation.data.counts("test")
    few, none = int((counts < FEW).sum()), int((counts == 0).sum())
    if not few:
        return ""
    text = f"{few} of {counted(len(counts), 'client')} have fewer than {FEW} test images: "
    text += "one image is worth 10 points or more"
    return text + (f"; {none} have none, and own clients is the mean over the others" if none else "")


class Listener:
    """An engine that hears what a merge sends, and answers nothing."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
        self.heard += [message] if step == "train" else []
        return iter(())


def first_message(method: Method, state: State, ids: np.ndarray) -> Message:
    """What the merge sends first for training: some send more than the model."""
    listener = Listener()
    with suppress(NoQuorum), explained("round 1", *method.parts):
        method.round(state, Cohort(cast(Engine, listener), ids, 1))
    return listener.heard[0] if listener.heard else state.message()


def estimate(run: PlannedRun) -> Cost:
    """What a round will send and take: bytes are exact (except for uploads of any length and the reference model of a later
    stage), seconds are extrapolated from a few timed batches of two clients of
    different size."""
    setup, method, federation = run.setup, run.method, run.federation
    able = federation.seen
    asked = max(1, int(np.ceil(setup.config.participation * len(able))))
    sizes = federation.data.counts("train")
    tried = able[np.argsort(-sizes[able], kind="stable")][[0, -1]]  # the largest and the smallest client, side by side
    most = min(int(sizes[tried[0]]), 8 * setup.local.batch)
    lengths = np.array([most, max(1, min(int(sizes[tried[1]]), most - 1))])
    few, low = int(lengths.sum()), federation.data.bounds[tried, 0]
    bounds = np.stack([low, *[low + lengths] * 3], axis=1)
    sample = replace(federation.data, bounds=bounds, ids=tried)
    state = method.init(len(federation.names))
    message = first_message(method, state, tried)
    ready = method.for_message(message)
    torch.set_num_threads(max(1, setup.config.threads))  # as in training
    for _ in range(2):  # the first time warms up
        rows, took = copy_per_client(method.newcomer, len(tried)), []
        for step in ("train", "score"):
            began = time.perf_counter()
            with steps.explained_by_client(step, ready, rows, message, sample, {}, federation.names.__getitem__):
                rows = steps.STEPS[step].run(ready, rows, message, sample, {}).own
            took.append(time.perf_counter() - began)
    train, score = took
    share = asked / len(able)
    public = sum(len(e.x) for half, e in federation.data.extras.items() if half in method.base_and_novel)
    scored = len(federation.data.x) + public * (len(able) if method.has_personal_models else 1)
    seconds = (train * share * sizes[able].sum() + score * scored) / few
    ragged = sum(-math.prod(f.shape) for f in method.uploads.values() if -1 in f.shape)
    up = asked * (nbytes(method.initial) + method.upload_bytes + 4 * ragged * float(sizes[able].mean()))
    return Cost(asked, asked * message.nbytes, up, float(seconds))
