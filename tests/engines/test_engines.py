"""Engines under stress: processes that die, lie or dawdle; rows on disk; messages that are not what was agreed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import message, random_data, random_task, same, scores, small_setup, state_of, train_small
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from fedvlm.config import recipe
from fedvlm.config.config import resolve
from fedvlm.core.cohort import Cohort
from fedvlm.core.state import Answer, Message, Reply
from fedvlm.data.pool import Pools
from fedvlm.engines.base import Job
from fedvlm.engines.stacked import Stacked
from fedvlm.errors import BadMessage, FedvlmError, NoQuorum
from fedvlm.federation import wire
from fedvlm.federation.engines.loopback import Loopback, Worker
from fedvlm.federation.wire import Header
from fedvlm.federation.worker import SiteClient
from fedvlm.parts.adapters.head import Head
from fedvlm.parts.local.sgd import Sgd
from fedvlm.parts.merge.mean import Mean
from fedvlm.rounds import steps
from fedvlm.rounds.guard import Guard
from fedvlm.rounds.method import Method
from fedvlm.rounds.steps.train import Train
from fedvlm.training.planned_run import PlannedRun

can_pause = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="a process cannot be paused on this system")


@pytest.fixture(scope="module")
def loopback(images, tmp_path_factory):
    return train_small(images, tmp_path_factory.mktemp("loop") / "run", engine="loopback")


def test_loopback_is_serial_bit_for_bit(images, tmp_path, loopback):
    serial = train_small(images, tmp_path / "run", engine="serial")
    assert scores(serial) == scores(loopback)
    assert state_of(serial.folder) == state_of(loopback.folder)
    outputs = [(run.folder / "outputs.safetensors").read_bytes() for run in (serial, loopback)]
    assert outputs[0] == outputs[1]


def light() -> list[tuple[str, str]]:
    """Methods, and methods on a preset, without whole networks: these go through bytes in test_tasks.py."""
    found = []
    for name in recipe.recipe_names():
        for on in ("", *recipe.presets()):
            with contextlib.suppress(FedvlmError):  # it cannot be put on a preset
                recipe.load(name, on)
                if name not in ("centralised", "zero-shot") and not resolve(name, {"on": on}).adapter.limits.gpu:
                    found.append((name, on))
    return found


LIGHT = light()


def test_methods_on_presets_are_among_them():
    assert len(LIGHT) > 30 and ("fedot", "") in LIGHT and ("ga", "attention") in LIGHT


def guard_of(method, federation, log) -> Guard:
    return Guard(method, federation.names, np.diff(federation.data.bounds, axis=1), federation.data.extras, 5.0, log)


@pytest.mark.parametrize(("name", "on"), LIGHT)
def test_every_recipe_answers_through_bytes_as_in_process(name, on, images, tmp_path):
    """A client built from its own folder, asked and answering in bytes: the same bits as the serial engine, and just
    what was agreed."""
    setup = resolve(name, {"on": on, "data": str(images), "unseen": "openmoji", "rounds": 2, "lr": 0.01})
    planned = PlannedRun(setup, Pools().load(setup))
    method, federation = planned.method, planned.federation
    data = replace(federation.data, rounds=2)
    guard = guard_of(method, federation, print)
    engine = Loopback(Job(setup, method, federation, data, tmp_path, print, guard))
    clients = {i: SiteClient(engine.folders[i]) for i in (0, 2)}
    serial, down = Stacked(method, data, 1), message(method)
    for round in (1, 2):
        for step in ("train", "validate", "score", "diagnose"):
            schema, answered = steps.step_of(step).schema(method, data.extras), 0
            for expected in serial.run(step, np.array([0, 2]), down, round, 0):
                client = int(expected.ids[0])
                request = wire.unpack(wire.pack_message(down, Header(step, round, 0, ticket=7)))
                done, parts = clients[client].step(*request, Header(ticket=7))  # whatever the plan asks
                header, parts = wire.unpack(wire.pack(done, parts))
                assert header.ticket == 7
                reply = wire.to_reply(client, parts)
                assert guard.violations(reply, schema, down.shared) == []
                same(expected.values, reply.values)
                same(expected.shared, reply.shared)
                answered += 1
            assert answered == 2


def test_a_client_keeps_its_rows_and_only_its_own(loopback):
    """The server's folder holds no private row; a client's folder holds its own data and row and nobody else's."""
    assert not (loopback.folder / "rows.bin").exists()
    folders = sorted((loopback.folder / "clients").iterdir())
    assert [f.name for f in folders] == ["noto", "openmoji", "twemoji"]
    for folder in folders:
        if os.name == "posix":
            assert oct(folder.stat().st_mode & 0o777) == "0o700"
        about = json.loads((folder / "client.json").read_text())
        assert about["bounds"][0] == 0
    state = loopback.load()[0]
    assert set(state.shared) == {"head"} and torch.equal(state.private["skew"], torch.zeros_like(state.private["skew"]))


