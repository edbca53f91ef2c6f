"""One run: rounds, evaluation, and what is written after each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from safetensors.torch import save

from fedvlm.backbones.arithmetic import described_arithmetic
from fedvlm.config.config import Config
from fedvlm.core.adapter import HasDiagnostics
from fedvlm.core.client_names import count_of
from fedvlm.core.cohort import Cohort
from fedvlm.core.records import UPDATE, Result, RoundRecord
from fedvlm.core.state import Message, Note, Params, State, is_running_statistic
from fedvlm.data.clients import Federation
from fedvlm.engines.base import Engine, Job, device_of
from fedvlm.errors import NoQuorum, VoidRound
from fedvlm.evaluation.views import evaluate, selection
from fedvlm.parts.failures import explained
from fedvlm.privacy.secure.settings import Secure
from fedvlm.rounds.guard import Guard
from fedvlm.rounds.method import Method
from fedvlm.system.formatting import six_digits
from fedvlm.system.timing import clock, timed
from fedvlm.training.folder import SERVER, STATE, RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.privacy_plan import recorded
from fedvlm.training.sampling import sampled
from fedvlm.training.saved import check_state
from fedvlm.training.trackers import open_trackers

OnRound = Callable[[RoundRecord], None]
MAX_VOID = 3  # rounds in a row that change nothing and stop a run


def train(planned: PlannedRun, on_round: OnRound = lambda record: None) -> RunFolder:
    """Starts the run in its folder, or goes on with it where it stopped."""
    setup = planned.setup
    torch.set_num_threads(max(1, setup.config.threads))
    method, federation = planned.method, planned.federation
    run = RunFolder.start(planned)
    if run.done:
        return run
    with run.locked():
        device = device_of(setup)
        run.computed_by({SERVER: described_arithmetic(device)})
        data = replace(federation.data, rounds=max(1, setup.config.rounds))
        declared = np.diff(data.bounds, axis=1)
        # a median of lengths depends on everybody: one client more could change how all others are shortened
        bound = 0.0 if setup.config.dp == "client" else setup.config.bound
        guard = Guard(method, federation.names, declared, data.extras, bound, run.log)
        job = Job(setup, method, federation, data, run.folder, run.log, guard, device, run.name)
        with explained("opening the engine"):
            engine = setup.engine_class().open(job)
        try:
            with open_trackers(setup.config.log, run) as trackers:
                play_rounds(planned, engine, guard, run, (trackers, on_round))
        finally:
            engine.close()
    return run


def play_rounds(
    planned: PlannedRun, engine: Engine, guard: Guard, run: RunFolder, observers: Sequence[OnRound]
) -> None:
    config, method, federation = planned.setup.config, planned.method, planned.federation
    everybody = np.arange(federation.scored)
    with explained("the state before the first round", *method.parts):
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
            cohort = sample(config, federation, engine, guard, round)
            before = state.shared
            try:
                with timed("rounds"), explained(f"round {round}", *method.parts, engine):
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
                with timed("evaluate"), explained(f"the evaluation of round {round}", *method.parts, engine):
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
        for observe in observers:
            observe(record)
        if round == last_round:
            break
    with timed("evaluate"), explained("the outputs of the final models", *method.parts, engine):
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


def sample(config: Config, federation: Federation, engine: Engine, guard: Guard, round: int) -> Cohort:
    """The clients of a round and, in a rehearsal of failures, those that will not answer."""
    able, privacy = federation.seen, guard.method.privacy
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
