"""What every adapter × local rule × merge must do, whoever wrote it.

Combinations are those of all parts that `registry.names` knows, and of parts given by `pytest --part adapter=idea.py`. A
combination is left out only where the package refuses it for a reason in EXPECTED. Each check is a function of a Case, a
method on data; a test runs all checks of one combination, so that they share the rounds they look at.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    ABLE,
    SMALL,
    build,
    close,
    example,
    initial,
    message,
    published,
    same,
    small_adapter,
    small_parts,
)
from torch import Tensor

from fedvlm.core.adapter import Adapter, HasDiagnostics, HasGradient, Limits
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data, Extra
from fedvlm.core.descent import by_autograd
from fedvlm.core.local import Local
from fedvlm.core.merge import Merge
from fedvlm.core.metric import Additive, Metric
from fedvlm.core.state import Message, Params, Reply, State, copy_per_client, is_running_statistic, nbytes
from fedvlm.core.tasks import CLASSIFICATION, SEGMENTATION, cross_entropy
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import FedvlmError
from fedvlm.parts import registry
from fedvlm.parts.local.sgd import Sgd
from fedvlm.parts.merge.mean import Mean
from fedvlm.rounds import steps
from fedvlm.rounds.guard import Guard
from fedvlm.rounds.method import METRICS, RESERVED, Method, check_combination, check_parameters
from fedvlm.towers.text import TextTower

# Refusals of combinations that cannot work, and why. Any other error fails the combination's test.
EXPECTED = {
    r"(merge|local)=moments works only together with (merge|local)=moments": "they exchange sums instead of updates",
    r"local=moments does not go with adapter=\w+: it solves a classifier that is linear": "others have no closed form",
    r"local=memory does not go with adapter=\w+: it fills a private memory": "others have none",
    r"(merge|local)=(scaffold|feddyn) works only together with (merge|local)=": "they exchange or keep control variates",
    r"merge=(text_server|other_text) does not go with adapter=\w+: .* use adapter=lora": "it trains the text tower",
    r"merge=prototypes (works on shared parameters named head|does not go with)": "it trains a classifier on embeddings",
    r"merge=transport works on shared parameters named context, outsiders": "it matches outsider prompts",
    r"merge=(classwise|transport) does not go with adapter=\w+: it averages by class": "masks have no classes",
    r"local=contrast does not go with adapter=\w+: .* use adapter=lowrank": "it compares two sets of class features",
    r"local=(knowledge|prograd) does not go with adapter=\w+: .* use adapter=prompt": "they compare encoded prompts",
    r"local=orthogonal does not go with adapter=\w+: .* use adapter=proda": "others have one prompt",
    r"local=groups does not go with adapter=\w+: .* use adapter=groups": "others have no groups of prompts",
    r"(merge|local)=experts works only together with (merge|local)=experts": "they exchange a pool of prompts",
    r"local=experts does not go with adapter=\w+: .* use adapter=experts": "others have no experts",
    r"local=moon does not go with adapter=\w+: .* use adapter=attention": "it compares features of images",
    r"local=factored does not go with adapter=\w+: .* use adapter=factored": "others have no private prompt in factors",
    r"local=consistent does not go with adapter=\w+: .* use adapter=independent": "it compares with the frozen towers",
    r"local=(alternate|truncated|turns) does not go with adapter=\w+: .* use adapter=lora": "it trains two low-rank factors",
    r"merge=exact does not go with adapter=\w+: it changes frozen weights": "others have no change of a frozen weight",
    r"merge=sparsity does not go with adapter=\w+: .* use adapter=lora": "others have no low-rank changes",
    r"local=two_stage does not go with adapter=\w+: it needs embeddings before they are normalised": "it adds noise there",
}

# Training, validation and test examples: several batches of 4 with a rest, less than one batch, exactly one, a single
# example; no validation, no test and no training examples. Fewer for networks on pixels, which are slow.
SIZES = ((9, 3, 3), (2, 0, 2), (6, 2, 2), (1, 1, 1), (4, 2, 0), (0, 2, 2))
FEWER = ((5, 2, 2), (2, 0, 1), (4, 1, 1), (1, 1, 1), (3, 1, 0), (0, 1, 1))
BLOCK = 16  # examples evaluated at a time
EVERYBODY = np.arange(len(SIZES))
NAMES = tuple(f"client {i}" for i in EVERYBODY)
STACKED = len(SIZES)  # all clients side by side

Names = tuple[str, str, str]  # of an adapter, a local rule and a merge


# Which combinations there are


def every_metric() -> dict[str, Metric]:
    return {name: registry.find("metric", name)() for name in registry.names("metric")}


@cache
def refusal(names: Names) -> str:
    """Why the package refuses this combination; "" where it does not."""
    try:
        adapter, local, merge = small_parts(*names)
        check_combination(adapter, local, merge, example(adapter)[0])
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


def is_typical(names: Names) -> bool:
    """Without --all, adapters in SIMILAR are not put together with all pairs: each
    local rule and each merge once, and what is published; of VARIANTS, and of adapters inside the towers beside two, what
    is published."""
    adapter, local, merge = names
    plain = (local, merge) == ("sgd", "mean")
    if adapter in ("alexnet", "cnn", "resnet"):  # networks, as unet and lstm are, and far slower
        return plain or (adapter == "resnet" and (local, merge) == ("bgp", "faa"))
    if {adapter, local, merge} & set(VARIANTS) or (
        small_adapter(adapter).requires and adapter not in ("prompt", "lora")
    ):
        return plain or names in published()
    return adapter not in SIMILAR or local == "sgd" or merge == "mean" or names in published()


@cache
def combinations(more: tuple[tuple[str, str], ...] = (), everything: bool = True) -> list[Names]:
    axes = [[*registry.names(axis), *(name for kind, name in more if kind == axis)] for axis in registry.AXES]
    chosen = (names for names in itertools.product(*axes) if everything or is_typical(names))
    return [names for names in chosen if is_affordable(names) and is_enrolled(names)]


def given_parts(config: pytest.Config) -> tuple[tuple[str, str], ...]:
    """Kind and name of each `--part`."""
    return tuple((kind, name) for kind, _, name in (given.partition("=") for given in config.getoption("part")))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "names" in metafunc.fixturenames:
        everything = metafunc.config.getoption("all")
        metafunc.parametrize("names", combinations(given_parts(metafunc.config), everything), ids="-".join)


# A case, and what is played on it


def diverged(text: str) -> None:
    raise AssertionError(text)


class Recorder(Stacked):
    """Keeps the replies of the first exchange."""

    def __init__(self, method: Method, data: Data, chunk: int, rows: Path | None = None):
        super().__init__(method, data, chunk, rows, diverged)
        self.path = rows
        self.first: list[Reply] = []
        self.asked: list[
            tuple[str, int]
        ] = []  # in the first round: the step of each exchange, and bytes sent to a client

    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
        self.asked += [(step, message.nbytes)] if round == 1 and step != "score" else []
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
    asked: list[tuple[str, int]]  # in the first round: the step of each exchange, and bytes sent to a client


def play(
    method: Method,
    data: Data,
    chunk: int,
    rounds: int,
    score: tuple[int, ...] = (),
    ids: np.ndarray = ABLE,
    lost: frozenset[int] = frozenset(),
) -> Played:
    engine, refused = Recorder(method, data, chunk), list[str]()
    guard = Guard(method, NAMES, np.diff(data.bounds, axis=1), data.extras, log=refused.append)
    out = Played(
        [method.init(len(data))], [engine.rows.read(EVERYBODY, 0)], {}, [], [file_of(engine)], {}, engine.asked
    )
    for round in range(rounds + 1):
        if round:
            out.cohorts.append(Cohort(engine, ids, round, lost=lost, guard=guard))
            out.states.append(method.round(out.states[-1], out.cohorts[-1]))
            out.rows.append(engine.rows.read(EVERYBODY, round))
            out.files.append(file_of(engine))
        if round in score:
            scored = Cohort(engine, EVERYBODY, round, guard=guard).ask("score", out.states[-1].message())
            out.scores[round] = scored.values
    for ids, values, shared in engine.first:
        for n, i in enumerate(ids.tolist()):
            out.replies[i] = ({k: v[n] for k, v in values.items()}, {k: v[n] for k, v in shared.items()})
    assert refused == []  # an honest client's reply fits its schema
    return out


def file_of(engine: Recorder) -> bytes:
    engine.rows.file.seek(0)
    return engine.rows.file.read()


@contextlib.contextmanager
def engine_on(file: bytes, method: Method, data: Data, chunk: int) -> Iterator[Recorder]:
    """A new engine on a copy of a file of private rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        path.write_bytes(file)
        yield Recorder(method, data, chunk, path)


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
    # small blocks: evaluation takes several, and does not pad a client to the thousands that a block may hold
    object.__setattr__(adapter, "limits", adapter.limits._replace(examples=min(BLOCK, adapter.limits.examples)))
    slow = adapter.view == "pixels"
    task, data = example(adapter, FEWER if slow else SIZES)
    local = replace(local, epochs=1) if slow else local
    return Case(Method.build(adapter, local, merge, task, 5, every_metric() | (metrics or {})), data)


