"""Each client in a process with a folder of its own; nothing but safetensors bytes crosses. A rehearsal for deployment.

A client whose process dies is started once more; one that fails, is late or sends something unreadable is absent from that
exchange, with a line in the log, and finds its private row where it left it the next time.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from safetensors.torch import load_file, save

from fedvlm import files
from fedvlm.core import Message, Params, Reply
from fedvlm.engines.base import Engine, Job
from fedvlm.engines.rows import RESTORE, Rows
from fedvlm.engines.wire import Channel, Header, longest_reply, pack_message, receive, send, to_reply, unpack
from fedvlm.errors import BadMessage, FedvlmError
from fedvlm.names import file_name
from fedvlm.schema import Schema
from fedvlm.steps import STEPS

MAX_PROCESSES = 64
OUTPUTS = "outputs"  # not a step: the client writes its logits into its own folder and sends nothing
Inbox = queue.Queue[tuple[int, bytes | None]]  # client, frame; None: its process ended


class Silence(StrEnum):
    """Why there is no reply."""

    DIED = "its process ended twice"
    LATE = "no answer in time"


class Loopback(Engine):
    def __init__(self, job: Job):
        names = job.federation.names
        if len(names) > MAX_PROCESSES:
            raise FedvlmError(
                f"engine=loopback starts a process for each of {len(names)} clients, and {MAX_PROCESSES} is the most; "
                "use engine=stacked"
            )
        if job.federation.pooled:
            raise FedvlmError("partition=pooled has no clients to put into processes; use engine=serial")
        if job.federation.task.novel is not None:
            raise FedvlmError(
                "protocol=base-to-novel scores every model on everybody's test images, which engine=loopback keeps apart; "
                "use engine=stacked"
            )
        self.names, self.guard, self.tickets, config = names, job.guard, 0, job.setup.config
        self.timeout, self.grace, self.quorum = config.timeout, config.grace, config.quorum
        self.folders = [job.folder / "clients" / file_name(name) for name in names]
        self.workers: dict[int, Worker] = {}
        self.inbox: Inbox = queue.Queue()
        for i, folder in enumerate(self.folders):
            prepare(folder, job, i)

    @classmethod
    def open(cls, job: Job) -> Loopback:
        return cls(job)

    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
        for i, answer in self.exchange(step, ids, message, round, exchange).items():
            try:
                if isinstance(answer, Silence):
                    self.guard.failed(
                        i, round, f"{answer} (see {self.folders[i].name}/log.txt)", answer is Silence.LATE
                    )
                    continue
                header, parts = unpack(answer)
                if header.error:
                    self.guard.failed(i, round, header.error)
                else:
                    yield to_reply(i, parts)
            except BadMessage as error:
                self.guard.offence(i, round, str(error))

    def exchange(
        self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int
    ) -> dict[int, bytes | Silence]:
        """Sends a request to each of these clients; their replies in the order of ids. Once a quorum has answered, the
        others have `grace` seconds left."""
        self.tickets += 1
        frame = pack_message(message, Header(step, round, exchange, self.tickets))
        asked = [int(i) for i in np.sort(ids)]
        limits = self.limits(step, asked, message)
        for i in asked:
            self.post(i, frame, limits[i])
        waiting, replies, died = set(asked), dict[int, bytes | Silence](), set[int]()
        deadline, need = time.monotonic() + self.timeout, np.ceil(self.quorum * len(asked))
        while waiting and (left := deadline - time.monotonic()) > 0:
            try:
                i, reply = self.inbox.get(timeout=left)
            except queue.Empty:
                break
            if i not in waiting or (reply is None and self.workers[i].alive):
                continue  # an answer to an earlier request, or the end of an earlier process
            ticket = ticket_of(reply) if reply else None
            if reply is None and i not in died:
                died.add(i)
                self.post(i, frame, limits[i])
            elif reply is None:
                replies[i] = Silence.DIED
            elif ticket is None:  # unreadable: nothing more can be expected of this process
                self.workers[i].kill()
                replies[i] = reply
            elif ticket == self.tickets:
                replies[i] = reply
            waiting -= replies.keys()
            if len(replies) >= need:
                deadline = min(deadline, time.monotonic() + self.grace)
        for i in waiting:
            self.workers[i].kill()
        return {i: replies.get(i, Silence.LATE) for i in asked}

    def post(self, i: int, frame: bytes, limit: int) -> None:
        if i not in self.workers or not self.workers[i].alive:
            self.workers[i] = Worker(i, self.folders[i], self.inbox)
        self.workers[i].limit = limit
        self.workers[i].post(frame)

    def limits(self, step: str, ids: list[int], message: Message) -> dict[int, int]:
        """Bytes that each client's reply may have."""
        schema = self.guard.schema(step) if step in STEPS else Schema({})
        return {i: longest_reply(schema, message.shared, int(self.guard.declared[i, 0])) for i in ids}

    def outputs(self, message: Message, round: int) -> Params:
        """Each client writes its own into its folder; here on one machine they are read from there."""
        found: list[Params] = []
        everybody = np.arange(len(self.names))
        for i, frame in self.exchange(OUTPUTS, everybody, message, round, 1).items():
            path = self.folders[i] / "outputs.safetensors"
            if isinstance(frame, bytes) and ticket_of(frame) and not unpack(frame)[0].error and path.exists():
                found.append(load_file(path))
        found = [one for one in found if one]
        return {k: torch.cat([one[k] for one in found]) for k in (found[0] if found else {})}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.stop()


