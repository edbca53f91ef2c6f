"""Plan runs: which single runs a setup stands for, where they go, and what a round will cost."""

from __future__ import annotations

import math
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedvlm.config import catalogue
from fedvlm.config.config import COMMAND_LINE, Setup
from fedvlm.core.descent import OptimiserSettings
from fedvlm.core.state import Message, copy_per_client, nbytes
from fedvlm.data.clients import Federation, partition_of
from fedvlm.data.pool import Pool, Pools, outline
from fedvlm.data.wording import doubtful_names
from fedvlm.engines.base import device_of
from fedvlm.errors import FedvlmError, nearest
from fedvlm.rounds import steps
from fedvlm.rounds.method import Method
from fedvlm.system import console
from fedvlm.system.machine import runs_home
from fedvlm.training.folder import folder_name
from fedvlm.training.train import prepare

LEAVE_ONE_OUT = "leave-one-domain-out"


class PlannedRun(NamedTuple):
    """A single run, and its folder."""

    setup: Setup
    folder: Path


class Cost(NamedTuple):
    """The estimated cost of one round."""

    asked: int  # clients
    down: float  # bytes
    up: float
    seconds: float


def jobs_of(setup: Setup, pool: Pool) -> list[PlannedRun]:
    """The single runs of a setup, targets × seeds, each with its folder; with `out=`, a single run's folder is that."""
    found = single_runs(setup, pool)
    if len(found) == 1 and found[0].config.out:
        return [PlannedRun(found[0], Path(found[0].config.out))]
    return [PlannedRun(one, place_of(one, pool)) for one in found]


def single_runs(setup: Setup, pool: Pool) -> list[Setup]:
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


def checked_outline(setup: Setup, pools: Pools) -> Pool:
    """The data without features, after every check that needs no encoding; says how the data were understood."""
    found = outline(setup, pools.source(setup))
    notes = dict.fromkeys(found.source.notes, console.note)
    if found.task.text is not None and found.source.embeddings is None:
        notes |= {doubt: console.warn for doubt in (doubtful_names(found.task.classes),) if doubt}
    for text, say in notes.items():
        if text not in pools.said:
            pools.said.add(text)
            say(f"data={found.source.name}: {text}")
    given = [key for key in unused_keys(setup) if setup.origins.get(f"local.{key}") == COMMAND_LINE]
    no_descent = [f"{key}= has no effect on {setup.method.label}, which takes no gradient steps" for key in given]
    for text in (*found.notes, *no_descent):
        if text not in pools.said:
            pools.said.add(text)
            console.note(text)
    check_before_encoding(setup, found)
    return found


def unused_keys(setup: Setup) -> list[str]:
    """The optimiser's keys, where a closed form replaces it."""
    return [f.name for f in fields(OptimiserSettings)] if setup.local.one_round else []


def check_before_encoding(setup: Setup, outlined: Pool) -> None:
    """An error for everything that can be refused before images are encoded. `outlined`: see `pool.outline`."""
    device_of(setup)
    check_partition_keys(setup, outlined)
    # differential privacy is tried on examples, later
    first = single_runs(setup, outlined)[0].with_defaults(catalogue.for_purpose("privacy"))
    prepare(first, replace(outlined, x=torch.zeros(len(outlined.x), 0)))


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


def place_of(setup: Setup, pool: Pool) -> Path:
    """The folder of a run that has no name of its own."""
    root = Path(setup.config.out) if setup.config.out else runs_home()
    return root / folder_name(setup, pool)


def estimate(method: Method, federation: Federation, setup: Setup) -> Cost:
    """What a round will send and take: bytes are exact (except for uploads of any length and the reference model of a later
    stage), seconds are extrapolated from a few timed batches."""
    able = federation.seen
    asked = max(1, int(np.ceil(setup.config.participation * len(able))))
    sizes = federation.data.counts("train")
    first = int(able[sizes[able].argmax()])
    few = min(int(sizes[first]), 8 * setup.local.batch)
    low = int(federation.data.bounds[first, 0])
    sample = replace(federation.data, bounds=np.array([[low, low + few, low + few, low + few]]), ids=np.array([first]))
    state = method.init(len(federation.names))
    message = state.message()
    ready = method.for_message(message)
    torch.set_num_threads(max(1, setup.config.threads))  # as in training
    took = []
    for _ in range(2):  # the first time warms up
        began = time.perf_counter()
        answer = steps.step_of("train").run(ready, copy_per_client(method.newcomer, 1), message, sample, {})
        trained = time.perf_counter()
        steps.step_of("score").run(ready, answer.own, message, sample, {})
        took.append((trained - began, time.perf_counter() - trained))
    train, score = took[-1]
    share = asked / len(able)
    public = sum(len(e.x) for half, e in federation.data.extras.items() if half in method.base_and_novel)
    scored = len(federation.data.x) + public * (len(able) if method.has_personal_models else 1)
    seconds = (train * share * sizes[able].sum() + score * scored) / few
    ragged = sum(-math.prod(f.shape) for f in method.uploads.values() if -1 in f.shape)
    up = asked * (nbytes(method.initial) + method.upload_bytes + 4 * ragged * float(sizes[able].mean()))
    return Cost(asked, asked * Message(state.shared, state.task).nbytes, up, float(seconds))