# The checks


def check_stacked_is_serial(case: Case) -> None:
    """However many clients run side by side, the numbers are the same; and what is sent down is not changed. Two at a time
    differ from all at once in that replies arrive in several parts: one round, and the scores at the end, show it."""
    method, data, serial = case.method, case.data, case.serial
    pairs = play(method, data, 2, rounds=1)
    with engine_on(serial.files[3], method, data, 2) as engine:
        scores = Cohort(engine, EVERYBODY, 3).ask("score", serial.states[3].message()).values
    for rounds, other in ((1, pairs), (3, case.stacked)):
        close(serial.states[rounds].shared, other.states[rounds].shared)
        close(serial.rows[rounds], other.rows[rounds])
    close(serial.scores[3], scores)
    close(serial.scores[3], case.stacked.scores[3])
    same(case.before[0], case.method.initial)
    same(case.before[1], case.method.newcomer)


def check_stacked_is_serial_with_adam(case: Case) -> None:
    method = case.method
    if type(method.local) is Sgd and type(method.merge) is not Mean:
        return  # an optimiser is a client's, so that the plain client needs no more than the plain server
    rule = replace(method.local, optimiser="adam", lr=0.01)
    adam = Method.build(method.adapter, rule, method.merge, method.task, 5)
    one, other = (play(adam, case.data, chunk, rounds=1) for chunk in (1, STACKED))  # a round starts its optimiser anew
    close(with_gradient(one.states[1].shared), with_gradient(other.states[1].shared), tolerance=1e-8)
    close(with_gradient(one.rows[1]), with_gradient(other.rows[1]), tolerance=1e-8)


