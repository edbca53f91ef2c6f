"""Each client a process with a folder of its own; nothing but safetensors bytes crosses. A rehearsal for deployment.

A client that dies, errs, is late or sends something else than agreed is absent from that round's reply, with a line in
the log; it is started again for its next round, and finds its private row where it left it.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from fedvlm.config import Setup
from fedvlm.core import Data, FedvlmError, Params, told
from fedvlm.data.federation import Federation
from fedvlm.engines.wire import HEAD, LIMIT, BadMessage, Expected, check, pack, unpack
from fedvlm.method import Method

MOST = 64  # processes


class Loopback:
    def __init__(
        self,
        setup: Setup,
        method: Method,
        federation: Federation,
        data: Data,
        folder: Path,
        log: Callable[[str], None] = print,
    ):
        if len(federation.names) > MOST:
            raise FedvlmError(
                f"engine=loopback starts a process for each of {len(federation.names)} clients, and {MOST} is the most; "
                "use engine=stacked"
            )
        self.method, self.names, self.folder, self.log = method, federation.names, folder, log
        self.timeout, self.tickets = setup.config.timeout, 0
        self.bent, self.outside = data.corrupted is not None, data.outside is not None
        self.workers: dict[int, Worker] = {}
        for i in range(len(federation.names)):
            prepare(folder / federation.names[i], setup, federation, data, i)

    def run(
        self, step: str, ids: np.ndarray, down: Params, round: int, exchange: int
    ) -> Iterator[tuple[np.ndarray, Params]]:
        self.tickets += 1
        message = pack(down, step=step, round=round, exchange=exchange, ticket=self.tickets)
        deadline = time.monotonic() + self.timeout
        waiting: dict[int, Worker] = {}
        for i in (int(i) for i in np.sort(ids)):
            worker = self.workers.get(i)
            if worker is None or not worker.alive:
                worker = self.workers[i] = Worker(self.folder / self.names[i])
            worker.post(message)
            waiting[i] = worker
        replies = gather(waiting, self.tickets, deadline)
        for i in sorted(waiting):
            reply = replies.get(i)
            try:
                up = self._read(reply, step, down, i)
            except BadMessage as error:
                self.log(f"round {round}: client {self.names[i]} is left out of {step}: {error}")
                if reply is None or not waiting[i].alive:
                    waiting[i].kill()
                continue
            yield np.array([i]), up

    def _read(self, reply: bytes | None, step: str, down: Params, i: int) -> Params:
        if reply is None:
            raise BadMessage(f"no answer within {self.timeout:g} s, or its process ended (see its log.txt)")
        up, about = unpack(reply)
        if not about.get("ok"):
            raise BadMessage(str(about.get("why", "it gave no reason"))[:500])
        check(up, self.expected(step, down), self.names[i])
        return up

    def expected(self, step: str, down: Params) -> Expected:
        """What a client may answer: anything else is refused."""
        kind = torch.get_default_dtype()
        if step == "train":
            shared = {k: ((1, *v.shape), v.dtype) for k, v in down.items() if not told(k)}
            return shared | {k: ((1, *shape), kind) for k, shape in self.method.sends.items()}
        if step == "gauge":
            return {"val": ((1,), kind)}
        if step.startswith("open."):
            return {half: ((1, len(task.classes)), kind) for half, task in self.method.halves.items()}
        if step == "score":
            views = ["shared"] * self.method.generalises + ["personal"] * self.method.personalises
            names = ["count"] + [f"{v}.{what}" for v in views for what in ("score", "loss")]
            bent = [f"{v}.corrupted" for v in views] if self.bent else []
            alone = bent + (self.method.detects if self.outside else [])
            return dict.fromkeys(names, ((1, 3), kind)) | dict.fromkeys(alone, ((1,), kind))
        return dict.fromkeys(self.method.adapter.watches, ((1,), kind))

    def close(self) -> None:
        for worker in self.workers.values():
            worker.stop()


def prepare(folder: Path, setup: Setup, federation: Federation, data: Data, i: int) -> None:
    """What a client needs, in its own folder: its own rows, what everybody may know, and how to build the method."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    low, high = int(data.bounds[i, 0]), int(data.bounds[i, 3])
    task = federation.task
    about: dict[str, Any] = {
        "id": i,
        "bounds": (data.bounds[i] - low).tolist(),
        "method": setup.recipe.path or setup.recipe.name,
        "given": {k: str(v) for k, v in setup.given.items()},
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
    (folder / "client.json").write_text(json.dumps(about))
    public = {"text": task.text, "outside": data.outside}
    public |= {"novel": task.novel.text} if task.novel else {}
    public |= {f"{half}.{k}": v for half, both in data.halves.items() for k, v in zip("xy", both, strict=True)}
    save_file({k: v.contiguous() for k, v in public.items() if v is not None}, folder / "public.safetensors")
    own = {"x": data.x[low:high].contiguous(), "y": data.y[low:high].contiguous()}
    own |= {} if data.corrupted is None else {"corrupted": data.corrupted[low:high].contiguous()}
    save_file(own, folder / "data.safetensors")


class Worker:
    """The server's end of one client's pipe. It never blocks: a client that reads slowly delays nobody else."""

    def __init__(self, folder: Path):
        log = (folder / "log.txt").open("ab")
        call = [sys.executable, "-m", "fedvlm.engines.worker", str(folder)]
        quiet = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(call, stdin=pipe, stdout=pipe, stderr=log, env=quiet, start_new_session=True)
        log.close()
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)
        self.outgoing, self.incoming = b"", bytearray()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def post(self, message: bytes) -> None:
        self.outgoing += HEAD.pack(len(message)) + message

    def push(self) -> None:
        self.outgoing = self.outgoing[os.write(self.stdin, self.outgoing[: 1 << 20]) :]

    def pull(self) -> bytes | None:
        """A whole frame, if one has arrived."""
        data = os.read(self.stdout, 1 << 20)
        if not data:
            raise BrokenPipeError
        self.incoming += data
        return self.frame()

    def frame(self) -> bytes | None:
        if len(self.incoming) < HEAD.size:
            return None
        (size,) = HEAD.unpack(self.incoming[: HEAD.size])
        if size > LIMIT:
            raise BrokenPipeError
        if len(self.incoming) < HEAD.size + size:
            return None
        frame = bytes(self.incoming[HEAD.size : HEAD.size + size])
        del self.incoming[: HEAD.size + size]
        return frame

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.close()
            self.process.wait(5)
        except (subprocess.TimeoutExpired, OSError):
            self.kill()
        self.process.stdout.close()


def gather(workers: dict[int, Worker], ticket: int, deadline: float) -> dict[int, bytes]:
    """The replies to this ticket that arrive in time; late answers to earlier ones are dropped."""
    replies: dict[int, bytes] = {}
    with selectors.DefaultSelector() as ready:
        for i, worker in workers.items():
            ready.register(worker.stdin, selectors.EVENT_WRITE, i)
            ready.register(worker.stdout, selectors.EVENT_READ, i)
        open_ends = dict.fromkeys(workers, 2)
        while len(replies) < len(workers) and any(open_ends[i] for i in workers if i not in replies):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for key, _ in ready.select(left):
                i, worker = key.data, workers[key.data]
                try:
                    if key.fd == worker.stdin:
                        worker.push()
                        if not worker.outgoing:
                            ready.unregister(worker.stdin)
                        continue
                    frame = worker.pull()
                    while frame is not None:
                        if unpack(frame)[1].get("ticket") == ticket:
                            replies[i] = frame
                        frame = worker.frame()
                except (BrokenPipeError, BadMessage):
                    ready.unregister(key.fileobj)
                    open_ends[i] = 0
    return replies
