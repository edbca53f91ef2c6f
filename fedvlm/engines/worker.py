"""A client in a process of its own: it reads its own folder and its pipe, and answers on its pipe.
`python -m fedvlm.engines.worker FOLDER`. Its private row stays in its folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from fedvlm import backbones, own
from fedvlm.adapters.base import Task
from fedvlm.backbones.base import tower_of
from fedvlm.config import Config, Setup
from fedvlm.core import Data, Extra
from fedvlm.engines.loopback import OUTPUTS
from fedvlm.engines.stacked import Stacked
from fedvlm.engines.wire import Header, pack, receive, send, to_message, unpack
from fedvlm.method import Method
from fedvlm.records import MethodRecord, PartRecord


def serve(folder: Path, requests: BinaryIO, replies: BinaryIO) -> None:
    client = Client(folder)
    while (frame := receive(requests)) is not None:
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
        if about["novel"]:
            names, phrases = (tuple(about[k]) for k in ("novel", "novel_phrases"))
            task = task._replace(novel=task._replace(classes=names, text=public.get("novel"), phrases=phrases))
        method = Method.build(setup.adapter, setup.local, setup.merge, task, about["seed"], setup.metrics)
        extras: dict[str, Extra] = {}
        for home in (public, mine):
            for name in (k.split(".")[1] for k in home if k.startswith("extra.") and k.endswith(".x")):
                extras[name] = Extra(home[f"extra.{name}.x"], home.get(f"extra.{name}.y"), home is mine)
        ids, bounds = np.array([about["id"]]), np.array([about["bounds"]])
        data = Data(mine["x"], mine["y"], bounds, ids, about["seed"], 0, about["rounds"], extras)
        self.engine = Stacked(method, data, 1, folder / "rows.bin", self._warn)
        self.folder, self.first, self.warning = folder, about["first"], ""

    def _warn(self, text: str) -> None:
        self.warning = text

    def answer(self, header: Header, parts: dict[str, dict[str, torch.Tensor]]) -> bytes:
        message, done = to_message(header, parts), Header(ticket=header.ticket)
        if header.step == OUTPUTS:
            found = self.engine.outputs(message, header.round)
            if found:
                found["row"] = found["row"] + self.first
            save_file(found, self.folder / "outputs.safetensors")
            return pack(done, {})
        for reply in self.engine.run(header.step, np.array([0]), message, header.round, header.exchange):
            return pack(done, {"values": reply.values, "shared": reply.shared})
        raise ValueError(self.warning)


if __name__ == "__main__":
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints goes to the log, not into a message
    serve(Path(sys.argv[1]), sys.stdin.buffer, pipe)