def with_gradient(params: Params) -> Params:
    """Without the bias of keys in attention: softmax does not depend on it, so that its gradient is 0 but for rounding,
    and Adam, which divides by the gradient's size, makes a step of the rounding."""
    return {k: v for k, v in params.items() if not k.endswith("k_proj.bias")}


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
    logits = some_logits(case)
    each = data.y.shape[1:] if method.adapter.task_type is SEGMENTATION else (len(method.task.classes),)
    assert logits.shape == (2, 3, *each) and logits.isfinite().all()


def check_metrics_have_their_shape(case: Case) -> None:
    """As they say, for each example; `check_replies_match_the_schema` sees the others."""
    method, y = case.method, case.data.y
    for name, metric in method.metrics_for(("corrupted",)).items():
        if isinstance(metric, Additive):
            found = metric.each(method.model, some_logits(case), y[:6].view(2, 3, *y.shape[1:])).shape
            assert found == (2, 3, *metric.shape(method.model)), f"metric {name} says {metric.shape(method.model)}"


def some_logits(case: Case) -> Tensor:
    """Of two clients with three examples each, at the start."""
    params = copy_per_client(case.method.adapter.init(case.method.task, 5), 2)
    return case.method.model.logits(params, case.data.x[:6].view(2, 3, *case.data.x.shape[1:]))


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
            for k, field in schema.values.items():
                rows = data.counts("train")[ids[0]]  # one client at a time where an axis has any length
                assert values[k].shape == (len(ids), *(rows if n == -1 else n for n in field.shape)), f"{name}: {k}"
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
            close(one, other, tolerance=1e-8)