class Processes:
    """Three client processes, and the lines that their engine logs."""

    def __init__(self, images: Path, folder: Path):
        setup = small_setup(images, timeout=20)
        planned = PlannedRun(setup, Pools().load(setup))
        self.method, federation = planned.method, planned.federation
        self.log: list[str] = []
        self.folder = folder
        self.guard = guard_of(self.method, federation, self.log.append)
        job = Job(setup, self.method, federation, federation.data, folder, self.log.append, self.guard)
        self.engine = Loopback(job)
        self.message = self.method.init(3).message()

    def ask(self, *ids: int, round: int = 1, step: str = "train", **rules: float) -> Reply:
        cohort = Cohort(self.engine, np.array(ids), round, guard=self.guard, **rules)  # type: ignore[arg-type]
        return cohort.ask(step, self.message)


@pytest.fixture
def processes(images, tmp_path) -> Iterator[Processes]:
    made = Processes(images, tmp_path)
    yield made
    made.engine.close()


@can_pause
def test_a_killed_client_is_started_again_and_answers_the_same(processes):
    first = processes.ask(0, 2)
    victim = processes.engine.workers[0].process
    os.kill(victim.pid, signal.SIGSTOP)
    threading.Timer(0.3, victim.kill).start()
    reply = processes.ask(0, 2)
    assert list(reply.ids) == [0, 2] and processes.engine.workers[0].process is not victim
    same(first.shared, reply.shared)


