"""Each client in a process with a folder of its own; nothing but safetensors bytes crosses. A rehearsal for deployment.

A client whose process dies is started once more; one that fails, is late or sends something unreadable is absent from that
exchange, with a line in the log, and finds its private row where it left it the next time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from fedvlm.core.state import Message, Params
from fedvlm.engines.base import Job
from fedvlm.errors import BadMessage, FedvlmError
from fedvlm.federation.frames import connected_process, receive, send
from fedvlm.federation.protocol import Course
from fedvlm.federation.remote import Remote, Silence
from fedvlm.federation.wire import OUTPUTS, OVERHEAD, Header, pack_message, unpack
from fedvlm.federation.worker import ClientRecord, write_folder
from fedvlm.parts.failures import OwnPartFailed
from fedvlm.system.names import file_name

MAX_PROCESSES = 64
Inbox = queue.Queue[tuple[int, bytes | None]]  # client, frame; None: its process ended


class Loopback(Remote):
    def __init__(self, job: Job):
        names = job.federation.names
        if len(names) > MAX_PROCESSES:
            raise FedvlmError(
                f"engine=loopback starts a process for each of {len(names)} clients, and {MAX_PROCESSES} is the most; "
                "use engine=stacked"
            )
        super().__init__(job)
        self.folders = [job.folder / "clients" / file_name(name) for name in names]
        self.workers: dict[int, Worker] = {}
        self.inbox: Inbox = queue.Queue()
        for i, folder in enumerate(self.folders):
            prepare_client(folder, job, i)

    @classmethod
    def open(cls, job: Job) -> Loopback:
        return cls(job)

    def where(self, client: int) -> str:
        return f" (see {self.folders[client].name}/log.txt)"

    def failed(self, client: int, asked: Header, error: str) -> None:
        kind, _, text = error.partition(": ")
        if kind == OwnPartFailed.__name__:  # as with engines in one process: it would fail again
            raise OwnPartFailed(text)
        super().failed(client, asked, error)

    def exchange(self, frames: dict[int, bytes], limits: dict[int, int]) -> dict[int, bytes | Silence]:
        for i, frame in frames.items():
            self.post(i, frame, limits[i])
        waiting, replies, died = set(frames), dict[int, bytes | Silence](), set[int]()
        deadline, need = time.monotonic() + self.timeout, np.ceil(self.quorum * len(frames))
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
                self.post(i, frames[i], limits[i])
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
        return {i: replies.get(i, Silence.LATE) for i in frames}

    def post(self, i: int, frame: bytes, limit: int) -> None:
        if i not in self.workers or not self.workers[i].alive:
            self.workers[i] = Worker(i, self.folders[i], self.inbox)
        self.workers[i].limit = limit
        self.workers[i].post(frame)

    def outputs(self, message: Message, round: int) -> Params:
        """Each client writes its own into its folder; here on one machine they are read from there."""
        found: list[Params] = []
        header, everybody = self.header(OUTPUTS, round, 1), range(len(self.names))
        frames = dict.fromkeys(everybody, pack_message(message, header))
        for i, answer in self.exchange(frames, dict.fromkeys(everybody, OVERHEAD)).items():
            path = self.folders[i] / "outputs.safetensors"
            if self.read(i, answer, header) is not None and path.exists():
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


def prepare_client(folder: Path, job: Job, i: int) -> None:
    """What a client needs, in its own folder."""
    data, task, setup = job.data, job.federation.task, job.setup
    low, high = int(data.bounds[i, 0]), int(data.bounds[i, 3])
    rows = slice(low, high)
    extras = {
        k: e._replace(x=e.x[rows], y=None if e.y is None else e.y[rows]) for k, e in data.extras.items() if e.aligned
    }
    own = replace(
        data,
        x=data.x[rows],
        y=data.y[rows],
        bounds=data.bounds[[i]] - low,
        ids=data.ids[[i]],
        extras=data.extras | extras,
    )
    about = ClientRecord(
        run=job.run,
        name=job.federation.names[i],
        first=low,
        backbone=setup.config.backbone,
        threads=setup.config.threads,
        agreement=job.run,
        course=Course.of(setup.config, job.method, i not in job.federation.unseen),
        clients=len(job.federation.names),
        privacy=job.method.privacy.plain() if job.method.privacy else None,
    )
    write_folder(folder, about, setup, task, own, job.method.newcomer)


class Worker:
    """The server's end of one client's channel. Threads read and write, so that a slow client delays nobody else."""

    def __init__(self, client: int, folder: Path, inbox: Inbox):
        self.limit = 0  # bytes that the next reply may have
        call = [sys.executable, "-m", "fedvlm.federation.worker", str(folder), str(os.getpid())]
        quiet = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with (folder / "log.txt").open("ab") as log:
            self.process, self.reader, self.writer = connected_process(call, log, quiet)
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
