"""How long commands take from beginning to end, and for what: `python benchmarks/journey.py` (`--small`: to try it).

commands  five `fedvlm run` in processes of their own, one after the other with one feature store, a random CLIP of
          ViT-B/16's size and the embedded emoji. Seconds by phase are those of each run's record (fedvlm/system/timing.py):
          what the main thread waited for. first: by how much the first round took longer than the median of the later
          ones, which is mostly compiling. other: the interpreter's start and end, and what has no phase.
jpeg      a folder of synthetic 400 × 300 JPEGs, encoded in float32 and in bfloat16, beside the two floors measured in the
          same run: decoding and resizing alone, in one process per core, and the model alone on prepared pixels.
cpu       mini-clip on one core and on all (benchmarks/ahead.py), the floor by its products, and `fedvlm demo` with an
          empty store. Meaningful on a quiet machine.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from ahead import rate_together
from PIL import Image
from roofline import random_clip, save_clip

from fedvlm import backbones
from fedvlm.backbones.base import Precision, in_precision
from fedvlm.backbones.hf import Clip
from fedvlm.data.encoding import GPU_BATCH, PIECE
from fedvlm.data.images import decode
from fedvlm.data.source import open_source
from fedvlm.data.store import features
from fedvlm.system import console
from fedvlm.system.machine import cores
from fedvlm.towers.products import plain_linear
from fedvlm.training.folder import RunFolder

COMMANDS = {
    "zero-shot": ["zero-shot"],
    "promptfl": ["promptfl", "rounds=10", "precision=half"],
    "focoop": ["focoop", "rounds=5"],
    "feddtl": ["feddtl", "rounds=5"],
    "tower": ["fedavg", "on=tower", "rounds=2"],
}
SMALL = ["classes=bird,bug,fruit,flower", "domains=2"]
PHASES = ("import", "load", "decode", "encode", "rounds", "evaluate", "write")
SIZES = {  # text and vision: width, layers, heads; pixels; dimensions
    False: ((512, 12, 8), (768, 12, 12), 224, 512),
    True: ((64, 3, 2), (64, 3, 2), 32, 64),
}
ORIGINALS = 64  # different pictures in the folder of JPEGs; a comment in each file makes all files different
FEW = 256  # images that each process decodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help="commands, jpeg, cpu; none named: all")
    parser.add_argument("--images", type=int, default=20_000, help="JPEGs")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    wanted = args.parts or ["commands", "jpeg", "cpu"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{device}, {cores()} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as made:
        home = Path(made)
        os.environ |= {"FEDVLM_CACHE": str(home / "cache"), "FEDVLM_RUNS": str(home / "runs")}
        model = write_clip(home / "clip", args.small)
        if "commands" in wanted:
            commands(home, model, args.small)
        if "jpeg" in wanted:
            jpegs(home, model, 200 if args.small else args.images)
        if "cpu" in wanted:
            on_cpu(home, args.small)


def write_clip(folder: Path, small: bool) -> Path:
    """A folder with random weights, and mini-clip's tokenizer."""
    folder.mkdir()
    return save_clip(random_clip(*SIZES[small]), folder)


class Took(NamedTuple):
    wall: float
    cpu: float


@contextmanager
def stopwatch(into: list[Took]) -> Iterator[None]:
    """Of the processes that end inside."""
    began, busy = time.perf_counter(), os.times()
    yield
    now = os.times()
    cpu = now.children_user + now.children_system - busy.children_user - busy.children_system
    into.append(Took(time.perf_counter() - began, cpu))


def fedvlm(*words: str) -> Took:
    took: list[Took] = []
    with stopwatch(took):
        subprocess.run([sys.executable, "-m", "fedvlm", *words], check=True, stdout=subprocess.DEVNULL)
    return took[0]


def commands(home: Path, model: Path, small: bool) -> None:
    rows = []
    for name, words in COMMANDS.items():
        words = [*words, *(SMALL + ["candidates=200"] * (name == "focoop") if small else [])]
        out = home / "runs" / name
        took = fedvlm("run", *words, f"backbone={model}", f"out={out}")
        run = RunFolder(out)
        phases = run.record.finished.phases
        shown = [f"{phases.get(phase, 0.0):.1f}" for phase in PHASES]
        each = [r["seconds"] for r in run.rounds() if r["round"]]
        first = f"{each[0] - statistics.median(each[1:]):.1f}" if len(each) > 1 else ""
        rest = took.wall - sum(phases.values())
        outside = took.wall - phases.get("rounds", 0.0)
        a_round = f"{phases.get('rounds', 0.0) / len(each):.2f}" if each else ""
        totals = [f"{took.wall:.1f}", f"{took.cpu:.1f}"]
        rows.append([name, *totals, *shown, f"{rest:.1f}", first, f"{outside:.1f}", a_round])
    print(
        "required on an H200: zero-shot 8 s; promptfl, focoop and feddtl 12 s outside their rounds; a tower round 4 s"
    )
    console.rows(["command", "wall", "CPU", *PHASES, "other", "first", "outside rounds", "a round"], rows)


def write_jpegs(folder: Path, count: int) -> Path:
    """Two classes of smooth noise, as large as photographs of that size are."""
    draw, originals = np.random.default_rng(0), []
    for _ in range(min(ORIGINALS, count)):
        noise = Image.fromarray(draw.integers(0, 256, (38, 50, 3), np.uint8)).resize(
            (400, 300), Image.Resampling.BICUBIC
        )
        file = io.BytesIO()
        noise.save(file, "JPEG", quality=90)
        originals.append(file.getvalue())
    for k in range(count):
        to = folder / "ab"[k % 2] / f"{k:06}.jpg"
        to.parent.mkdir(parents=True, exist_ok=True)
        data = originals[k % len(originals)]
        to.write_bytes(data[:2] + b"\xff\xfe\0\x0a%08d" % k + data[2:])  # a comment, after the start of the image
    return folder


