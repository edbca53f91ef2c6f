"""One run, from a setup to a finished folder; killed at any moment, it goes on from its last whole round."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from fedvlm import backbones, parts, runs
from fedvlm.config import Setup
from fedvlm.core import Cohort, FedvlmError, NoQuorum, Params, nbytes, spread
from fedvlm.data.federation import (
    Federation,
    Pool,
    federate,
    halved,
    pool,
    pool_of_text,
    with_corruptions,
    with_nouns,
    with_outsiders,
)
from fedvlm.data.source import Source, fewer, open_outsiders, open_source
from fedvlm.data.store import Progress
from fedvlm.engines.loopback import Loopback
from fedvlm.engines.stacked import Stacked, moved, stack
from fedvlm.errors import nearest
from fedvlm.evaluate.protocols import OPEN
from fedvlm.evaluate.views import evaluate, selection
from fedvlm.method import Method
from fedvlm.runs import Run
from fedvlm.seeds import numpy_generator
from fedvlm.tasks import CLASSES

Watch = Callable[[dict[str, Any]], None]
PATIENCE = 3  # rounds in a row without quorum that stop a run


@lru_cache
def _kept() -> dict[tuple[Any, ...], Pool]:
    return {}


def load_pool(setup: Setup, progress: Progress | None = None) -> Pool:
    """The examples as the frozen model shows them to this adapter; kept for further runs of this process."""
    config, adapter = setup.config, setup.adapter
    backbone = "" if adapter.reads == "text" else config.backbone
    how = (
        config.group,
        config.domains,
        config.stride,
        config.broken,
        config.template,
        config.outsiders,
        config.corrupt,
        adapter.candidates if adapter.reads_nouns else None,  # type: ignore[attr-defined]
    )
    key = (config.data, *how, backbone, adapter.reads, adapter.needs, config.protocol == OPEN)
    if key not in _kept():
        source = open_source(config.data, config.group, config.domains, config.stride)
        fits(setup, source)
        if adapter.reads == "text":
            _kept()[key] = pool_of_text(source)
            return _kept()[key]
        model, view = backbones.load(backbone), adapter.reads
        source = fewer(source, config.domains)
        found = pool(source, model, config.template, config.broken, progress, view, adapter.needs)
        if config.protocol == OPEN:
            found = halved(found)
        if config.outsiders:
            found = with_outsiders(found, open_outsiders(config.outsiders), model, view)
        if adapter.reads_nouns:
            candidates: int = adapter.candidates  # type: ignore[attr-defined]
            found = with_nouns(found, model, config.template, candidates, progress)
        if config.corrupt:
            found = with_corruptions(found, config.corrupt, model, view, progress)
        _kept()[key] = found
    return _kept()[key]


def fits(setup: Setup, source: Source) -> None:
    given = {"outsiders=": setup.config.outsiders, "corrupt=": setup.config.corrupt}
    for key, value in (given | {f"protocol={OPEN}": setup.config.protocol == OPEN}).items():
        if value and source.kind is not CLASSES:
            raise FedvlmError(f"{key} is for classes, and data={setup.config.data} is {source.kind.what}")
    if setup.adapter.learns is not source.kind:
        able = [n for n in parts.names("adapter") if parts.find("adapter", n).learns is source.kind]  # type: ignore[attr-defined]
        raise FedvlmError(
            f"data={setup.config.data} is {source.kind.what}, and adapter={setup.chosen['adapter']} learns "
            f"{setup.adapter.learns.what}; adapters for this data: {', '.join(able)} (`fedvlm ls methods` has their recipes)"
        )


def prepare(setup: Setup, pool: Pool) -> tuple[Method, Federation]:
    """The method on its federation, or an error before anything is trained."""
    federation = federate(pool, setup.config, setup.config.seed)
    method = Method.build(setup.adapter, setup.local, setup.merge, pool.task, setup.config.seed)
    if federation.pooled and method.newcomer:
        raise FedvlmError(
            "partition=pooled has no clients, so nothing can be private; choose an adapter that shares all"
        )
    return method, federation


def train(setup: Setup, pool: Pool, folder: Path, watch: Watch = lambda record: None) -> Run:
    config = setup.config
    torch.set_num_threads(max(1, config.threads))
    method, federation = prepare(setup, pool)
    run = Run.start(folder, setup, pool, dict(zip(federation.names, federation.domains, strict=True)))
    if run.done:
        return run
    with run.locked():
        engine = connect(setup, method, federation, run)
        try:
            _rounds(setup, method, federation, engine, run, watch)
        finally:
            engine.close()
    return run


def connect(setup: Setup, method: Method, federation: Federation, run: Run) -> Stacked | Loopback:
    config = setup.config
    data = replace(federation.data, rounds=max(1, config.rounds))
    if config.engine == "loopback":
        if federation.pooled:
            raise FedvlmError("partition=pooled has no clients to put into processes; use engine=serial")
        return Loopback(setup, method, federation, data, run.folder / "clients", run.log)
    device = device_of(setup)
    chunk = 1 if config.engine == "serial" else config.chunk or stack(method, device)
    if config.engine == "stacked":
        chunk = max(2, chunk)
    return Stacked(method, data, chunk, run.folder / "rows.bin", run.log, device)


def device_of(setup: Setup) -> str:
    """Small steps on stored features gain nothing from a GPU; networks do."""
    wanted, have = setup.config.device, torch.cuda.is_available()
    if wanted == "cuda" and not have:
        raise FedvlmError("device=cuda: torch finds no GPU here; give device=cpu")
    if wanted == "cpu" or not have or (wanted == "auto" and not setup.adapter.heavy):
        return "cpu"
    torch.backends.cudnn.allow_tf32 = False  # the same numbers as elsewhere, as far as a GPU allows
    torch.backends.cudnn.deterministic = True
    return "cuda"


def _rounds(
    setup: Setup, method: Method, federation: Federation, engine: Stacked | Loopback, run: Run, watch: Watch
) -> None:
    config = setup.config
    everybody = np.arange(federation.scored)
    saved = run.load()
    state, start = saved or (method.init(len(federation.names)), -1)
    run.rewind(start)
    void = 0
    for round in range(start + 1, config.rounds + 1 if method.trains else 1):
        began = time.perf_counter()
        record: dict[str, Any] = {"round": round}
        if round:
            cohort = sample(setup, federation, engine, round)
            try:
                state, void = method.round(state, cohort), 0
            except NoQuorum as lack:  # an outage passes: the shared model stays as it is
                void += 1
                if void == PATIENCE:
                    raise NoQuorum(f"{void} rounds in a row without quorum; {lack}") from lack
                record["void"] = str(lack)
            record |= account(cohort, federation)
        else:
            record |= {"bytes_down": 0, "bytes_up": 0}
        last = round == config.rounds or not method.trains
        if last or round % config.evaluate == 0:
            check = Cohort(engine, everybody, round)
            record |= evaluate(method, federation, check, state.shared)
            record |= {"score_bytes_down": check.bytes_down, "score_bytes_up": check.bytes_up}
        if last:
            record |= diagnose(method, federation, engine, state.shared, round)
        record["seconds"] = round_off(time.perf_counter() - began)
        run.append(record)
        run.save(state, round)
        watch(record)
    if isinstance(engine, Stacked):
        run.write("outputs.safetensors", outputs(federation, engine, state.shared, config.rounds))
    run.finish(result(method, federation, run.rounds()))


def account(cohort: Cohort, federation: Federation) -> dict[str, Any]:
    """What the round's exchanges were."""
    by_client = {
        k: {federation.names[i]: x for i, x in v.items()} for k, v in cohort.notes.items() if isinstance(v, dict)
    }
    notes = cohort.notes | by_client
    return notes | {"asked": len(cohort.ids), "bytes_down": cohort.bytes_down, "bytes_up": cohort.bytes_up}