@can_pause
def test_a_late_client_is_absent_and_its_late_answer_is_not_taken_for_another(processes):
    processes.ask(0, 2)
    processes.engine.timeout = 2.0
    os.kill(processes.engine.workers[2].process.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert list(processes.ask(0, 2, round=2).ids) == [0] and time.monotonic() - began < 15
    processes.engine.timeout = 30.0
    reply = processes.ask(0, 2, round=3)
    assert list(reply.ids) == [0, 2] and reply.values["n"].tolist() == [30.0, 30.0]


def test_too_few_answers_stop_the_round(processes, bytes_only):
    cohort = Cohort(processes.engine, np.array([0, 2]), 1, quorum=1.0, lost=frozenset({0}))
    with pytest.raises(NoQuorum, match="1 of 2 clients answered"):
        cohort.ask("train", processes.message)


def test_an_unknown_step_is_refused_on_both_sides_and_the_client_lives(processes):
    engine = processes.engine
    assert len(engine.workers) == 0
    with pytest.raises(FedvlmError, match="unknown step"):
        processes.ask(0, step="upload-everything")
    assert len(engine.workers) == 0  # nobody was asked
    request = wire.pack_message(processes.message, engine.header("upload-everything", 1, 0))
    frame = engine.exchange({0: request}, {0: wire.LIMIT})[0]
    assert "where the plan has none" in wire.unpack(frame)[0].error
    pid = engine.workers[0].process.pid
    assert list(processes.ask(0).ids) == [0] and engine.workers[0].process.pid == pid


class Liar(Worker):
    """A client that answers what it likes, on a pipe."""

    def __init__(self, client, inbox, reply, send=wire.send):
        read_end, write_end = os.pipe()
        self.reply, self.outbox, self.lives, self.limit = reply, queue.Queue(), True, 0
        self.process, self.send = self, send
        self.pipe, self.reader = os.fdopen(write_end, "wb", buffering=0), os.fdopen(read_end, "rb", buffering=0)
        threading.Thread(target=self._read, args=(client, inbox), daemon=True).start()

    def poll(self):
        return None if self.lives else 0

    def wait(self, timeout=None):
        return 0

    def post(self, frame):
        answer = self.reply(wire.unpack(frame)[0].ticket)
        threading.Thread(target=self.send, args=(self.pipe, answer), daemon=True).start()

    def kill(self):
        self.lives = False

    stop = kill


NUMBERS = {"n": torch.ones(1), "loss": torch.ones(1)}


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda head: {"values": {"n": torch.ones(1)}, "shared": {"head": head}}, "other names than agreed: loss"),
        (lambda head: {"values": NUMBERS | {"skew": head}, "shared": {"head": head}}, "other names than agreed: skew"),
        (lambda head: {"values": NUMBERS, "shared": {"head": head, "skew": head}}, "other names than agreed: skew"),
        (lambda head: {"values": NUMBERS, "shared": {}}, "other names than agreed: head"),
        (lambda head: {"values": NUMBERS, "shared": {"head": head}, "own": {"skew": head}}, "other parts than agreed"),
        (lambda head: {"values": NUMBERS, "shared": {"head": head[:, :1]}}, "sent head as"),
        (lambda head: {"values": NUMBERS | {"n": torch.ones(2)}, "shared": {"head": head}}, "sent n as (2,)"),
        (lambda head: {"values": NUMBERS, "shared": {"head": head.double()}}, "float64"),
        (lambda head: {"values": NUMBERS, "shared": {"head": head * float("nan")}}, "not finite"),
        (lambda head: "boom", "boom"),
    ],
)
def test_a_lying_client_is_left_out(processes, lie, why):
    engine, head = processes.engine, processes.method.initial["head"][None].clone()

    def reply(ticket: int) -> bytes:
        said = lie(head)
        if isinstance(said, str):
            return wire.pack(Header(ticket=ticket, error=said), {})
        said = {part: {k: v.clone() for k, v in params.items()} for part, params in said.items()}
        return wire.pack(Header(ticket=ticket), said)

    engine.workers[0] = Liar(0, engine.inbox, reply)
    engine.timeout = 30.0
    with pytest.raises(NoQuorum, match="0 of 1 clients answered"):
        processes.ask(0)
    assert why in " ".join(processes.log)


def send_too_long(pipe, data):
    pipe.write(struct.pack("<Q", wire.LIMIT + 1) + data)
    pipe.flush()


@pytest.mark.parametrize("send", [wire.send, send_too_long])
def test_an_answer_that_is_no_message_is_left_out_at_once(processes, send):
    engine = processes.engine
    engine.workers[0] = Liar(0, engine.inbox, lambda ticket: pickle.dumps({"head": 1}), send)
    engine.timeout = 30.0
    began = time.monotonic()
    with pytest.raises(NoQuorum):
        processes.ask(0, round=2)
    assert time.monotonic() - began < 20  # it is not waited for: nothing better will come
    assert "noto is left out" in " ".join(processes.log) and list(processes.guard.end_round(2)["offences"]) == ["noto"]


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(data):
    with contextlib.suppress(BadMessage):
        wire.unpack(data)


def test_pickles_are_refused():
    with pytest.raises(BadMessage):
        wire.unpack(pickle.dumps({"x": 1}))
    with pytest.raises(BadMessage):
        wire.unpack(save({"x": torch.ones(1)}))  # tensors without the agreed words