def check_order_of_clients_does_not_matter(case: Case) -> None:
    """As replies arrive one by one; and in a round that starts from what the server kept of the one before."""
    backwards = ABLE[::-1].copy()
    same(play(case.method, case.data, 1, rounds=1, ids=backwards).states[1].shared, case.serial.states[1].shared)
    with engine_on(case.stacked.files[1], case.method, case.data, STACKED) as engine:
        state = case.method.round(case.stacked.states[1], Cohort(engine, backwards, 2))
    same(state.shared, case.stacked.states[2].shared)


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
    with engine_on(case.stacked.files[2], case.method, case.data, STACKED) as engine:
        case.method.round(case.stacked.states[2], Cohort(engine, ABLE, 3))
        again = Stacked(case.method, case.data, STACKED, engine.path, diverged)
        state = case.stacked.states[2]
        for round in (3, 4):
            state = case.method.round(state, Cohort(again, ABLE, round))
    same(case.stacked.states[4].shared, state.shared)
    same(case.stacked.rows[4], again.rows.read(EVERYBODY, 4))


def check_bytes_are_exact(case: Case) -> None:
    method, cohort, sent = case.method, case.lossy.cohorts[0], message(case.method)
    rows = sum(case.data.counts("train")[i] for i in (1, 2, 4))
    loose = 8 * rows * sum(-math.prod(f.shape) for f in method.uploads.values() if -1 in f.shape)  # a row per example
    up = 3 * (nbytes(sent.shared) + 2 * method.upload_bytes) + loose  # upload_bytes counts float32
    assert case.lossy.asked[0] == ("train", sent.nbytes) and len(case.lossy.asked) == cohort.exchange
    assert cohort.bytes_down == 5 * sum(size for _, size in case.lossy.asked)
    later = [f for step, _ in case.lossy.asked[1:] for f in steps.step_of(step).schema(method, {}).values.values()]
    assert cohort.bytes_up == up + 3 * 8 * sum(math.prod(f.shape) for f in later)


def check_a_newcomer_uses_the_shared_model(case: Case) -> None:
    """A client that never trained has the shared model as its own, on every split and by every metric."""
    if case.method.has_shared_model and case.method.newcomer:
        for name in case.method.metrics_for(()):
            close(*({name: case.stacked.scores[3][f"{view}.{name}"][5]} for view in ("shared", "personal")))


def check_training_lowers_the_loss(case: Case) -> None:
    """The loss of training examples, which are scored as if they were test examples."""
    view, data, done = "personal" if case.method.newcomer else "shared", case.data, case.stacked
    trained = replace(data, bounds=data.bounds[:, [0, 0, 0, 1]])

    def loss(round: int) -> float:
        with engine_on(done.files[round], case.method, trained, STACKED) as engine:
            scored = Cohort(engine, EVERYBODY, round).ask("score", done.states[round].message())
        return float(scored.values[f"{view}.loss"][:5, 2].sum())

    assert not case.method.trains or loss(4) < loss(0)


Check = Callable[[Case], None]

CHECKS: tuple[Check, ...] = (
    check_names_are_not_reserved,
    check_logits_are_finite,
    check_metrics_have_their_shape,
    check_replies_match_the_schema,
    check_stacked_is_serial,
    check_private_never_goes_up,
    check_bytes_are_exact,
    check_neighbours_do_not_matter,
    check_diagnoses_are_one_number_a_client,
    check_a_newcomer_uses_the_shared_model,
    check_training_lowers_the_loss,
)
# These play further rounds, and are asked of all combinations with an adapter that shares all and with one that has private
# parameters; of the other adapters on embeddings, with each local rule and each merge once and where they are published.
FURTHER: tuple[Check, ...] = (
    check_stacked_is_serial_with_adam,
    check_order_of_clients_does_not_matter,
    check_missing_clients_are_absent,
    check_goes_on_bit_for_bit,
)
SHARES_ALL, HAS_PRIVATE = "head", "rotation"
SIMILAR = ("attention", "linear", "mlp")  # to these two
# variants of others: without --all only as published, and with plain training and the mean
VARIANTS = (
    "affine",
    "alexnet",
    "both_towers",
    "cnn",
    "consistent",
    "exact",
    "experts",
    "factored",
    "ffa",
    "generated",
    "groups",
    "guided",
    "independent",
    "knowledge",
    "memory",
    "named",
    "orthogonal",
    "other_text",
    "plot",
    "proda",
    "prograd",
    "prompt_memory",
    "prototypes",
    "residual",
    "server_coop",
    "small",
    "trajectory",
    "turns",
    "two_masks",
    "visual_head",
)