def ticket_of(frame: bytes) -> int | None:
    """The request that a frame answers; None where the frame is unreadable."""
    try:
        return unpack(frame)[0].ticket
    except BadMessage:
        return None


def prepare(folder: Path, job: Job, i: int) -> None:
    """What a client needs, in its own folder: its own examples, what everybody may know, and how to build the method."""
    files.private_folder(folder)
    if job.method.newcomer and (folder / "client.json").exists() and not (folder / "rows.bin").exists():
        raise FedvlmError(f"{folder / 'rows.bin'} is gone, and with it this client's own model; {RESTORE}")
    Rows(job.method.newcomer, 1, folder / "rows.bin").file.close()
    data, task, setup = job.data, job.federation.task, job.setup
    low, high = int(data.bounds[i, 0]), int(data.bounds[i, 3])
    about = {
        "id": i,
        "first": low,
        "bounds": (data.bounds[i] - low).tolist(),
        "parts": {home: asdict(part) for home, part in setup.parts.items()},
        "classes": task.classes,
        "phrases": task.phrases,
        "nouns": task.nouns,
        "dim": task.dim,
        "scale": task.scale,
        "backbone": setup.config.backbone,
        "seed": data.seed,
        "rounds": data.rounds,
        "threads": max(1, setup.config.threads),
    }
    files.write(folder / "client.json", json.dumps(about), private=True)
    for home, code in setup.codes.items():
        code.write(folder / "code" / home)
    public = {"text": task.text} if task.text is not None else {}
    own = {"x": data.x[low:high], "y": data.y[low:high]}
    for name, extra in data.extras.items():
        target, rows = (own, slice(low, high)) if extra.aligned else (public, slice(None))
        target[f"extra.{name}.x"] = extra.x[rows]
        if extra.y is not None:
            target[f"extra.{name}.y"] = extra.y[rows]
    for name, params in (("public", public), ("data", own)):
        content = save({k: v.contiguous() for k, v in params.items()})
        files.write(folder / f"{name}.safetensors", content, private=True)


class Worker:
    """The server's end of one client's channel. Threads read and write, so that a slow client delays nobody else."""

    def __init__(self, client: int, folder: Path, inbox: Inbox):
        self.limit = 0  # bytes that the next reply may have
        call = [sys.executable, "-m", "fedvlm.engines.worker", str(folder)]
        quiet = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with (folder / "log.txt").open("ab") as log:
            self.process, self.reader, self.writer = connected(call, log, quiet)
        self.outbox: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._read, args=(client, inbox), daemon=True).start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def post(self, frame: bytes) -> None:
        self.outbox.put(frame)

    def _write(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # its process ended, or the channel was closed
            for frame in iter(self.outbox.get, None):
                send(self.writer, frame)
            send(self.writer, b"")  # an empty frame: nothing more will be asked

    def _read(self, client: int, inbox: Inbox) -> None:
        try:
            while (frame := receive(self.reader, lambda: self.limit)) is not None:
                inbox.put((client, frame))
        except (OSError, ValueError):
            self.process.kill()
        except BadMessage:
            inbox.put((client, b""))  # an unreadable answer
            self.process.kill()
        self.process.wait()
        inbox.put((client, None))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.outbox.put(None)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()


def connected(call: list[str], log: IO[bytes], env: dict[str, str]) -> tuple[subprocess.Popen[bytes], Channel, Channel]:
    """A process with its standard input and output as channels: a socket where a process can have one in their place
    (many times as fast as a pipe), else pipes."""
    if os.name != "posix":
        pipe = subprocess.PIPE
        process = subprocess.Popen(call, bufsize=0, stdin=pipe, stdout=pipe, stderr=log, env=env)
        assert process.stdin and process.stdout
        return process, cast(Channel, process.stdout), cast(Channel, process.stdin)
    ours, theirs = socket.socketpair()
    with theirs:
        end = theirs.fileno()
        process = subprocess.Popen(call, stdin=end, stdout=end, stderr=log, env=env, start_new_session=True)
    channel = cast(Channel, ours.makefile("rwb", buffering=0))
    ours.close()  # the channel keeps it open
    return process, channel, channel
