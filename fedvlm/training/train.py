"""One run: rounds, evaluation, and what is written after each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from fedvlm.backbones.arithmetic import described_arithmetic
from fedvlm.config.config import Setup
from fedvlm.core.adapter import HasDiagnostics
from fedvlm.core.client_names import count_of
from fedvlm.core.cohort import Cohort
from fedvlm.core.records import UPDATE, Result, RoundRecord
from fedvlm.core.state import Message, Note, Params, State, is_running_statistic
from fedvlm.data.clients import Federation, federate
from fedvlm.data.pool import Pool
from fedvlm.engines.base import Engine, Job, device_of
from fedvlm.errors import FedvlmError, NoQuorum, VoidRound
from fedvlm.evaluation.views import evaluate, selection
from fedvlm.privacy.secure.settings import Secure
from fedvlm.rounds.guard import Guard
from fedvlm.rounds.method import Method
from fedvlm.system.formatting import six_digits
from fedvlm.system.timing import clock, timed
from fedvlm.training.folder import SERVER, STATE, RunFolder
from fedvlm.training.privacy_plan import check_method, check_secure, planned, recorded
from fedvlm.training.sampling import cohort_size, sampled
from fedvlm.training.saved import check_state
from fedvlm.training.trackers import open_trackers

OnRound = Callable[[RoundRecord], None]
MAX_VOID = 3  # rounds in a row that change nothing and stop a run


def prepare(setup: Setup, pool: Pool) -> tuple[Method, Federation]:
    """The method on its federation, or an error before anything is trained."""
    federation = federate(pool, setup.config, setup.config.seed)
    return built(setup, pool, federation), federation


def built(setup: Setup, pool: Pool, federation: Federation) -> Method:
    """The method on this federation, or an error."""
    parts = (setup.adapter, setup.local, setup.merge)
    privacy = planned(setup, federation)
    method = Method.build(*parts, pool.task, setup.config.seed, setup.metrics, privacy)
    if privacy:
        check_method(method, federation)
    for name, metric in setup.metrics.items():
        if setup.adapter.task_type not in metric.task_types:
            learns = setup.adapter.task_type.description
            raise FedvlmError(f"metrics={name}: it does not apply to {learns}; leave it out")
    if federation.pooled and method.newcomer:
        raise FedvlmError(
            "partition=pooled has no clients, so nothing can be private; choose an adapter that shares all"
        )
    check_secure(setup, method, cohort_size(setup.config, len(federation.seen)))
    return method


def train(setup: Setup, pool: Pool, folder: Path, on_round: OnRound = lambda record: None) -> RunFolder:
    """Starts the run in this folder, or goes on with it where it stopped."""
    torch.set_num_threads(max(1, setup.config.threads))
    return train_on(setup, pool, *prepare(setup, pool), folder, on_round)


def train_on(
    setup: Setup, pool: Pool, method: Method, federation: Federation, folder: Path, on_round: OnRound
) -> RunFolder:
    """The same, of a method and a federation that are known."""
    run = RunFolder.start(folder, setup, pool, federation)
    if run.done:
        return run
    with run.locked():
        run.computed_by({SERVER: described_arithmetic(device_of(setup))})
        data = replace(federation.data, rounds=max(1, setup.config.rounds))
        declared = np.diff(data.bounds, axis=1)
        # a median of lengths depends on everybody: one client more could change how all others are shortened
        bound = 0.0 if setup.config.dp == "client" else setup.config.bound
        guard = Guard(method, federation.names, declared, data.extras, bound, run.log)
        job = Job(setup, method, federation, data, run.folder, run.log, guard, device_of(setup), run.name)
        engine = setup.engine_class().open(job)
        try:
            with open_trackers(setup.config.log, run) as log:

                def tell(record: RoundRecord) -> None:
                    log(record)
                    on_round(record)

                play_rounds(setup, method, federation, engine, guard, run, tell)
        finally:
            engine.close()
    return run


def play_rounds(
    setup: Setup,
    method: Method,
    federation: Federation,
    engine: Engine,
    guard: Guard,
    run: RunFolder,
    on_round: OnRound,
) -> None:
    config = setup.config
    everybody = np.arange(federation.scored)
    first = method.init(len(federation.names))
    state, start = first, -1
    if saved := run.load():
        state, start = saved
        check_state(state, method, run.folder / STATE, first)
    if not config.secure:
        state = engine.placed(state)
    run.rewind(start)
    guard.restore(r.get("offences", {}) for r in run.rounds())
    void = 0
    once = method.local.one_round and config.participation == 1
    last_round = config.rounds if method.trains else 0
    if once:
        last_round = next((r["round"] for r in run.rounds() if r["round"] and "void" not in r), last_round)
    for round in range(start + 1, last_round + 1):
        began = time.perf_counter()
        record: RoundRecord = {"round": round, "bytes_down": 0, "bytes_up": 0}
        if round:
            cohort = sample(setup, federation, engine, guard, round)
            before = state.shared
            try:
                with timed("rounds"):
                    state, void = usable(method.round(state, cohort), state), 0
            except VoidRound as lack:  # an outage passes: the shared model stays as it is
                void += 1
                if void == MAX_VOID:
                    raise VoidRound(f"{void} rounds in a row changed nothing; {lack}") from lack
                record["void"] = str(lack)
            record |= account(cohort, federation)
            if not void and (moved := relative_change(before, state.shared)) is not None:
                record["effects"] = record.get("effects", {}) | {UPDATE: six_digits(moved)}
            if once and not void:
                last_round = round
        if method.privacy:
            spent = recorded(method.privacy, round)
            record |= {"epsilon": spent.epsilon, "delta": spent.delta}
            record |= {} if spent.local_epsilon is None else {"local_epsilon": spent.local_epsilon}
        if round == last_round or round % config.evaluate_every == 0:
            check = Cohort(engine, everybody, round, config.quorum, last_round, guard=guard)
            try:
                with timed("evaluate"):
                    record |= evaluate(method, federation, check, state.message(), config.personal_split)
            except NoQuorum as lack:
                if round == last_round:
                    raise NoQuorum(f"the last round cannot be scored; {lack}") from lack
                record["unscored"] = str(lack)
            record |= {"score_bytes_down": check.bytes_down, "score_bytes_up": check.bytes_up}
        if round == last_round and not (method.privacy or config.secure):  # numbers about single clients
            record |= diagnose(method, federation, engine, guard, state.message(), round)
        record |= guard.end_round(round)
        record["seconds"] = six_digits(time.perf_counter() - began)
        with timed("write"):
            run.append(record)
            run.save(state, round)
        on_round(record)
        if round == last_round:
            break
    with timed("evaluate"):
        outputs = engine.outputs(state.message(), config.rounds)
    if outputs:
        run.write("outputs.safetensors", save(with_items(outputs, federation)))
    run.finish(result(method, federation, run.rounds()))


def relative_change(before: Params, after: Params) -> float | None:
    """‖after − before‖ / ‖before‖, running statistics left out; None where nothing is shared, or all of it is 0."""
    names = [k for k in before if not is_running_statistic(k) and before[k].numel()]
    norm, change = (
        math.hypot(*(float(torch.linalg.vector_norm(v)) for v in values))
        for values in ([before[k] for k in names], [after[k] - before[k] for k in names])
    )
    return change / norm if norm else None


def usable(state: State, before: State) -> State:
    """The new state, if its numbers are finite. In the server's own state NaN may mark what is not known yet."""
    for name, value in (state.shared | state.task | state.server).items():
        old = before.server.get(name) if name in state.server else None
        unknown = old.isnan() if old is not None and old.shape == value.shape else torch.zeros_like(value) > 0
        if not (value.isfinite() | (unknown & value.isnan())).all():
            raise VoidRound(f"the merged {name} has numbers that are not finite; the model of the round before stays")
    return state