def checks_of(names: Names) -> tuple[Check, ...]:
    adapter, local, merge = names
    thorough = adapter in (SHARES_ALL, HAS_PRIVATE) or small_adapter(adapter).limits.gpu
    return CHECKS + FURTHER if thorough or local == "sgd" or merge == "mean" or names in published() else CHECKS


def failures(case: Case, checks: tuple[Check, ...] = CHECKS + FURTHER) -> dict[str, Exception]:
    """What was found, by the name of the check."""
    found: dict[str, Exception] = {}
    for check in checks:
        try:
            check(case)
        except Exception as error:
            error.add_note(f"in {check.__name__}")
            found[check.__name__] = error
    return found


def test_contract(names, double, pytestconfig):
    more = {name: registry.find("metric", name)() for kind, name in given_parts(pytestconfig) if kind == "metric"}
    found = failures(case_of(*small_parts(*names), metrics=more), checks_of(names))
    if found:
        raise ExceptionGroup(f"{'-'.join(names)} fails {', '.join(found)}", list(found.values()))


class Canned:
    """An engine whose clients answer with fixed numbers; running statistics are multiplied by `scale`."""

    def __init__(self, method: Method, scale: float):
        self.method, self.scale = method, scale
        self.draw = torch.Generator().manual_seed(9)

    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
        schema = steps.step_of(step).schema(self.method, {})
        values = {k: 1 + self.numbers((len(ids), *f.shape)).abs() for k, f in schema.values.items()}
        shared = {k: v + self.numbers((len(ids), *v.shape)) for k, v in message.shared.items() if schema.shared}
        yield Reply(ids, values, {k: v * self.scale if is_running_statistic(k) else v for k, v in shared.items()})

    def numbers(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.draw)


ROBUST = ("median", "trimmed")  # of running statistics they take their own robust mean, not one by weights


@pytest.mark.parametrize("merge", registry.names("merge"))
def test_running_statistics_are_averaged_and_counted_nowhere_else(merge, double):
    """In a network with batch norm, statistics of any size change neither the other parameters nor the weights."""
    local = merge if merge in ("moments", "scaffold", "feddyn") else "sgd"
    names = ("resnet", local, merge)
    if is_expected(refusal(names)):
        pytest.skip(refusal(names))
    adapter, rule, server = small_parts(*names)
    method = Method.build(adapter, rule, server, example(adapter)[0], 5)
    after, notes, replies = [], [], []
    for scale in (1.0, 1e3):
        engine, cohort = Canned(method, scale), Cohort(Canned(method, scale), ABLE, 2, rounds=4)
        after.append(method.round(method.init(len(SIZES)), cohort).shared)
        notes.append(cohort.notes["weights"])
        replies.append(next(engine.run("train", ABLE, method.init(len(SIZES)).message(), 2, 0)).shared)
    statistics = [k for k in method.initial if is_running_statistic(k)]
    assert statistics and notes[0] == notes[1]
    same(*({k: v for k, v in shared.items() if k not in statistics} for shared in after))
    weight = torch.tensor(list(notes[1].values()))
    for k in statistics if merge not in ROBUST else ():
        close({k: after[1][k]}, {k: torch.tensordot(weight, replies[1][k], dims=1)})


# Every part is enrolled, and the checks find parts that break the contract


def test_every_part_is_enrolled():
    """Also one that was added a moment ago."""
    for at, axis in enumerate(registry.AXES):
        assert {names[at] for names in combinations()} == set(registry.names(axis))
    assert not small_adapter(SHARES_ALL).private and small_adapter(HAS_PRIVATE).private
    assert all(refusal((adapter, "sgd", "mean")) == "" for adapter in registry.names("adapter"))


def test_every_metric_is_enrolled():
    """With a case of a task type that it is for."""
    found = set()
    for adapter in map(small_adapter, registry.names("adapter")):
        case = case_of(adapter, *small_parts("head", "sgd", "mean")[1:])
        method, data = with_everything(case.method, case.data)
        found |= {name.partition(".")[2] for name in steps.step_of("score").schema(method, data.extras).values}
    assert found >= set(registry.names("metric")) | set(METRICS)


