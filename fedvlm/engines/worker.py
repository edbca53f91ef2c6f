"""A client in a process of its own: it reads its own folder and its pipe, and answers on its pipe. `python -m
fedvlm.engines.worker FOLDER`. Its private row stays in its folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import load_file

from fedvlm import backbones
from fedvlm.adapters.base import Task
from fedvlm.backbones.base import towers
from fedvlm.config import resolve
from fedvlm.core import Data, Params
from fedvlm.engines.stacked import Stacked
from fedvlm.engines.wire import pack, receive, send, unpack
from fedvlm.method import Method


def serve(folder: Path, requests: BinaryIO, replies: BinaryIO) -> None:
    client = Client(folder)
    send(replies, pack({}, ready=True))
    while (frame := receive(requests)) is not None:
        try:
            down, about = unpack(frame)
            up = client.answer(down, about)
            send(replies, pack(up, ok=True, ticket=about["ticket"]))
        except Exception as error:
            send(replies, pack({}, ok=False, why=f"{type(error).__name__}: {error}", ticket=about.get("ticket", -1)))


class Client:
    def __init__(self, folder: Path):
        about = json.loads((folder / "client.json").read_text())
        torch.set_num_threads(about["threads"])
        public, own = load_file(folder / "public.safetensors"), load_file(folder / "data.safetensors")
        setup = resolve(about["method"], about["given"])
        tower = towers(backbones.load(about["backbone"]), setup.adapter.needs) if setup.adapter.needs else None
        task = Task(tuple(about["classes"]), public.get("text"), about["dim"], about["scale"], tower)
        task = task._replace(nouns=tuple(about["nouns"]), phrases=tuple(about["phrases"]))
        if about["novel"]:
            names, phrases = (tuple(about[k]) for k in ("novel", "novel_phrases"))
            task = task._replace(novel=task._replace(classes=names, text=public.get("novel"), phrases=phrases))
        method = Method.build(setup.adapter, setup.local, setup.merge, task, about["seed"])
        ids, bounds = np.array([about["id"]]), np.array([about["bounds"]])
        moment = (about["seed"], 0, about["rounds"])
        halves = {k: (public[f"{k}.x"], public[f"{k}.y"]) for k in ("base", "novel") if f"{k}.x" in public}
        data = Data(own["x"], own["y"], bounds, ids, *moment, public.get("outside"), own.get("corrupted"), halves)
        self.engine = Stacked(method, data, 1, folder / "rows.bin", self._warn)
        self.why = ""

    def _warn(self, text: str) -> None:
        self.why = text

    def answer(self, down: Params, about: dict[str, Any]) -> Params:
        step, round, exchange = str(about["step"]), int(about["round"]), int(about["exchange"])
        for _, up in self.engine.run(step, np.array([0]), down, round, exchange):
            return up
        raise ValueError(self.why)


if __name__ == "__main__":
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints goes to the log, not into a message
    serve(Path(sys.argv[1]), sys.stdin.buffer, pipe)