def jpegs(home: Path, model: Path, count: int) -> None:
    folder = write_jpegs(home / "jpeg", count)
    limit = rate_together(decode_some, cores(), folder, model)
    print(f"decoding and resizing alone, {cores()} processes: {limit:,.0f} images/s")
    rows = []
    for precision, required in (("full", 1000), ("half", 2500)):
        rate, alone = probed(home, folder, model, precision)
        floor = min(limit, alone)
        verdict = "" if not torch.cuda.is_available() else "yes" if rate >= min(required, limit) else "no"
        shown = [f"{x:,.0f}" for x in (rate, alone, required)]
        rows.append([precision, *shown[:2], f"{rate / floor:.2f}", shown[2], verdict])
    columns = ["precision", "images/s", "model alone", "of the lower floor", "required (or decoding)", "reached"]
    console.rows(columns, rows)


def decode_some(k: int, barrier, results, folder: Path, model: Path) -> None:  # type: ignore[no-untyped-def]
    """Images per second of this process, without a model and without one lock for all."""
    torch.set_num_threads(1)
    clip = loaded(model)
    paths = sorted(folder.rglob("*.jpg"))[k :: cores()][:FEW]
    clip.prepare(decode(paths[0].read_bytes()), "raw")
    barrier.wait(240)
    began = time.perf_counter()
    for path in paths:
        clip.prepare(decode(path.read_bytes()), "raw")
    results.put(len(paths) / (time.perf_counter() - began))


def loaded(model: Path) -> Clip:
    found = backbones.load(str(model))
    assert isinstance(found, Clip)
    return found


def probed(home: Path, folder: Path, model: Path, precision: Precision) -> tuple[float, float]:
    """Images per second from the folder to stored rows, and of the model alone; the model is loaded before."""
    clip = in_precision(loaded(model), precision)
    assert isinstance(clip, Clip)
    alone = model_rate(clip)
    source = open_source(str(folder))
    os.environ["FEDVLM_CACHE"] = str(home / f"cache-{precision}")
    began = time.perf_counter()
    features(source, clip, view="raw")
    return len(source.items) / (time.perf_counter() - began), alone


def model_rate(clip: Clip) -> float:
    """Images per second of the model alone; on a CPU of one core, times their number."""
    on_gpu, threads = clip.device.type == "cuda", torch.get_num_threads()
    size, batch = int(clip.vision_config["image_size"]), GPU_BATCH if on_gpu else PIECE
    pixels = list(torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8))
    torch.set_num_threads(1)
    with clip.computing():
        clip.embeddings(pixels).cpu()  # type: ignore[arg-type]
        began, times = now(clip), 0
        while now(clip) - began < 2:
            for _ in range(4):
                found = clip.embeddings(pixels)  # type: ignore[arg-type]
            found.cpu()
            times += 4
        took = now(clip) - began
    torch.set_num_threads(threads)
    return times * batch / took * (1 if on_gpu else threads)


def now(clip: Clip) -> float:
    """On a CPU, where others may compute beside this, of the process."""
    return time.perf_counter() if clip.device.type == "cuda" else time.process_time()


def on_cpu(home: Path, small: bool) -> None:
    here = Path(__file__).parent
    call = [sys.executable, str(here / "ahead.py"), "--data", "emoji", "--images", "64" if small else "512"]
    subprocess.run(call, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    floor, rate, plain = product_floor()
    os.environ |= {"FEDVLM_CACHE": str(home / "cache-demo"), "CUDA_VISIBLE_DEVICES": ""}
    words = ["rounds=1", "seeds=50", "unseen=noto"] if small else []
    took = fedvlm("demo", f"out={home / 'demo'}", *words)
    print(
        f"one core multiplies at {rate / 1e9:.0f} GFLOP/s (F.linear at {plain / 1e9:.0f}): the emoji's products alone take "
        f"{floor:.0f} s on all cores"
    )
    print(
        f"fedvlm demo {' '.join(words)}: {took.wall:.0f} s, {took.cpu:.0f} CPU-seconds (required: 40 s on 2 quiet cores)"
    )


def product_floor() -> tuple[float, float, float]:
    """Seconds of mini-clip's matrix products for all emoji on all cores; FLOP/s of a product on one, and of F.linear's."""
    about = json.loads((backbones.ASSETS / backbones.BUNDLED / "config.json").read_text())["vision_config"]
    width, layers, wide = about["hidden_size"], about["num_hidden_layers"], about["intermediate_size"]
    patches = (about["image_size"] // about["patch_size"]) ** 2
    tokens = 1 + patches
    products = layers * tokens * (4 * width * width + 2 * width * wide + 2 * tokens * width)
    products += patches * 3 * about["patch_size"] ** 2 * width
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    x, weight = torch.randn(PIECE * tokens, width), torch.randn(wide, width)
    rates = []
    for product in (plain_linear, torch.nn.functional.linear):
        product(x, weight)
        began = time.process_time()
        for _ in range(50):
            product(x, weight)
        rates.append(50 * 2 * len(x) * width * wide / (time.process_time() - began))
    torch.set_num_threads(before)
    return 2 * products * len(open_source("emoji").items) / rates[0] / cores(), rates[0], rates[1]


if __name__ == "__main__":
    main()