@pytest.mark.parametrize("pattern", EXPECTED)
def test_every_expected_refusal_occurs(pattern):
    assert any(re.match(pattern, refusal(names)) for names in itertools.product(*map(registry.names, registry.AXES)))


HEAD = """from dataclasses import dataclass
import torch
from fedvlm.parts import Head

@dataclass(frozen=True)
class Mine(Head):
    hidden: int = 4096  # a size, as others have it
"""
SGD = """from dataclasses import dataclass
import torch
from fedvlm.parts import Field, Local

@dataclass(frozen=True)
class Mine(Local):
"""
ADDITIVE = """from dataclasses import dataclass
import torch
from fedvlm.parts import Additive, PerClient

@dataclass(frozen=True)
class Mine(Additive):
"""


def written(kind: str, folder: Path, source: str) -> str:
    """The name of a part in a file of its own."""
    (folder / f"{kind}.py").write_text(source)
    return str(folder / f"{kind}.py")


def test_a_part_of_a_users_own_file_is_enrolled(tmp_path, double):
    """With every local rule and merge, as the adapter that it derives from."""
    name = written("adapter", tmp_path, HEAD)
    mine = [names[1:] for names in combinations((("adapter", name),)) if names[0] == name]
    assert mine == [names[1:] for names in combinations() if names[0] == "head"]
    assert small_adapter(name).hidden == SMALL["hidden"]
    assert not failures(case_of(*small_parts(name, "sgd", "mean")))


def test_nan_in_logits_is_found(tmp_path, double):
    source = (
        HEAD
        + """
    def logits(self, task, params, x):
        return super().logits(task, params, x) / torch.zeros(())
"""
    )
    found = failures(case_of(*small_parts(written("adapter", tmp_path, source), "sgd", "mean")))
    assert {"check_logits_are_finite", "check_stacked_is_serial", "check_replies_match_the_schema"} <= set(found)


def test_an_adapter_that_calls_a_shared_parameter_private_is_found(tmp_path, double):
    """Here, after the method was built."""
    source = (
        HEAD
        + """
    def logits(self, task, params, x):
        object.__setattr__(self, "private", ("head",))
        return super().logits(task, params, x)
"""
    )
    found = failures(case_of(*small_parts(written("adapter", tmp_path, source), "sgd", "mean")))
    assert "check_private_never_goes_up" in found


def test_a_private_parameter_under_another_name_is_found(tmp_path, double):
    source = (
        SGD
        + """
    def uploads(self, task, shared):
        return super().uploads(task, shared) | {"hint": Field((1, task.dim, task.dim))}

    def train(self, model, own, message, data):
        trained = super().train(model, own, message, data)
        return trained._replace(values=trained.values | {"hint": trained.own["skew"]})
"""
    )
    found = failures(case_of(*small_parts("rotation", written("local", tmp_path, source), "mean")))
    assert set(found) == {"check_private_never_goes_up"}


@pytest.mark.parametrize("reserved", ["personal.head", "prepared.head", "encoder/head"])
def test_a_reserved_parameter_name_is_found(tmp_path, double, reserved):
    """Its combinations are enrolled, and fail with the package's own refusal; also where the package lets it pass."""
    source = (
        HEAD
        + f"""
    def init(self, task, seed):
        return {{"{reserved}": super().init(task, seed)["head"]}}
"""
    )
    names = (written("adapter", tmp_path, source), "sgd", "mean")
    assert is_enrolled(names)
    with pytest.raises(FedvlmError, match="reserved"):
        case_of(*small_parts(*names))
    passed = case_of(*small_parts("head", "sgd", "mean"))
    method = replace(passed.method, adapter=small_adapter(names[0]))
    assert "check_names_are_not_reserved" in failures(Case(method, passed.data))


WRONG_SHAPES = {
    "each": """
    def each(self, model, logits, y):
        return logits[..., :2]
""",
    "shape": """
    def shape(self, model):
        return (6,)

    def each(self, model, logits, y):
        return logits[..., :3, None].expand(-1, -1, 3, 2)
""",
}


@pytest.mark.parametrize("wrong", WRONG_SHAPES)
def test_a_metric_of_another_shape_is_found(tmp_path, double, wrong):
    name = written("metric", tmp_path, ADDITIVE + WRONG_SHAPES[wrong])
    found = failures(case_of(*small_parts("head", "sgd", "mean"), metrics={"mine": registry.find("metric", name)()}))
    assert "check_metrics_have_their_shape" in found