def sample(setup: Setup, federation: Federation, engine: Stacked | Loopback, round: int) -> Cohort:
    """Who is asked this round and, in a rehearsal of failures, who will not answer."""
    config, able = setup.config, federation.seen
    draw = numpy_generator(config.seed, 31, round)
    size = max(1, int(np.ceil(config.participation * len(able))))
    ids = np.sort(draw.permutation(able)[:size])
    lost = frozenset(int(i) for i in ids[draw.random(len(ids)) < config.dropout])
    return Cohort(engine, ids, round, config.quorum, config.rounds, len(able), lost)


def diagnose(
    method: Method, federation: Federation, engine: Stacked | Loopback, shared: Params, round: int
) -> dict[str, Any]:
    if not method.adapter.watches:
        return {}
    ids, up = Cohort(engine, federation.seen, round).ask("diagnose", shared)
    return {k: {federation.names[i]: round_off(float(x)) for i, x in zip(ids, v, strict=True)} for k, v in up.items()}


@torch.no_grad()
def outputs(federation: Federation, engine: Stacked, shared: Params, round: int) -> bytes:
    """Final logits and features on every test image, shared and personal view: later questions need no rerun."""
    kept: dict[str, list[torch.Tensor]] = defaultdict(list)
    method, shared = engine.method.told(moved(shared, engine.device))
    adapter, task = method.adapter, method.task
    together = adapter.read(task, method.shared(shared), {}) if method.generalises else {}
    for i in range(federation.scored):
        low, high = (int(b) for b in federation.data.bounds[i, 2:])
        if low == high:
            continue
        me = np.array([i])
        x, own = engine.data.x[None, low:high], moved(engine.rows.read(me, round), engine.device)
        kept["label"].append(federation.data.y[low:high])
        kept["client"].append(torch.full((high - low,), i))
        kept["item"].append(torch.from_numpy(federation.items[low:high]))
        views = {"shared": together} if method.generalises else {}
        if method.personalises:
            views["personal"] = adapter.read(task, method.personal(own, shared, engine.at(me, round)), together)
        for view, params in views.items():
            for part in x.split(adapter.block, dim=1):
                kept[f"{view}.logits"].append(adapter.logits(task, params, part)[0].cpu())
                kept[f"{view}.features"].append(adapter.features(task, params, part)[0].cpu())
    return save({k: torch.cat(v).contiguous() for k, v in kept.items()})


