"""Clients in processes that hang, come back late, forge log lines or outlive their server."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import same, small_setup

from fedvlm.core.cohort import Cohort
from fedvlm.data.pool import Pools
from fedvlm.engines.base import Job
from fedvlm.errors import FedvlmError
from fedvlm.federation import ledger, wire
from fedvlm.federation.engines import loopback
from fedvlm.federation.engines.loopback import Loopback
from fedvlm.federation.ledger import RECEIVED, entries
from fedvlm.federation.wire import Header
from fedvlm.federation.worker import SiteClient
from fedvlm.rounds.guard import Guard
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun

HANGS, DIES = "hangs", "dies"


class FakeWorker:
    """A client without a process: answers what `says` returns for it, or never."""

    says: dict = {}
    killed: list[int] = []

    def __init__(self, client, folder, inbox):
        self.client, self.inbox, self.limit, self.alive = client, inbox, 0, True

    def post(self, frame):
        header, parts = wire.unpack(frame)
        answer = self.says.get(self.client, honest)(header, parts)
        if answer is DIES:
            self.alive = False
            self.inbox.put((self.client, None))
        elif answer is not HANGS:
            self.inbox.put((self.client, answer))

    def kill(self):
        self.alive = False
        self.killed.append(self.client)

    stop = kill


def honest(header, parts):
    head = parts["shared"]["head"][None] + 0.01
    values = {"n": torch.full((1,), 30.0), "loss": torch.ones(1)}
    return wire.pack(Header(ticket=header.ticket), {"values": values, "shared": {"head": head}})


class Federation:
    def __init__(self, images, folder):
        setup = small_setup(images, timeout=30, grace=0.2)
        planned = PlannedRun(setup, Pools().load(setup))
        self.method, federation = planned.method, planned.federation
        self.log: list[str] = []
        declared = np.diff(federation.data.bounds, axis=1)
        self.guard = Guard(self.method, federation.names, declared, {}, 5.0, self.log.append)
        job = Job(setup, self.method, federation, federation.data, folder, self.log.append, self.guard)
        self.engine = Loopback(job)

    def ask(self, round=1, **rules):
        cohort = Cohort(self.engine, np.arange(3), round, guard=self.guard, **rules)
        return cohort.ask("train", self.method.init(3).message())


@pytest.fixture
def federation(images, tmp_path, monkeypatch) -> Iterator[Federation]:
    monkeypatch.setattr(loopback, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "says", {})
    monkeypatch.setattr(FakeWorker, "killed", [])
    made = Federation(images, tmp_path)
    yield made
    made.engine.close()


def test_a_client_that_hangs_costs_grace_and_not_timeout(federation):
    FakeWorker.says[1] = lambda header, parts: HANGS
    began = time.monotonic()
    assert federation.ask(quorum=0.5).ids.tolist() == [0, 2] and time.monotonic() - began < 5
    assert FakeWorker.killed == [1] and "no answer in time" in federation.log[0]
    assert federation.guard.end_round(1) == {"late": ["openmoji"]}
    began = time.monotonic()
    assert federation.ask(round=2, quorum=0.5, rounds=9).ids.tolist() == [0, 2]  # it rests: nobody waits for it
    assert time.monotonic() - began < 0.2 and FakeWorker.killed == [1]


def test_a_client_that_dies_is_started_once_more_and_then_absent(federation):
    ends = {1: iter([DIES, None]), 2: iter([DIES, DIES, None])}

    def until_it_lives(i):
        return lambda header, parts: next(ends[i], None) or honest(header, parts)

    FakeWorker.says |= {i: until_it_lives(i) for i in ends}
    assert federation.ask().ids.tolist() == [0, 1]
    assert len(federation.log) == 1 and "twemoji is left out: its process ended twice" in federation.log[0]
    assert federation.guard.end_round(1) == {}  # unlucky, not an offender
    assert federation.ask(round=2).ids.tolist() == [0, 1, 2]


def test_without_a_quorum_the_others_are_waited_for(federation):
    federation.engine.timeout = 0.5
    FakeWorker.says |= {i: lambda header, parts: HANGS for i in (1, 2)}
    began = time.monotonic()
    with pytest.raises(FedvlmError, match="1 of 3 clients answered"):
        federation.ask(quorum=0.5)
    assert 0.4 < time.monotonic() - began < 5


def test_lines_in_the_log_cannot_be_forged(federation, tmp_path):
    forged = "boom\n2026-01-01 00:00:00 round 1: everything is fine \x1b[2J\x1b[31m" + "x" * 5000
    FakeWorker.says[1] = lambda header, parts: wire.pack(Header(ticket=header.ticket, error=forged), {})
    FakeWorker.says[2] = lambda header, parts: wire.pack(
        Header(ticket=header.ticket), {"values": {forged: torch.ones(1)}, "shared": {}}
    )
    assert federation.ask().ids.tolist() == [0]
    run = RunFolder(tmp_path / "run")
    run.folder.mkdir()
    for line in federation.log:
        run.log(line)
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert len(lines) == 2 and all(line.isprintable() and len(line) < 600 for line in lines)
    assert all("round 1: client" in line for line in lines)


@pytest.mark.parametrize(
    "answer", [b"", b"\x00" * 50, b"PK\x03\x04", wire.pack(Header(ticket=1), {"own": {"x": torch.ones(1)}})]
)
def test_an_answer_that_is_no_message_is_an_offence(federation, answer):
    FakeWorker.says[1] = lambda header, parts: answer
    assert federation.ask(quorum=0.5).ids.tolist() == [0, 2]
    assert list(federation.guard.end_round(1)["offences"]) == ["openmoji"]


@pytest.mark.parametrize("ticket", [3, 5])
def test_an_answer_to_another_request_is_an_offence(federation, ticket):
    """Read as any engine reads answers; loopback itself passes over such ones."""
    answer = wire.pack(Header(ticket=ticket), {"values": {"n": torch.ones(1)}, "shared": {}})
    assert federation.engine.read(1, answer, Header("train", 1, 0, ticket=4)) is None
    assert "another request" in federation.guard.end_round(1)["offences"]["openmoji"]


def test_the_server_writes_down_why_a_client_refused(federation, tmp_path):
    FakeWorker.says[1] = lambda header, parts: wire.pack(Header(ticket=header.ticket, error="no room"), {})
    federation.ask(quorum=0.5)
    assert {e.site: e.refused for e in entries(tmp_path / RECEIVED)} == {
        "noto": "",
        "openmoji": "no room",
        "twemoji": "",
    }


def test_frames_are_limited_by_what_is_expected(federation):
    """Not by four gigabytes: a head of 5 kB comes back, so a frame of a megabyte is not even read."""
    federation.ask()
    limits = {worker.limit for worker in federation.engine.workers.values()}
    head = federation.method.initial["head"]
    assert all(head.numel() * 4 < limit < head.numel() * 4 + (1 << 17) for limit in limits)


@pytest.fixture
def first_client(images, tmp_path):
    """The folder of a client, and what it is sent first."""
    setup = small_setup(images, rounds=3)
    planned = PlannedRun(setup, Pools().load(setup))
    method, federation = planned.method, planned.federation
    guard = Guard(method, federation.names, np.diff(federation.data.bounds, axis=1), {})
    engine = Loopback(Job(setup, method, federation, federation.data, tmp_path, print, guard))
    return engine.folders[0], method.init(3).message()


def test_an_answer_that_is_an_error_is_in_the_ledger(first_client, monkeypatch):
    """Its bytes left, too: of a step that a client does not know, and of one that breaks."""
    folder, message = first_client
    client = SiteClient(folder)

    def answer(step: str, round: int) -> bytes:
        return client.answer(*wire.unpack(wire.pack_message(message, Header(step, round, 0, 1))))

    def broken(*given):
        raise ValueError("the disk is on fire")

    frames = [answer("upload-everything", 1), answer("score", 2)]
    monkeypatch.setattr(client, "reply", broken)
    frames.append(answer("train", 3))
    lines = list(ledger.entries(folder / ledger.SENT))
    assert [(e.step, e.round) for e in lines] == [("upload-everything", 1), ("score", 2), ("train", 3)]
    assert "where the plan has none" in lines[0].refused and lines[1].refused == ""
    assert lines[2].refused == "ValueError: the disk is on fire"
    assert [e.sha256 for e in lines] == [hashlib.sha256(frame).hexdigest() for frame in frames]


def test_a_process_that_comes_back_late_writes_nothing(first_client):
    folder, message = first_client
    early, late = (wire.unpack(wire.pack_message(message, Header("train", r, 0, 1))) for r in (1, 2))
    paused = SiteClient(folder)
    paused.answer(*early)
    later = SiteClient(folder)  # the server started another process in the meantime
    expected = later.answer(*late)
    rows = later.engine.rows.read(np.array([0]), 2)
    assert "another process has taken over" in wire.unpack(paused.answer(*early))[0].error
    same(rows, later.engine.rows.read(np.array([0]), 2))
    same(*(wire.unpack(frame)[1]["shared"] for frame in (later.answer(*late), expected)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="elsewhere the end of its channel ends a client")
def test_a_client_ends_with_its_server():
    client = (
        "import os\nparent = os.getppid()\nfrom fedvlm.federation.worker import end_after\n"
        "print('up', flush=True)\nend_after(parent)"
    )
    server = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {client!r}], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not runs(pid)


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # a process that nobody waits for is still listed
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
