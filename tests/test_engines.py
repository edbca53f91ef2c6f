"""Engines under stress: processes that die, lie or dawdle; rows on disk; messages that are not what was agreed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import random_data, random_task
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from test_contract import message

from fedvlm import train
from fedvlm.adapters.head import Head
from fedvlm.config import recipes, resolve
from fedvlm.core import Cohort, FedvlmError, NoQuorum
from fedvlm.engines import wire
from fedvlm.engines.loopback import Loopback, Worker
from fedvlm.engines.rows import Rows
from fedvlm.engines.stacked import Stacked
from fedvlm.engines.worker import Client
from fedvlm.local.sgd import Sgd
from fedvlm.merge.mean import Mean
from fedvlm.method import Method


def setup_for(images: Path, **given):
    return resolve("fedot", {"data": str(images), "unseen": "openmoji", "rounds": 3, "lr": 0.05, **given})


def run(images: Path, folder: Path, **given):
    setup = setup_for(images, **given)
    return train.train(setup, train.load_pool(setup), folder)


def told(run):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in run.rounds()]


@pytest.fixture(scope="module")
def loopback(images, tmp_path_factory):
    return run(images, tmp_path_factory.mktemp("loop") / "run", engine="loopback")


def test_loopback_is_serial_bit_for_bit(images, tmp_path, loopback):
    serial = run(images, tmp_path / "run", engine="serial")
    assert told(serial) == told(loopback)
    assert (serial.folder / "state.safetensors").read_bytes() == (loopback.folder / "state.safetensors").read_bytes()


# whole networks go through bytes in test_tasks.py
LIGHT = [r for r in recipes() if r not in ("centralised", "zero-shot") and not resolve(r, {}).adapter.heavy]


@pytest.mark.parametrize("name", LIGHT)
def test_every_recipe_answers_through_bytes_as_in_process(name, images, tmp_path):
    """A client built from its own folder, asked and answering in bytes: the same bits as the serial engine, and just
    what was agreed."""
    setup = resolve(name, {"data": str(images), "unseen": "openmoji", "rounds": 2, "lr": 0.01})
    pool = train.load_pool(setup)
    method, federation = train.prepare(setup, pool)
    data = replace(federation.data, rounds=2)
    engine = Loopback(setup, method, federation, data, tmp_path)
    clients = {i: Client(tmp_path / federation.names[i]) for i in (0, 2)}
    serial, down = Stacked(method, data, 1), message(method)
    for round in (1, 2):
        for step in ("train", "gauge", "score", "diagnose"):
            for ids, up in serial.run(step, np.array([0, 2]), down, round, 0):
                arrived, about = wire.unpack(wire.pack(down, step=step, round=round, exchange=0))
                reply, _ = wire.unpack(wire.pack(clients[int(ids[0])].answer(arrived, about), ok=True))
                wire.check(reply, engine.expected(step, down), "client")
                assert up.keys() == reply.keys() and all(torch.equal(up[k], reply[k]) for k in up)


def test_a_client_keeps_its_rows_and_only_its_own(loopback):
    """The server's folder holds no private row; a client's folder holds its own data and row and nobody else's."""
    assert not (loopback.folder / "rows.bin").exists()
    folders = sorted((loopback.folder / "clients").iterdir())
    assert [f.name for f in folders] == ["noto", "openmoji", "twemoji"]
    for folder in folders:
        assert oct(folder.stat().st_mode & 0o777) == "0o700"
        about = json.loads((folder / "client.json").read_text())
        assert about["bounds"][0] == 0
    state = loopback.load()[0]
    assert set(state.shared) == {"head"} and torch.equal(state.private["skew"], torch.zeros_like(state.private["skew"]))


@pytest.fixture
def processes(images, tmp_path):
    """Three client processes and the line they left in the log."""
    setup = setup_for(images, timeout=20)
    pool = train.load_pool(setup)
    method, federation = train.prepare(setup, pool)
    log: list[str] = []
    engine = Loopback(setup, method, federation, federation.data, tmp_path, log.append)
    yield engine, method, log
    engine.close()


