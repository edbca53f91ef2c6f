"""One run over several processes (workers=): chunks of clients go to whichever worker is free, on the CPU or on the GPUs.

A worker is a `Stacked` engine of its own. The examples are in one file that all of them map into memory, so that they are
there once, and private rows in the run's own file; the shared model is sent once an exchange. Replies come back in the order
that one process would give them in, so that the same chunks (chunk=) give the same bits.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from fedvlm import backbones
from fedvlm.backbones.base import tower_of
from fedvlm.config.config import Setup
from fedvlm.core.adapter import Task
from fedvlm.core.data import Data, Extra
from fedvlm.core.state import Message, Params, Reply
from fedvlm.engines.base import Engine, Job, device_of
from fedvlm.engines.rows import Rows
from fedvlm.engines.stacked import Stacked, in_order
from fedvlm.errors import FedvlmError
from fedvlm.parts.failures import OwnPartFailed, fault_of
from fedvlm.privacy.mechanism import Privacy
from fedvlm.rounds.method import Method
from fedvlm.system import files
from fedvlm.system.child_process import Child, obey
from fedvlm.system.devices import VISIBLE, visible

OUTPUTS = "outputs"  # a request beside the steps
CHUNKS = 2  # for each worker, where nobody says how many clients go together: the last one to finish is waited for
AHEAD = 2  # chunks for each worker that may be done before the one whose turn it is

Arrays = dict[str, np.ndarray]


class Work(NamedTuple):
    """What a worker needs to know."""

    setup: Setup
    task: Task  # without its tower, which is loaded there
    privacy: Privacy | None
    data: Data  # without its tensors
    tensors: Path  # the file that holds them
    rows: Path
    chunk: int
    device: str
    names: tuple[str, ...]

    def engine(self, warn: list[str]) -> Stacked:
        setup = self.setup
        torch.set_num_threads(max(1, setup.config.threads))
        device_of(setup)  # has a GPU compute as it does in one process
        needed = setup.adapter.requires
        tower = tower_of(backbones.load(setup.config.backbone), needed) if needed else None
        novel = self.task.novel._replace(tower=tower) if self.task.novel else None
        task = self.task._replace(tower=tower, novel=novel)
        parts = (setup.adapter, setup.local, setup.merge)
        method = Method.build(*parts, task, setup.config.seed, setup.metrics, self.privacy)
        data = with_tensors(self.data, load_file(self.tensors))
        return Stacked(
            method, data, self.chunk, self.rows, warn.append, self.device, several=True, name=self.names.__getitem__
        )


class SentMessage(NamedTuple):
    """A message, as arrays: tensors would take a file each to be sent."""

    parts: dict[str, Arrays]
    stage: str


class WorkerRequest(NamedTuple):
    step: str
    ids: np.ndarray
    round: int
    exchange: int


class Found(NamedTuple):
    """What a worker answers."""

    replies: list[tuple[np.ndarray, Arrays, Arrays]]  # ids, values, shared
    warnings: list[str]
    error: str = ""


class Spread(Engine):
    def __init__(self, job: Job, chunk: int):
        setup, task, method = job.setup, job.method.task, job.method
        self.data, self.chunk, self.log = job.data, chunk, job.log
        self.fixed = bool(setup.config.chunk)
        self.tensors = job.folder / f"workers{files.PART}"  # a leftover is removed when the run goes on
        self.tensors.touch(0o600)
        save_file(tensors_of(job.data), self.tensors)
        rows = job.folder / "rows.bin"
        Rows(method.newcomer, len(job.data), rows).file.close()  # there before two of them would make it
        bare = task._replace(tower=None, novel=task.novel and task.novel._replace(tower=None))
        data = replace(job.data, x=torch.empty(0), y=torch.empty(0), extras={})
        work = Work(setup, bare, method.privacy, data, self.tensors, rows, chunk, job.device, job.federation.names)
        gpus = visible() if job.device == "cuda" else ()
        count = setup.config.workers
        self.workers = [Child(serve_worker, work, gpus[k % len(gpus)] if gpus else "") for k in range(count)]
        self.busy: dict[Connection, tuple[Child, int]] = {}

    @classmethod
    def open(cls, job: Job) -> Spread:
        return cls(job, 1)

    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
        parts = self.chunks(ids)
        self.send(message)
        waiting, found, turn = deque(range(len(parts))), dict[int, list[Reply]](), 0
        while turn < len(parts):
            free = [w for w in self.workers if w.pipe not in self.busy]
            while free and waiting and waiting[0] < turn + AHEAD * len(self.workers):
                worker, n = free.pop(), waiting.popleft()
                self.busy[worker.pipe] = worker, n
                worker.give(WorkerRequest(step, parts[n], round, exchange))
            for pipe in wait(self.busy):
                assert isinstance(pipe, Connection)
                n = self.busy[pipe][1]
                found[n] = replies_of(self.receive(pipe))
            while turn in found:
                yield from found.pop(turn)
                turn += 1

    def chunks(self, ids: np.ndarray) -> list[np.ndarray]:
        """Cut clients into chunks as chunk= says or, without it, small enough that all workers have something to do."""
        ids = in_order(ids, self.data, self.chunk)
        size = self.chunk if self.fixed else max(1, min(self.chunk, -(-len(ids) // (CHUNKS * len(self.workers)))))
        return [ids[k : k + size] for k in range(0, len(ids), size)]

    def send(self, message: Message) -> None:
        """The message to all workers, after those that are still busy with an earlier exchange, which was given up."""
        for pipe in list(self.busy):
            self.receive(pipe)
        sent = SentMessage({name: arrays(part) for name, part in message.parts().items()}, message.stage)
        for worker in self.workers:
            worker.give(sent)

    def receive(self, pipe: Connection) -> Found:
        """The answer of a busy worker; an error where it died."""
        worker, _ = self.busy.pop(pipe)
        try:
            found: Found = pipe.recv()
        except (EOFError, OSError):
            raise FedvlmError(
                f"a worker of this run died ({worker.end()}); finished rounds are kept: `fedvlm resume` continues, and "
                "fewer workers= need less memory"
            ) from None
        for text in found.warnings:
            self.log(text)
        return found

    def outputs(self, message: Message, round: int) -> Params:
        """Have one worker compute the outputs: each example is computed once."""
        self.send(message)
        first = self.workers[0]
        self.busy[first.pipe] = first, 0
        first.give(WorkerRequest(OUTPUTS, np.empty(0, np.int64), round, 0))
        return replies_of(self.receive(first.pipe))[0].values

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.tensors.unlink(missing_ok=True)


def replies_of(found: Found) -> list[Reply]:
    if found.error:
        raise FedvlmError(found.error)
    return [Reply(ids, tensors(values), tensors(shared)) for ids, values, shared in found.replies]


def serve_worker(pipe: Connection, work: Work, gpu: str) -> None:
    """The worker: answers what comes through the pipe, until it ends. `gpu`: the only one that it sees; "": all."""
    if gpu:
        os.environ[VISIBLE] = gpu
    obey()
    warnings: list[str] = []
    engine: Stacked | None = None
    message = Message({})
    while True:
        try:
            request: SentMessage | WorkerRequest = pipe.recv()
        except (EOFError, OSError):
            return
        if isinstance(request, SentMessage):
            message = Message(**{name: tensors(part) for name, part in request.parts.items()}, stage=request.stage)
            continue
        try:
            engine = engine or work.engine(warnings)
            pipe.send(Found(answer_request(engine, request, message), list(warnings)))
        except OwnPartFailed as error:
            pipe.send(Found([], list(warnings), str(error)))
        except FedvlmError as error:
            pipe.send(Found([], list(warnings), f"a worker of this run failed: {error}"))
        except Exception as error:
            pipe.send(Found([], list(warnings), f"a worker of this run failed: {fault_of(error)}"))
        warnings.clear()


def answer_request(
    engine: Stacked, request: WorkerRequest, message: Message
) -> list[tuple[np.ndarray, Arrays, Arrays]]:
    if request.step == OUTPUTS:
        return [(request.ids, arrays(engine.outputs(message, request.round)), {})]
    found = engine.run(request.step, request.ids, message, request.round, request.exchange)
    return [(reply.ids, arrays(reply.values), arrays(reply.shared)) for reply in found]


def arrays(params: Params) -> Arrays:
    return {k: v.cpu().numpy() for k, v in params.items()}


def tensors(given: Arrays) -> Params:
    return {k: torch.from_numpy(v) for k, v in given.items()}


def tensors_of(data: Data) -> Params:
    found = {"x": data.x, "y": data.y}
    for name, extra in data.extras.items():
        kind = "aligned" if extra.aligned else "public"
        found[f"{kind}/{name}/x"] = extra.x
        found |= {} if extra.y is None else {f"{kind}/{name}/y": extra.y}
    return {k: v.contiguous() for k, v in found.items()}


def with_tensors(data: Data, found: Params) -> Data:
    extras = {
        name: Extra(found[key], found.get(f"{kind}/{name}/y"), kind == "aligned")
        for key in found
        if key.endswith("/x")
        for kind, name in [key.removesuffix("/x").split("/", 1)]
    }
    return replace(data, x=found["x"], y=found["y"], extras=extras)