def result(method: Method, federation: Federation, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The last round, and the round chosen on validation; never the best on test."""
    scored = [r for r in records if "personal" in r]
    chosen = max(scored, key=lambda r: (selection(r), -r["round"]))
    spread = [r["gap_variance"] for r in records if "gap_variance" in r]
    return {
        "last": scored[-1],
        "selected": chosen,
        "parameters": {"shared": count(method.initial), "private": count(method.newcomer)},
        "gap_variance": round_off(float(np.mean(spread[len(spread) // 2 :]))) if spread else None,  # of the second half
        "bytes_down": sum(r["bytes_down"] for r in records),
        "bytes_up": sum(r["bytes_up"] for r in records),
        "seconds": round_off(sum(r["seconds"] for r in records)),
        "unseen": [federation.names[i] for i in federation.unseen],
    }


def count(params: Params) -> int:
    return sum(v.numel() for v in params.values())


def round_off(value: float) -> float:
    return float(f"{value:.6g}")


def estimate(method: Method, federation: Federation, setup: Setup) -> dict[str, float]:
    """What a round will send and take, before anything runs: bytes are exact (but for what clients hold back, and
    a reference model in a later stage), seconds from a few timed batches."""
    able = federation.seen
    asked = max(1, int(np.ceil(setup.config.participation * len(able))))
    sizes = federation.data.counts("train")
    first = int(able[sizes[able].argmax()])
    few = min(int(sizes[first]), 8 * setup.local.batch)
    low = int(federation.data.bounds[first, 0])
    sample = replace(federation.data, bounds=np.array([[low, low + few, low + few, low + few]]), ids=np.array([first]))
    took = []
    for _ in range(2):  # the first time warms up
        began = time.perf_counter()
        own, _ = method.play("train", spread(method.newcomer, 1), method.initial, sample)
        trained = time.perf_counter()
        method.play("score", own, method.initial, sample)
        took.append((trained - began, time.perf_counter() - trained))
    train, score = took[-1]
    share = asked / len(able)
    open_to_all = sum(len(y) for half, (_, y) in federation.data.halves.items() if half in method.halves)
    scored = len(federation.data.x) + open_to_all * (len(able) if method.personalises else 1)
    seconds = (train * share * sizes[able].sum() + score * scored) / few
    wire, down = nbytes(method.initial), nbytes(method.init(len(federation.names)).shared)
    loose = 4 * sum(-math.prod(shape) for shape in method.sends.values() if -1 in shape) * float(sizes[able].mean())
    up = asked * (wire + method.extra + loose)
    return {"asked": asked, "down": asked * down, "up": up, "seconds": float(seconds)}


def runs_of(setup: Setup, pool: Pool) -> list[Setup]:
    """The single runs that a setup stands for: targets × seeds."""
    config = setup.config
    targets: list[tuple[str, ...]] = [config.unseen]
    if config.protocol == "leave-one-domain-out":
        cut = config.partition in ("domain-iid", "domain-dirichlet") and config.clients > 1
        if len(pool.source.domains) < (2 if cut else 3):  # somebody must be left to federate
            raise FedvlmError(
                f"protocol=leave-one-domain-out needs three domains or more (two, with partition=domain-iid clients=3), and "
                f"data={config.data} has {len(pool.source.domains)}; use a folder of domain/class/image"
            )
        for wanted in set(config.unseen) - set(pool.source.domains):
            raise FedvlmError(f"unseen={wanted}: no such domain; {nearest(wanted, pool.source.domains)}")
        targets = [(d,) for d in pool.source.domains if not config.unseen or d in config.unseen]
    return [setup.with_(unseen=t, seed=s, seeds=()) for t in targets for s in (config.seeds or (config.seed,))]


def place(setup: Setup, pool: Pool) -> Path:
    """Where a run's folder goes when it has no name of its own."""
    root = Path(setup.config.out) if setup.config.out else runs.default_out()
    return root / runs.folder_name(setup, pool)
