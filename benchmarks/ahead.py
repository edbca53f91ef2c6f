"""Images encoded per second, from files to stored rows, on one core and on all: `python benchmarks/ahead.py --data FOLDER`.

Each count of cores is a process of its own that may use so many cores (Linux) and torch threads. The floor is the model
alone on one core, on pixels that are prepared already, divided by the number of cores. Meaningful on a quiet machine only:
`busy` is CPU time over wall time, and close to the number of cores where nothing else runs and nothing waits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import torch

from fedvlm import backbones, console
from fedvlm.backbones.hf import Clip
from fedvlm.data.encoding import BATCH, PIECE
from fedvlm.data.source import decode, open_source
from fedvlm.data.store import features
from fedvlm.machine import cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data/pacs", help="a folder of images, or emoji (embedded)")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--probe", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        return print(json.dumps(probe(args.data, args.images, args.probe)))
    rows, first = [], 0.0
    for count in (1, cores()):
        call = [sys.executable, __file__, "--data", args.data, "--images", str(args.images), "--probe", str(count)]
        with tempfile.TemporaryDirectory() as cache:
            env = os.environ | {"FEDVLM_CACHE": cache, "OMP_NUM_THREADS": str(count)}
            out = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
        wall, cpu, floor = json.loads(out.splitlines()[-1])
        first = first or wall
        rows.append(
            [str(count), f"{args.images / wall:.0f}", f"{args.images / floor:.0f}", f"{wall / floor:.2f}",
             f"{cpu / wall:.2f}", f"{first / wall:.2f}"]
        )  # fmt: skip
    console.rows(["cores", "images/s", "floor", "× floor", "busy", "× one core"], rows)


def probe(data: str, images: int, count: int) -> tuple[float, float, float]:
    """Wall and CPU-seconds of encoding, and wall-seconds of the model alone."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    torch.set_num_threads(count)
    source, model = open_source(data), backbones.load("mini-clip")
    assert isinstance(model, Clip)
    source = replace(source, items=source.items[:images])
    ready = [model.prepare(decode(d), "embedding") for _, d in itertools.islice(source.read(), BATCH)]
    torch.set_num_threads(1)
    model.images(ready[:PIECE])  # the first call loads the weights
    began = time.perf_counter()
    for first in range(0, len(ready), PIECE):
        model.images(ready[first : first + PIECE])
    floor = (time.perf_counter() - began) / len(ready) * len(source.items) / count
    torch.set_num_threads(count)
    began, busy = time.perf_counter(), time.process_time()
    features(source, model)
    return time.perf_counter() - began, time.process_time() - busy, floor


if __name__ == "__main__":
    main()