def test_a_killed_client_is_absent_and_comes_back(processes):
    engine, method, log = processes
    ids = np.array([0, 2])
    assert list(Cohort(engine, ids, 1).ask("train", method.initial)[0]) == [0, 2]
    row = engine.folder / "noto" / "rows.bin"
    before = row.read_bytes()
    victim = engine.workers[0]
    os.kill(victim.process.pid, signal.SIGSTOP)
    threading.Timer(0.3, lambda: os.kill(victim.process.pid, signal.SIGKILL)).start()
    answered, up = Cohort(engine, ids, 2, quorum=0.5).ask("train", method.initial)
    assert list(answered) == [2] and len(up["head"]) == 1 and any("noto" in line for line in log)
    assert row.read_bytes() == before
    again, _ = Cohort(engine, ids, 3).ask("train", method.initial)
    assert list(again) == [0, 2]


def test_a_late_client_is_absent_and_its_late_answer_is_not_taken_for_another(processes):
    engine, method, _ = processes
    ids = np.array([0, 2])
    Cohort(engine, ids, 1).ask("train", method.initial)
    engine.timeout = 4.0
    stopped = engine.workers[2].process.pid
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    answered, _ = Cohort(engine, ids, 2).ask("train", method.initial)
    assert list(answered) == [0] and time.monotonic() - began < 15
    engine.timeout = 30.0
    answered, up = Cohort(engine, ids, 3).ask("train", method.initial)
    assert list(answered) == [0, 2] and up["n"].tolist() == [30.0, 30.0]


def test_too_few_answers_stop_the_round(processes):
    engine, method, _ = processes
    cohort = Cohort(engine, np.array([0, 2]), 1, quorum=1.0, lost=frozenset({0}))
    with pytest.raises(NoQuorum, match="1 of 2 clients answered"):
        cohort.ask("train", method.initial)


def test_an_unknown_step_is_answered_with_an_error_and_the_client_lives(processes):
    engine, method, log = processes
    assert len(Cohort(engine, np.array([0]), 1, quorum=0.0, lost=frozenset()).engine.workers) == 0
    with pytest.raises(NoQuorum):
        Cohort(engine, np.array([0]), 1).ask("upload-everything", method.initial)
    assert "unknown step" in log[-1]
    assert list(Cohort(engine, np.array([0]), 1).ask("train", method.initial)[0]) == [0]


class Liar(Worker):
    """A client that answers what it likes."""

    def __init__(self, reply):
        self.reply, self.outgoing, self.incoming, self.alive_ = reply, b"", bytearray(), True
        self.read_end, self.write_end = os.pipe()
        self.unread, self.stdin = os.pipe()
        self.stdout = self.read_end

    alive = property(lambda self: self.alive_)

    def post(self, message):
        _, about = wire.unpack(message)
        data = self.reply(about["ticket"])
        threading.Thread(
            target=lambda: os.write(self.write_end, struct.pack("<Q", len(data)) + data), daemon=True
        ).start()

    def kill(self):
        self.alive_ = False

    stop = kill


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda head, t: wire.pack({"head": head, "n": torch.ones(1)}, ok=True, ticket=t), "other names"),
        (
            lambda head, t: wire.pack(
                {"head": head, "n": torch.ones(1), "loss": torch.ones(1), "skew": head.clone()}, ok=True, ticket=t
            ),
            "other names",
        ),
        (
            lambda head, t: wire.pack(
                {"head": head[:, :1], "n": torch.ones(1), "loss": torch.ones(1)}, ok=True, ticket=t
            ),
            "sent head as",
        ),
        (
            lambda head, t: wire.pack(
                {"head": head.double(), "n": torch.ones(1), "loss": torch.ones(1)}, ok=True, ticket=t
            ),
            "float64",
        ),
        (
            lambda head, t: wire.pack(
                {"head": head * float("nan"), "n": torch.ones(1), "loss": torch.ones(1)}, ok=True, ticket=t
            ),
            "not finite",
        ),
        (lambda head, t: wire.pack({}, ok=False, why="boom", ticket=t), "boom"),
    ],
)
def test_a_lying_client_is_left_out(processes, lie, why):
    engine, method, log = processes
    head = method.initial["head"][None].clone()
    engine.workers[0] = Liar(lambda ticket: lie(head, ticket))
    engine.timeout = 30.0
    answered, _ = Cohort(engine, np.array([0, 2]), 1, quorum=0.5).ask("train", method.initial)
    assert list(answered) == [2] and why in " ".join(log)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(data):
    with contextlib.suppress(wire.BadMessage):
        wire.unpack(data)


