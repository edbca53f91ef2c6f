"""What every adapter × local rule × merge must do, whoever wrote it.

Combinations are those of all parts that `fedvlm.parts.names` knows, and of parts given by `pytest --part adapter=idea.py`.
A combination is left out only where the package refuses it for a reason in EXPECTED. Each check is a function of a Case, a
method on data; a test runs all checks of one combination, so that they share the rounds they look at.
"""

from __future__ import annotations

import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ABLE, build, close, example, initial, message, parts_of, published, same, small_adapter, small_parts

from fedvlm import parts, steps
from fedvlm.adapters.base import Adapter, HasDiagnostics, HasGradient, Limits, Task
from fedvlm.backbones.text import TextTower
from fedvlm.core import Cohort, Data, Extra, Message, Params, Reply, State, copy_per_client, nbytes
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError
from fedvlm.local.base import Local
from fedvlm.local.descent import by_autograd
from fedvlm.local.sgd import Sgd
from fedvlm.merge.base import Merge
from fedvlm.merge.mean import Mean
from fedvlm.method import METRICS, RESERVED, Method, check_parameters, check_parts
from fedvlm.metrics.base import Additive, Metric
from fedvlm.tasks import CLASSIFICATION, SEGMENTATION, cross_entropy

# Refusals of combinations that cannot work, and why. Any other error fails the combination's test.
EXPECTED = {
    r"(merge|local)=scaffold works only together with (merge|local)=scaffold": "they exchange control variates",
    r"merge=text_server does not go with adapter=\w+: .* use adapter=lora towers=image": "it trains the text tower",
    r"merge=transport works on shared parameters named context, outsiders": "it matches outsider prompts",
    r"local=contrast does not go with adapter=\w+: .* use adapter=lowrank": "it compares two sets of class features",
    r"local=two_stage does not go with adapter=\w+: it needs embeddings before they are normalised": "it adds noise there",
}

# Training, validation and test examples: several batches of 4 with a rest, less than one batch, exactly one, a single
# example; no validation, no test and no training examples. Fewer for networks on pixels, which are slow.
SIZES = ((9, 3, 3), (2, 0, 2), (6, 2, 2), (1, 1, 1), (4, 2, 0), (0, 2, 2))
FEWER = ((5, 2, 2), (2, 0, 1), (4, 1, 1), (1, 1, 1), (3, 1, 0), (0, 1, 1))
EVERYBODY = np.arange(len(SIZES))
STACKED = len(SIZES)  # all clients side by side

Names = tuple[str, str, str]  # of an adapter, a local rule and a merge


# Which combinations there are


def every_metric(more: tuple[str, ...] = ()) -> dict[str, Metric]:
    return {name: parts.find("metric", name)() for name in (*parts.names("metric"), *more)}


@cache
def refusal(names: Names) -> str:
    """Why the package refuses this combination; "" where it does not."""
    try:
        adapter, local, merge = small_parts(*names)
        check_parts(adapter, local, merge, example(adapter)[0])
        check_parameters(adapter, merge, dict.fromkeys(initial(names[0]), torch.zeros(())))
    except FedvlmError as error:
        return str(error)
    return ""


def is_expected(refused: str) -> bool:
    return any(re.match(pattern, refused) for pattern in EXPECTED)


def is_enrolled(names: Names) -> bool:
    """Valid combinations, and those that are refused without an expected reason, so that their test shows the error."""
    return not is_expected(refusal(names))


def is_affordable(names: Names) -> bool:
    """Adapters that prefer a GPU are slow: each with two pairs, and with the local rules and merges it was published
    with; those that do not need a tower of the backbone with every local rule and every merge once."""
    _, local, merge = names
    adapter = small_adapter(names[0])
    if not adapter.limits.gpu or (local, merge) in (("sgd", "mean"), ("bgp", "faa")):
        return True
    return names in published() if adapter.requires else merge == "mean" or local == "sgd"


