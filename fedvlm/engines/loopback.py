"""Each client in a process with a folder of its own; nothing but safetensors bytes crosses. A rehearsal for deployment.

A client that dies, fails, is late or sends something else than agreed is absent from that exchange, with a line in the log;
it is started again for the next one and finds its private row where it left it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from fedvlm import steps
from fedvlm.core import Message, Params, Reply
from fedvlm.engines.base import Engine, Job
from fedvlm.engines.wire import BadMessage, Header, checked, pack_message, receive, send, unpack
from fedvlm.errors import FedvlmError
from fedvlm.names import file_name

MAX_PROCESSES = 64
OUTPUTS = "outputs"  # not a step: the client writes its logits into its own folder and sends nothing
Inbox = queue.Queue[tuple[int, bytes | None]]  # client, frame; None: its process ended


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
        self.method, self.names, self.log = job.method, names, job.log
        self.timeout, self.tickets, self.extras = job.setup.config.timeout, 0, list(job.data.extras)
        self.folders = [job.folder / "clients" / file_name(name) for name in names]
        self.workers: dict[int, Worker] = {}
        self.inbox: Inbox = queue.Queue()
        for i, folder in enumerate(self.folders):
            prepare(folder, job, i)

    @classmethod
    def open(cls, job: Job) -> Loopback:
        return cls(job)

    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
        schema = steps.find(step).schema(self.method, self.extras)
        for i, frame in self.exchange(step, ids, message, round, exchange).items():
            try:
                if frame is None:
                    raise BadMessage(
                        f"no answer within {self.timeout:g} s, or its process ended (see {self.folders[i].name}/log.txt)"
                    )
                header, parts = unpack(frame)
                if header.error:
                    raise BadMessage(header.error[:500])
                yield checked(i, self.names[i], parts, schema, message.shared)
            except BadMessage as error:
                self.log(f"round {round}: client {self.names[i]} is left out of {step}: {error}")

    def exchange(
        self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int
    ) -> dict[int, bytes | None]:
        """Sends a request to each of these clients; their replies in the order of ids, None where there is none in time."""
        self.tickets += 1
        frame = pack_message(message, Header(step, round, exchange, self.tickets))
        deadline = time.monotonic() + self.timeout
        asked = [int(i) for i in np.sort(ids)]
        for i in asked:
            if i not in self.workers or not self.workers[i].alive:
                self.workers[i] = Worker(i, self.folders[i], self.inbox)
            self.workers[i].post(frame)
        waiting, replies = set(asked), dict[int, bytes]()
        while waiting and (left := deadline - time.monotonic()) > 0:
            try:
                i, reply = self.inbox.get(timeout=left)
            except queue.Empty:
                break
            if reply is None:
                if not self.workers[i].alive:  # not an earlier process of this client
                    waiting.discard(i)
                continue
            ticket = ticket_of(reply)
            if ticket == self.tickets:
                replies[i] = reply
                waiting.discard(i)
            elif ticket is None:  # unreadable: nothing more can be expected of this process
                self.workers[i].kill()
                waiting.discard(i)
            # any other ticket: a late answer to an earlier request, which is dropped
        for i in waiting:
            self.workers[i].kill()
        return {i: replies.get(i) for i in asked}

    def outputs(self, message: Message, round: int) -> Params:
        """Each client writes its own into its folder; here on one machine they are read from there."""
        found: list[Params] = []
        everybody = np.arange(len(self.names))
        for i, frame in self.exchange(OUTPUTS, everybody, message, round, 1).items():
            path = self.folders[i] / "outputs.safetensors"
            if frame is not None and not unpack(frame)[0].error and path.exists():
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
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
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
        "novel": task.novel.classes if task.novel else (),
        "novel_phrases": task.novel.phrases if task.novel else (),
    }
    (folder / "client.json").write_text(json.dumps(about), encoding="utf-8")
    for home, code in setup.codes.items():
        code.write(folder / "code" / home)
    public = {k: t.text for k, t in (("text", task), ("novel", task.novel)) if t is not None and t.text is not None}
    own = {"x": data.x[low:high], "y": data.y[low:high]}
    for name, extra in data.extras.items():
        target, rows = (own, slice(low, high)) if extra.aligned else (public, slice(None))
        target[f"extra.{name}.x"] = extra.x[rows]
        if extra.y is not None:
            target[f"extra.{name}.y"] = extra.y[rows]
    save_file({k: v.contiguous() for k, v in public.items()}, folder / "public.safetensors")
    save_file({k: v.contiguous() for k, v in own.items()}, folder / "data.safetensors")


class Worker:
    """The server's end of one client's pipes. Threads read and write, so that a slow client delays nobody else."""

    def __init__(self, client: int, folder: Path, inbox: Inbox):
        call = [sys.executable, "-m", "fedvlm.engines.worker", str(folder)]
        quiet = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        pipe = subprocess.PIPE
        with (folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                call, stdin=pipe, stdout=pipe, stderr=log, env=quiet, start_new_session=True
            )
        self.outbox: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._read, args=(client, inbox), daemon=True).start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def post(self, frame: bytes) -> None:
        self.outbox.put(frame)

    def _write(self) -> None:
        assert self.process.stdin
        try:
            for frame in iter(self.outbox.get, None):
                send(self.process.stdin, frame)
            self.process.stdin.close()
        except (OSError, ValueError):  # its process ended, or the pipe was closed
            pass

    def _read(self, client: int, inbox: Inbox) -> None:
        assert self.process.stdout
        try:
            while (frame := receive(self.process.stdout)) is not None:
                inbox.put((client, frame))
        except (OSError, ValueError, BadMessage):
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