def sample(setup: Setup, federation: Federation, engine: Engine, guard: Guard, round: int) -> Cohort:
    """The clients of a round and, in a rehearsal of failures, those that will not answer."""
    config, able = setup.config, federation.seen
    privacy = guard.method.privacy
    ids, draw = sampled(config, able, round, privacy.seed if privacy else config.seed)
    lost = frozenset(int(i) for i in ids[draw.random(len(ids)) < config.dropout])
    secure = Secure.of(config)
    return Cohort(engine, ids, round, config.quorum, config.rounds, len(able), lost, guard, secure)


def account(cohort: Cohort, federation: Federation) -> RoundRecord:
    """What the exchanges of a round were, with clients by name."""
    names = federation.names

    def named(note: Note) -> object:
        if isinstance(note, dict):
            return {names[i]: x for i, x in note.items()}
        return [names[i] for i in note] if isinstance(note, list) else note

    notes = {k: named(v) for k, v in cohort.notes.items()}
    sizes = {"asked": len(cohort.ids), "bytes_down": cohort.bytes_down, "bytes_up": cohort.bytes_up}
    effects = {name: six_digits(float(np.median(values))) for name, values in cohort.effects.items()}
    return notes | sizes | ({"effects": effects} if effects else {})  # type: ignore[return-value]


def diagnose(
    method: Method, federation: Federation, engine: Engine, guard: Guard, message: Message, round: int
) -> RoundRecord:
    if not isinstance(method.adapter, HasDiagnostics):
        return {}
    reply = Cohort(engine, federation.seen, round, guard=guard).ask("diagnose", message)
    found = {
        k: {federation.names[i]: six_digits(float(x)) for i, x in zip(reply.ids, v, strict=True)}
        for k, v in reply.values.items()
    }
    return found  # type: ignore[return-value]


def with_items(outputs: Params, federation: Federation) -> Params:
    """Outputs with the source's item instead of the pool's row, for later questions without a rerun."""
    kept = {k: v for k, v in outputs.items() if k != "row"}
    return kept | {"item": torch.from_numpy(federation.items)[outputs["row"]]}


def result(method: Method, federation: Federation, records: list[RoundRecord]) -> Result:
    """The last round, and the round chosen on validation; never the best on test."""
    scored = [r for r in records if "personal" in r]
    chosen = max(scored, key=lambda r: (-count_of(r.get("missing", ())), selection(r), -r["round"]))
    spread = [r["gap_variance"] for r in records if "gap_variance" in r]
    return Result(
        last=scored[-1],
        selected=chosen,
        parameters={"shared": count(method.initial), "private": count(method.newcomer)},
        gap_variance=six_digits(float(np.mean(spread[len(spread) // 2 :]))) if spread else None,
        bytes_down=sum(r["bytes_down"] for r in records),
        bytes_up=sum(r["bytes_up"] for r in records),
        seconds=six_digits(sum(r["seconds"] for r in records)),
        unseen=[federation.names[i] for i in federation.unseen],
        void=sum("void" in r for r in records),
        bounded=sum("bounded" in r for r in records),
        quarantined=records[-1].get("quarantined", []),
        privacy=recorded(method.privacy, records[-1]["round"]) if method.privacy else None,
        phases={phase: six_digits(seconds) for phase, seconds in clock.taken().items()},
    )


def count(params: Params) -> int:
    return sum(v.numel() for v in params.values())
