"""Flower's half of benchmarks/contest.py, which calls it: FedAvg in Flower's simulation, clients in plain PyTorch.

It runs in a Python with flwr[simulation], psutil and torch; each of Ray's workers imports this file and computes one client
at a time on one core.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def network() -> nn.Sequential:
    convolutions = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*convolutions, nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10))


def normalised(pixels: np.ndarray) -> Tensor:
    mean, deviation = (torch.tensor(v)[:, None, None] for v in (MEAN, DEVIATION))
    return (torch.from_numpy(pixels).float() / 255 - mean) / deviation


@cache
def arrays(folder: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Memory-mapped, once for each process."""
    x, y, bounds = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in ("x", "y", "bounds"))
    return x, y, bounds


def make_client(given: dict[str, float | str]) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        x, y, bounds = arrays(str(given["folder"]))
        low, high = bounds[int(context.node_config["partition-id"]), :2]
        images, labels = normalised(np.array(x[low:high])), torch.from_numpy(np.array(y[low:high]))
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(model.parameters(), float(given["lr"]))
        for rows in torch.randperm(len(images)).split(int(given["batch"])):
            optimiser.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimiser.step()
        answer = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(images)})}
        return Message(content=RecordDict(answer), reply_to=message)

    return app


def accuracy(folder: str, state: dict[str, Tensor]) -> float:
    x, y, bounds = arrays(folder)
    rows = np.concatenate([np.arange(*b[2:]) for b in bounds])
    model = network()
    model.load_state_dict(state)
    right = 0
    with torch.no_grad():
        for part in np.array_split(rows, 20):
            right += int((model(normalised(x[part])).argmax(1) == torch.from_numpy(y[part])).sum())
    return right / len(rows)


def cpu_seconds() -> float:
    """Of this process and all that it started."""
    total = 0.0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.Error:
            pass
    return total


class Strict(FedAvg):
    """Without it, a round in which every client fails is only logged."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        known = list(replies)
        if failed := [reply for reply in known if reply.has_error()]:
            raise SystemExit(f"round {server_round}: {len(failed)} of {len(known)} clients failed: {failed[0].error}")
        return super().aggregate_train(server_round, known)


def main() -> None:
    given = json.loads(sys.argv[1])
    folder, rounds = str(given["folder"]), int(given["rounds"])
    initial = load_file(Path(folder) / "initial.safetensors")
    ours = [f"{layer}.{kind}" for layer in ("conv1", "conv2", "fc1", "fc2") for kind in ("weight", "bias")]
    start = dict(zip(network().state_dict(), [initial[name] for name in ours], strict=True))
    began: list[tuple[float, float]] = []  # of each round: seconds and CPU-seconds
    ended: list[tuple[float, float]] = []
    reached = [0.0]
    server = ServerApp()

    def evaluate(round: int, found: ArrayRecord) -> MetricRecord | None:
        ended.append((time.perf_counter(), cpu_seconds()))
        if round == rounds or round % int(given["evaluate_every"]) == 0:
            reached[0] = accuracy(folder, found.to_torch_state_dict())
        began.append((time.perf_counter(), cpu_seconds()))
        return None

    @server.main()
    def play(grid: Grid, context: Context) -> None:
        strategy = Strict(
            fraction_train=float(given["share"]), fraction_evaluate=0.0, min_available_nodes=int(given["clients"])
        )
        strategy.start(grid, ArrayRecord(start), rounds, evaluate_fn=evaluate)

    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": int(given["cores"])}}
    run_simulation(server, make_client(given), int(given["clients"]), backend_config=backend)
    # the first round starts Ray's workers
    first = min(1, rounds - 1)
    seconds, cpu = (np.mean([ended[k + 1][i] - began[k][i] for k in range(first, rounds)]) for i in range(2))
    found = {"seconds": seconds, "cpu": cpu, "whole": ended[-1][0] - ended[0][0], "accuracy": reached[0]}
    print("found", json.dumps(found))