def test_a_metric_per_client_of_another_shape_is_found(tmp_path, double):
    source = (
        ADDITIVE.replace("Mine(Additive)", "Mine(PerClient)")
        + """
    def client(self, view):
        return torch.zeros(2)
"""
    )
    name = written("metric", tmp_path, source)
    found = failures(case_of(*small_parts("head", "sgd", "mean"), metrics={"mine": registry.find("metric", name)()}))
    assert "check_replies_match_the_schema" in found


RULES_THAT_FAIL = {
    "neighbours": ("check_neighbours_do_not_matter", "params['head'] -= 0.1 * params['head'].mean(0, keepdim=True)"),
    "randomness": ("check_goes_on_bit_for_bit", "params['head'] += 0.1 * torch.randn(params['head'].shape)"),
    "message": ("check_stacked_is_serial", "message.shared['head'] += 0.1"),
}


@pytest.mark.parametrize("reason", RULES_THAT_FAIL)
def test_a_local_rule_that_is_not_a_function_of_its_client_is_found(tmp_path, double, reason):
    """It sees other clients, draws from torch's own generator, or changes what was sent."""
    check, line = RULES_THAT_FAIL[reason]
    source = (
        SGD
        + f"""
    def fit(self, model, params, message, own, data):
        values = super().fit(model, params, message, own, data)
        {line}
        return values
"""
    )
    assert check in failures(case_of(*small_parts("head", written("local", tmp_path, source), "mean")))


# What only some adapters have


@pytest.mark.parametrize("name", [n for n in registry.names("adapter") if isinstance(small_adapter(n), HasGradient)])
def test_gradients_in_closed_form_are_autograds(name, double):
    method = build(name, "sgd", "mean")
    model, data = method.model, example(name)[1]
    params = {k: v + 0.1 * torch.randn(len(ABLE), *v.shape) for k, v in model.adapter.init(model.task, 1).items()}
    for batch in Stacked(method, data, 6).at(np.array([0, 2, 4, 1, 3]), 1).batches(4):
        now = {k: v[: len(batch.y)] for k, v in params.items()}
        loss, closed = model.gradients("cross-entropy")(now, batch)
        other, auto = by_autograd(lambda p, b: cross_entropy(model.logits(p, b.x), b))(now, batch)
        torch.testing.assert_close(loss, other)
        for a, b in zip(closed, auto, strict=True):
            torch.testing.assert_close(a, b)


READ_ANEW = {"conditional": "its prompts depend on the image", "visual": "it does not change the text tower"}
READ_ANEW |= {"server_coop": READ_ANEW["conditional"], "visual_head": READ_ANEW["visual"]}
READERS = [n for n in registry.names("adapter") if small_adapter(n).requires in ("text tower", "both towers")]


@pytest.mark.parametrize("name", [n for n in READERS if n not in READ_ANEW])
def test_text_is_encoded_once_however_many_images(name, double, monkeypatch):
    """An evaluation in small blocks, with outsiders, encodes no more than one block without them would."""
    method, (_, data) = build(name, "sgd", "mean"), example(name, FEWER)
    nouns = getattr(method.adapter, "count", 0)
    encoded, plain = [], TextTower._encode

    def count(tower, ends, shared, past, own, clients, *rest):
        encoded.append(clients * len(ends))
        return plain(tower, ends, shared, past, own, clients, *rest)

    def total(block, outsiders, beforehand):
        encoded.clear()
        with monkeypatch.context() as patch:
            patch.setattr(type(method.adapter), "limits", Limits(examples=block))
            if not beforehand:
                patch.setattr(type(method.adapter), "prepare", lambda self, task, params, before: params)
            extras = {"outsiders": Extra(data.x[:5])} if outsiders else {}
            engine = Stacked(method, replace(data, extras=extras), 6)
            Cohort(engine, EVERYBODY, 0).ask("score", method.init(6).message())
        return sum(encoded)

    monkeypatch.setattr(TextTower, "_encode", count)
    once, small = total(1 << 16, False, False), total(2, True, True)
    assert small <= once + nouns * len(method.views) < total(2, True, False)
    assert small == total(1 << 16, True, True)
