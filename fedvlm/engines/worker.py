"""A client in a process of its own: it reads its own folder and its channel, and answers there.
`python -m fedvlm.engines.worker FOLDER`. Its private row stays in its folder.

Each process that opens the folder takes the next epoch. A process that was paused and comes back late finds a later epoch
and writes nothing any more; one whose parent is gone ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from safetensors.torch import load_file, save

from fedvlm import backbones, files, own
from fedvlm.adapters.base import Task
from fedvlm.backbones.base import tower_of
from fedvlm.config import Config, Setup
from fedvlm.core import Data, Extra
from fedvlm.engines.loopback import OUTPUTS
from fedvlm.engines.stacked import Stacked
from fedvlm.engines.wire import Channel, Header, pack, receive, send, to_message, unpack
from fedvlm.errors import FedvlmError
from fedvlm.method import Method
from fedvlm.records import MethodRecord, PartRecord

EPOCH = "epoch"  # file with the number of processes that have opened the folder
LOCK_SECONDS = 60


def serve(folder: Path, requests: Channel, replies: Channel) -> None:
    client = Client(folder)
    while frame := receive(requests):
        ticket = -1
        try:
            header, parts = unpack(frame)
            ticket = header.ticket
            send(replies, client.answer(header, parts))
        except Exception as error:
            send(replies, pack(Header(ticket=ticket, error=f"{type(error).__name__}: {error}"), {}))


class Client:
    def __init__(self, folder: Path):
        about = json.loads((folder / "client.json").read_text(encoding="utf-8"))
        torch.set_num_threads(about["threads"])
        public, mine = load_file(folder / "public.safetensors"), load_file(folder / "data.safetensors")
        records = {home: PartRecord(**part) for home, part in about["parts"].items()}
        codes = {home: own.stored(folder / "code" / home, p.code) for home, p in records.items() if p.code}
        setup = Setup(MethodRecord("client"), Config(), records, codes=codes)
        needed = setup.adapter.requires
        tower = tower_of(backbones.load(about["backbone"]), needed) if needed else None
        task = Task(tuple(about["classes"]), public.get("text"), about["dim"], about["scale"], tower)
        task = task._replace(nouns=tuple(about["nouns"]), phrases=tuple(about["phrases"]))
        method = Method.build(setup.adapter, setup.local, setup.merge, task, about["seed"], setup.metrics)
        extras: dict[str, Extra] = {}
        for home in (public, mine):
            for name in (k.split(".")[1] for k in home if k.startswith("extra.") and k.endswith(".x")):
                extras[name] = Extra(home[f"extra.{name}.x"], home.get(f"extra.{name}.y"), home is mine)
        ids, bounds = np.array([about["id"]]), np.array([about["bounds"]])
        data = Data(mine["x"], mine["y"], bounds, ids, about["seed"], 0, about["rounds"], extras)
        self.folder, self.first, self.warning = folder, about["first"], ""
        with FileLock(folder / ".lock", timeout=LOCK_SECONDS):
            self.epoch = last_epoch(folder) + 1
            files.write(folder / EPOCH, str(self.epoch).encode())
        self.engine = Stacked(method, data, 1, folder / "rows.bin", self._warn, guard=self.only_process)

    def _warn(self, text: str) -> None:
        self.warning = text

    @contextlib.contextmanager
    def only_process(self) -> Iterator[None]:
        """Around every write of the private row."""
        with FileLock(self.folder / ".lock", timeout=LOCK_SECONDS):
            if last_epoch(self.folder) != self.epoch:
                raise FedvlmError("another process has taken over this client's folder")
            yield

    def answer(self, header: Header, parts: dict[str, dict[str, torch.Tensor]]) -> bytes:
        message, done = to_message(header, parts), Header(ticket=header.ticket)
        if header.step == OUTPUTS:
            found = self.engine.outputs(message, header.round)
            if found:
                found["row"] = found["row"] + self.first
            files.write(self.folder / "outputs.safetensors", save(found), private=True)
            return pack(done, {})
        for reply in self.engine.run(header.step, np.array([0]), message, header.round, header.exchange):
            return pack(done, {"values": reply.values, "shared": reply.shared})
        raise ValueError(self.warning)


def last_epoch(folder: Path) -> int:
    path = folder / EPOCH
    return int(path.read_text(encoding="ascii")) if path.exists() else 0


def end_with(parent: int) -> None:
    """A process whose parent was killed is given to another one."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever prints goes to the log, not into a message
    serve(Path(sys.argv[1]), os.fdopen(0, "rb", buffering=0), replies)