@cache
def combinations(more: tuple[tuple[str, str], ...] = ()) -> list[Names]:
    axes = [[*parts.names(axis), *(name for kind, name in more if kind == axis)] for axis in parts.AXES]
    return [names for names in itertools.product(*axes) if is_affordable(names) and is_enrolled(names)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "names" in metafunc.fixturenames:
        more = tuple(tuple(given.split("=", 1)) for given in metafunc.config.getoption("part"))
        metafunc.parametrize("names", combinations(more), ids="-".join)


# A case, and what is played on it


def diverged(text: str) -> None:
    raise AssertionError(text)


class Recorder(Stacked):
    """Keeps the replies of the first exchange."""

    def __init__(self, method: Method, data: Data, chunk: int, rows: Path | None = None):
        super().__init__(method, data, chunk, rows, diverged)
        self.first: list[Reply] = []

    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
        for reply in super().run(step, ids, message, round, exchange):
            if (round, exchange) == (1, 0):
                self.first.append(reply)
            yield reply


@dataclass
class Played:
    """Some rounds, and what there was after each."""

    states: list[State]
    rows: list[Params]
    scores: dict[int, Params]  # by round, where asked for
    cohorts: list[Cohort]  # of each round
    files: list[bytes]  # the file of private rows
    replies: dict[int, tuple[Params, Params]]  # values and shared of each client's first reply


def play(
    method: Method,
    data: Data,
    chunk: int,
    rounds: int,
    score: tuple[int, ...] = (),
    ids: np.ndarray = ABLE,
    lost: frozenset[int] = frozenset(),
) -> Played:
    engine = Recorder(method, data, chunk)
    out = Played([method.init(len(data))], [engine.rows.read(EVERYBODY, 0)], {}, [], [bytes(engine.rows.map)], {})
    for round in range(rounds + 1):
        if round:
            out.cohorts.append(Cohort(engine, ids, round, lost=lost))
            out.states.append(method.round(out.states[-1], out.cohorts[-1]))
            out.rows.append(engine.rows.read(EVERYBODY, round))
            out.files.append(bytes(engine.rows.map))
        if round in score:
            out.scores[round] = Cohort(engine, EVERYBODY, round).ask("score", out.states[-1].message()).values
    for ids, values, shared in engine.first:
        for n, i in enumerate(ids.tolist()):
            out.replies[i] = ({k: v[n] for k, v in values.items()}, {k: v[n] for k, v in shared.items()})
    return out


class Case:
    """A method on data. Rounds that several checks look at are played once."""

    def __init__(self, method: Method, data: Data):
        self.method, self.data = method, data
        self.before = [{k: v.clone() for k, v in part.items()} for part in (method.initial, method.newcomer)]

    @cached_property
    def serial(self) -> Played:
        return play(self.method, self.data, 1, rounds=3, score=(3,))

    @cached_property
    def stacked(self) -> Played:
        return play(self.method, self.data, STACKED, rounds=4, score=(0, 3, 4))

    @cached_property
    def lossy(self) -> Played:
        return play(self.method, self.data, STACKED, rounds=2, lost=frozenset({0, 3}))


def case_of(adapter: Adapter, local: Local, merge: Merge, metrics: dict[str, Metric] | None = None) -> Case:
    slow = adapter.view == "pixels"
    task, data = example(adapter, FEWER if slow else SIZES)
    local = replace(local, epochs=1) if slow else local
    return Case(Method.build(adapter, local, merge, task, 5, every_metric() | (metrics or {})), data)


# The checks


def check_stacked_is_serial(case: Case) -> None:
    """However many clients run side by side, the numbers are the same; and what is sent down is not changed."""
    for other in (play(case.method, case.data, 2, rounds=3, score=(3,)), case.stacked):
        close(case.serial.states[3].shared, other.states[3].shared)
        close(case.serial.rows[3], other.rows[3])
        close(case.serial.scores[3], other.scores[3])
    same(case.before[0], case.method.initial)
    same(case.before[1], case.method.newcomer)


def check_stacked_is_serial_with_adam(case: Case) -> None:
    method = case.method
    if type(method.local) is Sgd and type(method.merge) is not Mean:
        return  # an optimiser is a client's, so that the plain client needs no more than the plain server
    rule = replace(method.local, optimiser="adam", lr=0.01)
    adam = Method.build(method.adapter, rule, method.merge, method.task, 5)
    one, other = (play(adam, case.data, chunk, rounds=1) for chunk in (1, STACKED))  # a round starts its optimiser anew
    close(one.states[1].shared, other.states[1].shared, tolerance=1e-8)
    close(one.rows[1], other.rows[1], tolerance=1e-8)


def check_private_never_goes_up(case: Case) -> None:
    """By name; and no value beside the shared parameters equals a private one (a shared one may, by symmetry)."""
    method, sent = case.method, message(case.method)
    private = set(method.adapter.private)
    for i, (values, shared) in case.stacked.replies.items():
        assert set(shared) == set(sent.shared) and set(values) == set(method.uploads)
        assert not (set(values) | set(shared)) & (private | set(method.newcomer))
        rows = {k: case.stacked.rows[1][k][i] for k in private if k in case.stacked.rows[1]}
        trained = {k: v for k, v in rows.items() if not torch.equal(v, method.newcomer[k])}
        for (name, value), (k, v) in itertools.product(values.items(), trained.items()):
            assert not (v.shape == value.shape and torch.equal(v, value)), f"{name} is the private {k}"


def check_names_are_not_reserved(case: Case) -> None:
    for name in case.method.adapter.init(case.method.task, 5):
        assert not name.startswith(RESERVED) and "/" not in name, name
    uploads = set(case.method.uploads)
    assert not uploads & set(case.method.initial), "a value would be taken for a shared parameter"


def check_logits_are_finite(case: Case) -> None:
    """One for each class, or for each pixel."""
    method, data = case.method, case.data
    params = copy_per_client(method.adapter.init(method.task, 5), 2)
    logits = method.model.logits(params, data.x[:6].view(2, 3, *data.x.shape[1:]))
    each = data.y.shape[1:] if method.adapter.task_type is SEGMENTATION else (len(method.task.classes),)
    assert logits.shape == (2, 3, *each) and logits.isfinite().all()
    for name, metric in method.metrics_for(()).items():
        if isinstance(metric, Additive):
            found = metric.each(method.model, logits, data.y[:6].view(2, 3, *data.y.shape[1:])).shape
            assert found == (2, 3, *metric.shape(method.model)), f"metric {name} says {metric.shape(method.model)}"


def check_replies_match_the_schema(case: Case) -> None:
    """Of every step, with everything that can be evaluated on; an axis of any length is as long as the client's data."""
    method, data = with_everything(case.method, case.data)
    engine, sent = Stacked(method, data, STACKED, warn=diverged), message(method)
    for name, step in steps.STEPS.items():
        if name == "novel.shared" and not method.has_shared_model:
            continue  # nobody asks for it
        schema, answered = step.schema(method, data.extras), []
        for ids, values, shared in engine.run(name, ABLE, sent, 1, 0):
            answered += ids.tolist()
            trained = {k: v.shape for k, v in method.initial.items()} if schema.shared else {}
            assert values.keys() == schema.values.keys() and {k: v.shape[1:] for k, v in shared.items()} == trained
            for k, shape in schema.values.items():
                rows = data.counts("train")[ids[0]]  # one client at a time where an axis has any length
                assert values[k].shape == (len(ids), *(rows if n == -1 else n for n in shape)), f"{name}: {k}"
        assert sorted(answered) == ABLE.tolist()


def with_everything(method: Method, data: Data) -> tuple[Method, Data]:
    """With outsiders, corrupted test examples and, where the adapter can, novel classes."""
    if method.adapter.task_type is not CLASSIFICATION:
        return method, data
    x, y, task = data.x, data.y, method.task
    extras = {"outsiders": Extra(x[:5]), "corrupted": Extra(torch.stack([x, x.flip(0)], 1), aligned=True)}
    extras |= {"base": Extra(x[5:9], y[5:9]), "novel": Extra(x[9:12], y[9:12] % 2)}
    novel = task.subset(slice(0, 2))._replace(classes=("another", "one more"))
    return replace(method, task=task._replace(novel=novel)), replace(data, extras=extras)


def check_diagnoses_are_one_number_a_client(case: Case) -> None:
    """Also where what is diagnosed is shared, so that there is one for all clients."""
    if not isinstance(case.method.adapter, HasDiagnostics):
        return
    method = case.method
    shared = Method.build(replace(method.adapter, private=()), method.local, method.merge, method.task, 5)
    for kind, chunk in itertools.product((method, shared), (1, STACKED)):
        found = Cohort(Stacked(kind, case.data, chunk), ABLE, 1).ask("diagnose", kind.init(6).message()).values
        assert set(found) == set(kind.adapter.diagnostics) and all(v.shape == (len(ABLE),) for v in found.values())


def check_neighbours_do_not_matter(case: Case) -> None:
    """Padded is ragged: a client replies the same beside larger ones as alone."""
    assert case.serial.replies.keys() == case.stacked.replies.keys() == set(ABLE.tolist())
    for i, alone in case.serial.replies.items():
        for one, other in zip(alone, case.stacked.replies[i], strict=True):
            close(one, other)


def check_order_of_clients_does_not_matter(case: Case) -> None:
    """As replies arrive one by one, and over a round that starts from what the server kept of the first."""
    for chunk, rounds, played in ((1, 1, case.serial), (STACKED, 2, case.stacked)):
        backwards = play(case.method, case.data, chunk, rounds, ids=ABLE[::-1].copy())
        same(backwards.states[rounds].shared, played.states[rounds].shared)


def check_missing_clients_are_absent(case: Case) -> None:
    """As if they had not been asked."""
    fewer = play(case.method, case.data, STACKED, rounds=2, ids=np.array([1, 2, 4]))
    same(case.lossy.states[2].shared, fewer.states[2].shared)
    notes = case.lossy.cohorts[1].notes
    assert notes["answered"] == 3 and set(notes["weights"]) == {1, 2, 4}  # type: ignore[arg-type]
    for name, start in case.method.newcomer.items():
        assert torch.equal(case.lossy.rows[2][name][0], start)


def check_goes_on_bit_for_bit(case: Case) -> None:
    """Two rounds, a new engine on the same rows, two more: the same bits as four without interruption. A round that was
    begun and lost in between changes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        path.write_bytes(case.stacked.files[2])
        for rounds in ((3,), (3, 4)):
            engine, state = Stacked(case.method, case.data, STACKED, path, diverged), case.stacked.states[2]
            for round in rounds:
                state = case.method.round(state, Cohort(engine, ABLE, round))
    same(case.stacked.states[4].shared, state.shared)
    same(case.stacked.rows[4], engine.rows.read(EVERYBODY, 4))


def check_bytes_are_exact(case: Case) -> None:
    method, cohort, sent = case.method, case.lossy.cohorts[0], message(case.method)
    rows = sum(case.data.counts("train")[i] for i in (1, 2, 4))
    loose = 8 * rows * sum(-math.prod(shape) for shape in method.uploads.values() if -1 in shape)  # a row per example
    up = 3 * (nbytes(sent.shared) + 2 * method.upload_bytes) + loose  # upload_bytes counts float32
    assert cohort.bytes_down == cohort.exchange * 5 * sent.nbytes
    assert cohort.bytes_up == up + (cohort.exchange - 1) * 3 * 8


def check_a_newcomer_uses_the_shared_model(case: Case) -> None:
    """A client that never trained has the shared model as its own, on every split and by every metric."""
    if case.method.has_shared_model and case.method.newcomer:
        for name in case.method.metrics_for(()):
            close(*({name: case.stacked.scores[3][f"{view}.{name}"][5]} for view in ("shared", "personal")))


def check_training_lowers_the_loss(case: Case) -> None:
    if case.method.trains:
        view = "personal" if case.method.newcomer else "shared"
        first, last = (case.stacked.scores[r][f"{view}.loss"][:5, 0].sum() for r in (0, 4))
        assert last < first


CHECKS: tuple[Callable[[Case], None], ...] = (
    check_names_are_not_reserved,
    check_logits_are_finite,
    check_stacked_is_serial,
    check_stacked_is_serial_with_adam,
    check_replies_match_the_schema,
    check_private_never_goes_up,
    check_diagnoses_are_one_number_a_client,
    check_neighbours_do_not_matter,
    check_order_of_clients_does_not_matter,
    check_missing_clients_are_absent,
    check_goes_on_bit_for_bit,
    check_bytes_are_exact,
    check_a_newcomer_uses_the_shared_model,
    check_training_lowers_the_loss,
)


def failures(case: Case) -> list[Exception]:
    """What the checks found, each with the name of its check."""
    found: list[Exception] = []
    for check in CHECKS:
        try:
            check(case)
        except Exception as error:
            error.add_note(f"in {check.__name__}")
            found.append(error)
    return found


def test_contract(names, double):
    found = failures(case_of(*small_parts(*names)))
    if found:
        raise ExceptionGroup("-".join(names), found)


# The checks themselves are checked: parts that break the contract are found


def test_every_part_is_enrolled():
    """Also what a newly added file defines."""
    every = combinations()
    for at, axis in enumerate(parts.AXES):
        assert {names[at] for names in every} == set(parts.names(axis))
    measured = [build(*names).metrics | every_metric() for names in every if names == ("head", "sgd", "mean")]
    assert set(measured[0]) >= set(parts.names("metric")) | set(METRICS)


def test_every_metric_is_measured(double):
    """On an adapter of each task type that it is for, where the data has the extra examples that it needs."""
    for name, metric in every_metric().items():
        for task_type in metric.task_types:
            adapter = next(a for a in map(small_adapter, parts.names("adapter")) if a.task_type is task_type)
            case = case_of(adapter, *small_parts("head", "sgd", "mean")[1:])
            method, data = with_everything(case.method, case.data)
            assert f"shared.{name}" in steps.find("score").schema(method, data.extras).values or metric.extra
    method, data = with_everything(*vars(case_of(*small_parts("head", "sgd", "mean"))).values())


@pytest.mark.parametrize("pattern", EXPECTED)
def test_every_expected_refusal_occurs(pattern):
    every = itertools.product(*map(parts.names, parts.AXES))
    assert any(re.match(pattern, refusal(names)) for names in every)