def test_a_message_survives_its_bytes():
    sent = Message({"w": torch.ones(2)}, {"text": torch.eye(3)}, {"w": torch.zeros(2)}, {"c": torch.ones(1)}, "polish")
    header, parts = wire.unpack(wire.pack_message(sent, Header("train", 3, 1, 9)))
    assert header == Header("train", 3, 1, 9, "polish")
    arrived = wire.to_message(header, parts)
    assert arrived.stage == "polish"
    for part, params in sent.parts().items():
        same(params, arrived.parts()[part])


def test_a_frame_longer_than_the_limit_is_not_read(tmp_path):
    path = tmp_path / "frame"
    path.write_bytes(struct.pack("<Q", wire.LIMIT + 1) + b"x" * 10)
    with path.open("rb") as pipe, pytest.raises(BadMessage, match="over the limit"):
        wire.receive(pipe)


def test_a_client_that_diverges_is_left_out_and_keeps_its_row(double):
    """Not-a-number in one client's data must not reach the mean, nor its neighbours, nor its own saved row."""
    task = random_task()
    data = random_data(task)
    data.x[data.bounds[2, 0]] = float("nan")
    method = Method.build(Head(), Sgd(lr=0.1, batch=4), Mean(), task)
    for chunk in (1, 6):
        warned: list[str] = []
        engine = Stacked(method, data, chunk, warn=warned.append)
        cohort = Cohort(engine, np.array([0, 1, 2]), 1)
        state = method.round(method.init(6), cohort)
        assert (
            state.shared["head"].isfinite().all() and set(cohort.notes["weights"]) == {0, 1} and "client 2" in warned[0]
        )


def test_a_client_whose_own_model_alone_diverges_keeps_its_row(double):
    """What it would send is finite, so only its own row shows it."""
    task, warned = random_task(), list[str]()
    engine = Stacked(Method.build(Head(), Sgd(), Mean(), task), random_data(task), warn=warned.append)
    own = {"w": torch.tensor([[1.0, 2.0], [3.0, torch.nan]])}
    fine = {"w": torch.ones(2, 2)}
    ids, answer = engine.finite_only(np.array([4, 5]), Answer(own, fine, fine), "train", 1)
    assert ids.tolist() == [4] and answer.own["w"].tolist() == [[1, 2]] and "client 5" in warned[0]


def test_where_memory_is_full_fewer_clients_run_side_by_side(monkeypatch, double):
    task = random_task()
    data, step = random_data(task), Train.run
    method = Method.build(Head(), Sgd(lr=0.1, batch=4), Mean(), task)
    expected = method.round(method.init(6), Cohort(Stacked(method, data, 1), np.arange(6), 1))

    def full(room):
        def tight(self, method, own, message, part, prepared):
            if len(part) > room:
                raise torch.OutOfMemoryError("full")
            return step(self, method, own, message, part, prepared)

        return tight

    monkeypatch.setattr(Train, "run", full(2))
    warned: list[str] = []
    engine = Stacked(method, data, 6, warn=warned.append)
    state = method.round(method.init(6), Cohort(engine, np.arange(6), 1))
    assert (state.shared["head"] - expected.shared["head"]).abs().max() < 1e-12
    assert engine.chunk == 1 and [w.split("(")[1] for w in warned] == ["chunk=3)", "chunk=1)"]
    monkeypatch.setattr(Train, "run", full(0))
    with pytest.raises(FedvlmError, match="batch="):
        method.round(method.init(6), Cohort(engine, np.arange(6), 1))


def test_quorum_counts_those_asked():
    class OneAnswers:
        def run(self, *args):
            return iter([Reply(np.array([1]), {"n": torch.ones(1)})])

    with pytest.raises(NoQuorum, match="needs 5"):
        Cohort(OneAnswers(), np.arange(10), 1, quorum=0.5).ask("train", Message({}))  # type: ignore[arg-type]
