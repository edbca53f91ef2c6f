"""What a GPU gives to whole networks, to several runs and to one run in several processes: `python benchmarks/devices.py`
(`--small`: to try it, also without a GPU; parts by name: tower, runs, workers, retina, text).

tower    rounds of full fine-tuning (a random CLIP of ViT-B/16's size, the embedded emoji), in float32 and in bfloat16,
         with the floor: the FLOPs of training and scoring at the rate of a large product of the same run.
runs     six runs of promptfl, one and three at a time on the same GPU; wall time with the start of all processes.
workers  one run of promptfl with 64 clients in 1, 2 and 4 processes: seconds of a round, wall time, and how far the
         shared parameters are from those of one process.
retina   rounds of a U-Net as large as the paper's (width 64, 384 pixels), in float32 and in bfloat16.
text     rounds of the LSTM with 31 roles. Both on real data where --retina or --roles names it, else on random data of
         the same size; and what one seed would take at this rate: `python benchmarks/tasks.py --seeds 50 …` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from journey import write_clip
from PIL import Image
from roofline import peak_rate
from torch.utils.flop_counter import FlopCounterMode

from fedvlm.config.config import Setup, resolve
from fedvlm.data.pool import Pools
from fedvlm.system import console
from fedvlm.towers import products
from fedvlm.training import train
from fedvlm.training.folder import RunFolder
from fedvlm.training.planned_run import PlannedRun

PARTS = ("tower", "runs", "workers", "retina", "text")
SITES = {"chasedb1": 28, "drive": 40}  # images of the real sites
ROLES = 31
LETTERS = "etaoin shrdlu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help=", ".join(PARTS) + "; none named: all")
    parser.add_argument("--retina", default="", help="a folder of site/image and site/mask")
    parser.add_argument("--roles", default="", help="a .jsonl or .jsonl.gz file of roles and their text")
    parser.add_argument("--profile", action="store_true", help="tower: also what the time of a round goes to")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}", flush=True)
    with tempfile.TemporaryDirectory() as made:
        home = Path(made)
        os.environ |= {"FEDVLM_CACHE": str(home / "cache"), "FEDVLM_RUNS": str(home / "runs")}
        for part in args.parts or PARTS:
            began = time.perf_counter()
            globals()[part](home, args)
            print(f"({part}: {time.perf_counter() - began:.0f} s)\n", flush=True)


def played(home: Path, name: str, method: str, **given: object) -> RunFolder:
    setup = resolve(method, given)
    return train.train(PlannedRun(setup, Pools().load(setup), home / "runs" / name))


def round_seconds(run: RunFolder) -> float:
    """The median without the first, which compiles and warms up."""
    each = [r["seconds"] for r in run.rounds() if r["round"]]
    return statistics.median(each[1:] or each)


def tower(home: Path, args: argparse.Namespace) -> None:
    few: dict[str, object] = {"classes": "bird,bug", "domains": 2} if args.small else {}
    given = {"on": "tower", "backbone": str(write_clip(home / "clip", args.small))} | few
    setup = resolve("fedavg", given)
    planned = PlannedRun(setup, Pools().load(setup))
    method, federation = planned.method, planned.federation
    counts = np.diff(federation.data.bounds, axis=1).sum(0)
    trained, everything = int(counts[0]), int(counts.sum())
    # torch's counter does not know oneDNN's operator
    with patch.object(products, "onednn", lambda: None), FlopCounterMode(display=False) as counter, torch.no_grad():
        method.model.logits({k: v[None] for k, v in method.initial.items()}, federation.data.x[:1][None])
    forward = counter.get_total_flops()
    validated = 2 * int(counts[1])  # before and after training
    flops = forward * (3 * trained + validated + len(method.views) * everything)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    peak = peak_rate(512 if where == "cpu" else 8192, where)
    print(f"{len(federation.names)} clients, {trained:,} training images, {flops / 1e12:.3g} TFLOP a round", end=" ")
    print(f"with scoring; floor {flops / peak:.2f} s in bfloat16; required on an H200: 4 s")
    rows = []
    for precision, rounds in (("full", 2), ("half", 4)):
        run = played(home, f"tower-{precision}", "fedavg", **given, precision=precision, rounds=rounds)
        each = [r["seconds"] for r in run.rounds() if r["round"]]
        seconds = round_seconds(run)
        rows.append([precision, " ".join(f"{s:.2f}" for s in each), f"{trained / seconds:,.0f}"])
        rows[-1].append(f"{100 * flops / peak / seconds:.0f} %")
    console.rows(["precision", "seconds a round", "images/s", "of the floor"], rows)
    if args.profile:
        profile(home, given | {"precision": "half", "rounds": 2})


def profile(home: Path, given: dict[str, object]) -> None:
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with torch.profiler.profile(activities=kinds) as found:
        played(home, "profiled", "fedavg", **given)
    by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    for key in dict.fromkeys((by, "self_cpu_time_total")):
        print(found.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=60))


def runs(home: Path, args: argparse.Namespace) -> None:
    few = ["classes=bird,bug", "domains=2"] if args.small else ["precision=half"]
    words = ["run", "promptfl", f"rounds={1 if args.small else 10}", "seeds=1,2,3,4,5,6", *few]
    fedvlm("run", "promptfl", "rounds=0", *few, f"out={home / 'runs' / 'first'}")  # encodes
    rows = []
    for jobs in (1, 3) if args.small else (1, 3, 0):
        seconds = fedvlm(*words, f"jobs={jobs}", f"out={home / 'runs' / f'jobs-{jobs}'}")
        rows.append([str(jobs or "as memory allows"), f"{seconds:.1f}"])
    console.rows(["runs at a time", "wall seconds of six"], rows)


def fedvlm(*words: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "fedvlm", *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def workers(home: Path, args: argparse.Namespace) -> None:
    given: dict[str, object] = {"partition": "iid", "clients": 64, "rounds": 6, "precision": "half", "chunk": 8}
    if args.small:
        given |= {"clients": 8, "rounds": 3, "precision": "full", "chunk": 1, "classes": "bird,bug", "domains": 3}
    rows, before = [], None
    for count in (1, 2) if args.small else (1, 2, 4):
        began = time.perf_counter()
        run = played(home, f"workers-{count}", "promptfl", **given, workers=count)
        wall = time.perf_counter() - began
        shared = (run.load() or [None])[0].shared
        before = before or shared
        apart = max(float((shared[k] - before[k]).abs().max()) for k in shared)
        rows.append([str(count), f"{round_seconds(run):.2f}", f"{wall:.1f}", f"{apart:.1e}"])
    console.rows(["workers", "seconds a round", "wall", "largest difference"], rows)


def retina(home: Path, args: argparse.Namespace) -> None:
    size, width = (64, 8) if args.small else (384, 64)
    data = args.retina or str(random_sites(home / "sites", size, 4 if args.small else 1))
    given = {"on": "unet", "data": data, "backbone": f"pixels:{size}", "width": width, "rounds": 3}
    rows = []
    for precision in ("full", "half"):
        run = played(home, f"retina-{precision}", "fedavg", **given, precision=precision)
        rows.append([precision, *estimate(run, resolve("fedavg", {"on": "unet"}), targets=2)])
    console.rows(["precision", "seconds a round", "rounds", "hours, one seed of one method"], rows)


def text(home: Path, args: argparse.Namespace) -> None:
    data = args.roles or str(random_roles(home / "roles.jsonl", 2_000 if args.small else 0))
    given = {"on": "lstm", "data": data, "stride": 16, "rounds": 2} | ({"hidden": 16} if args.small else {})
    run = played(home, "text", "fedavg", **given)
    row = estimate(run, resolve("fedavg", {"on": "lstm"}), targets=1)
    console.rows(["seconds a round", "rounds", "hours, one seed of one method"], [row])


def estimate(run: RunFolder, paper: Setup, targets: int) -> list[str]:
    """With scoring in every round; `targets`: domains that are held out in turn."""
    seconds, rounds = round_seconds(run), paper.config.rounds
    return [f"{seconds:.2f}", f"{targets} × {rounds}", f"{targets * rounds * seconds / 3600:.2f}"]


def random_sites(folder: Path, size: int, every: int) -> Path:
    draw = np.random.default_rng(0)
    for site, count in SITES.items():
        for kind, shape in (("image", (size, size, 3)), ("mask", (size, size))):
            (folder / site / kind).mkdir(parents=True)
            for k in range(0, count, every):
                pixels = draw.integers(0, 2, shape) * 255
                Image.fromarray(pixels.astype(np.uint8)).save(folder / site / kind / f"{k:02d}.png")
    return folder


def random_roles(path: Path, length: int) -> Path:
    """Lengths as those of the largest real roles, from 60,000 characters down to 15,000; or all the same."""
    draw = np.random.default_rng(0)
    lengths = [length or round(60_000 / 4 ** (k / (ROLES - 1))) for k in range(ROLES)]
    texts = ["".join(draw.choice(list(LETTERS), n)) for n in lengths]
    lines = [json.dumps({"play": "random", "role": f"role {k}", "text": t}) for k, t in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n")
    return path


if __name__ == "__main__":
    main()
