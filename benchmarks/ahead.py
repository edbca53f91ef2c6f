"""Images encoded per second, from files to stored rows, on one core and on all: `python benchmarks/ahead.py --data FOLDER`.

Each count of cores is a process of its own that may use so many cores (Linux) and torch threads. The floor is the model
alone, on pixels that are prepared already, in one process per core at the same time: cores share caches, memory and power,
so that two of them compute less than twice as fast as one. Meaningful on a quiet machine only: `busy` is CPU time over wall
time, and close to the number of cores where nothing else runs and nothing waits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from fedvlm import backbones
from fedvlm.backbones.hf import Clip
from fedvlm.data.encoding import BATCH, PIECE
from fedvlm.data.source import decode, open_source
from fedvlm.data.store import features
from fedvlm.system import console
from fedvlm.system.machine import cores

SECONDS = 4.0  # that each process computes for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data/pacs", help="a folder of images, or emoji (embedded)")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--probe", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        return print(json.dumps(probe(args.data, args.images, args.probe)))
    rows, first, first_floor = [], 0.0, 0.0
    for count in (1, cores()):
        call = [sys.executable, __file__, "--data", args.data, "--images", str(args.images), "--probe", str(count)]
        with tempfile.TemporaryDirectory() as cache:
            env = os.environ | {"FEDVLM_CACHE": cache, "OMP_NUM_THREADS": str(count)}
            out = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
        wall, cpu = json.loads(out.splitlines()[-1])
        rate, floor = args.images / wall, rate_together(model_alone, count, args.data)
        first, first_floor = first or rate, first_floor or floor
        shown = [f"{rate:.0f}", f"{floor:.0f}", f"{rate / floor:.2f}", f"{cpu / wall:.2f}", f"{rate / first:.2f}"]
        rows.append([str(count), *shown, f"{floor / first_floor:.2f}"])
    columns = ["cores", "images/s", "model alone", "of that", "busy", "× one core", "× one core, model alone"]
    console.rows(columns, rows)


def probe(data: str, images: int, count: int) -> tuple[float, float]:
    """Wall and CPU-seconds of encoding."""
    use_cores(range(count))
    torch.set_num_threads(count)
    source, model = open_source(data), loaded()
    source = replace(source, items=source.items[:images])
    model.images(prepared(data, model)[:PIECE])  # the first call loads the weights
    began, busy = time.perf_counter(), time.process_time()
    features(source, model)
    return time.perf_counter() - began, time.process_time() - busy


def rate_together(compute: Callable[..., None], count: int, *args: object) -> float:
    """What so many processes compute per second together. Each runs compute(number, barrier, results, *args): it waits at
    the barrier until all are ready, and puts its own rate into the results."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(count), spawn.Queue()
    each = [spawn.Process(target=compute, args=(number, barrier, results, *args)) for number in range(count)]
    for process in each:
        process.start()
    rates = [results.get(timeout=300) for _ in each]
    for process in each:
        process.join()
    return float(sum(rates))


def model_alone(core: int, barrier, results, data: str) -> None:  # type: ignore[no-untyped-def]
    """Images per second on one core."""
    use_cores([core])
    torch.set_num_threads(1)
    model = loaded()
    ready = prepared(data, model)
    model.images(ready[:PIECE])
    barrier.wait(240)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        for first in range(0, len(ready), PIECE):
            model.images(ready[first : first + PIECE])
        done += len(ready)
    results.put(done / (time.perf_counter() - began))


def use_cores(numbers: Iterable[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, [mine[n] for n in numbers])


def loaded() -> Clip:
    model = backbones.load("mini-clip")
    assert isinstance(model, Clip)
    return model


def prepared(data: str, model: Clip) -> list[Any]:
    return [model.prepare(decode(d), "embedding") for _, d in itertools.islice(open_source(data).read(), BATCH)]


if __name__ == "__main__":
    main()