def test_pickles_are_refused():
    import pickle

    with pytest.raises(wire.BadMessage):
        wire.unpack(pickle.dumps({"x": 1}))
    with pytest.raises(wire.BadMessage):
        wire.unpack(save({"x": torch.ones(1)}))  # tensors without the agreed words


def test_a_frame_longer_than_the_limit_is_not_read(tmp_path):
    path = tmp_path / "frame"
    path.write_bytes(struct.pack("<Q", wire.LIMIT + 1) + b"x" * 10)
    with path.open("rb") as pipe, pytest.raises(wire.BadMessage, match="over the limit"):
        wire.receive(pipe)


def test_rows_of_a_round_done_again_are_those_from_before(tmp_path):
    newcomer = {"w": torch.zeros(2, 3), "b": torch.zeros(())}
    rows = Rows(newcomer, 4, tmp_path / "rows")
    ids = np.array([1, 3])

    def values(k):
        return {"w": torch.full((2, 2, 3), float(k)), "b": torch.full((2,), float(k))}

    rows.write(ids, values(1), 1)
    rows.write(ids, values(2), 2)
    rows.write(ids, values(3), 3)
    rows.write(ids, values(30), 3)  # the same round again
    again = Rows(newcomer, 4, tmp_path / "rows")
    assert again.read(ids, 2)["b"].tolist() == [2.0, 2.0]
    assert again.read(ids, 3)["b"].tolist() == [30.0, 30.0]
    assert again.read(np.array([0, 2]), 3)["w"].eq(0).all()
    again.write(ids, values(4), 4)
    assert again.read(ids, 3)["b"].tolist() == [30.0, 30.0] and again.read(ids, 4)["b"].tolist() == [4.0, 4.0]


def test_a_full_disk_is_told_and_the_rows_from_before_stand(tmp_path, monkeypatch):
    rows = Rows({"w": torch.zeros(3)}, 2, tmp_path / "rows")
    ids = np.array([0, 1])
    rows.write(ids, {"w": torch.ones(2, 3)}, 1)
    inner, calls = os.pwrite, {"n": 0}

    def full(*args):
        calls["n"] += 1
        if calls["n"] == 5:  # in the middle of the second client's row
            raise OSError(errno.ENOSPC, "No space left on device")
        return inner(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(FedvlmError, match="No space left"):
            rows.write(ids, {"w": torch.full((2, 3), 2.0)}, 2)
    assert rows.read(ids, 1)["w"].eq(1).all()  # the round done again starts from here
    rows.write(ids, {"w": torch.full((2, 3), 2.0)}, 2)
    assert rows.read(ids, 2)["w"].eq(2).all()


def test_rows_of_another_shape_are_refused(tmp_path):
    Rows({"w": torch.zeros(2)}, 3, tmp_path / "rows").flush()
    with pytest.raises(Exception, match="another shape"):
        Rows({"w": torch.zeros(5)}, 3, tmp_path / "rows")


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


def test_where_memory_is_full_fewer_clients_run_side_by_side(monkeypatch, double):
    task = random_task()
    data, play = random_data(task), Method.play
    method = Method.build(Head(), Sgd(lr=0.1, batch=4), Mean(), task)
    expected = method.round(method.init(6), Cohort(Stacked(method, data, 1), np.arange(6), 1))

    def full(room):
        def tight(self, step, own, down, part):
            if len(part) > room:
                raise torch.OutOfMemoryError("full")
            return play(self, step, own, down, part)

        return tight

    monkeypatch.setattr(Method, "play", full(2))
    warned: list[str] = []
    engine = Stacked(method, data, 6, warn=warned.append)
    state = method.round(method.init(6), Cohort(engine, np.arange(6), 1))
    assert (state.shared["head"] - expected.shared["head"]).abs().max() < 1e-12
    assert engine.chunk == 1 and [w.split("(")[1] for w in warned] == ["chunk=3)", "chunk=1)"]
    monkeypatch.setattr(Method, "play", full(0))
    with pytest.raises(FedvlmError, match="batch="):
        method.round(method.init(6), Cohort(engine, np.arange(6), 1))


def test_quorum_counts_those_asked():
    cohort = Cohort(None, np.arange(10), 1, quorum=0.5)  # type: ignore[arg-type]
    cohort.engine = type("Nobody", (), {"run": lambda *a: iter([(np.array([1]), {"n": torch.ones(1)})])})()
    with pytest.raises(NoQuorum, match="needs 5"):
        cohort.ask("train", {})
