"""On a GPU, in one run: our seconds a round beside the plain PyTorch loop of a good researcher, and the floor.

    python benchmarks/speed.py gpu [--out FILE] [--only tower,prompts,start] [--compile]

tower    full fine-tuning of a ViT-B/16 (random weights), 7 clients, 1,939 images a round, batch 32, SGD: as shipped (scored
         on validation and test images every round), bare (scored in the last round only), the loop (images on the GPU, no
         fedvlm in it), with --compile also by torch.compile, whose compilation is told apart; bfloat16 and float32.
         The floor is the time of the same matrix products, forward and backward, at the rate of large ones.
prompts  PromptFL and FOCoOp, 10 clients × 160 images, 100 classes, batch 32; the features are stored before.
start    `fedvlm run zero-shot` of the emoji in a fresh process with an empty store, and `import torch` alone.

Medians of the rounds after the first; GiB: the most that torch had allocated.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from roofline import random_clip, save_clip
from torch.nn import functional as F

import fedvlm
from fedvlm.backbones import load

CLIENTS, IMAGES, CLASSES, BATCH, ROUNDS, RATE = 7, 277, 10, 32, 3, 1e-5
WIDTH, LAYERS, TOKENS, DIM = 768, 12, 197, 512  # of ViT-B/16


def vit_b_16(folder: Path) -> Path:
    return save_clip(random_clip((512, LAYERS, 8), (WIDTH, LAYERS, 12), 224, DIM), folder)


def made(clients: int, each: int, classes: int) -> object:
    """Random images, 60 % of each client's for training."""
    draw = np.random.default_rng(0)
    count = clients * each
    images = draw.integers(0, 256, (count, 224, 224, 3), np.uint8)
    names = [f"class {k}" for k in range(classes)]
    return fedvlm.dataset(
        images, np.arange(count) % classes, clients=[f"c{k % clients}" for k in range(count)], classes=names
    )


def ours(method: str, data: object, place: Path, **given: object) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats()
    run = fedvlm.run(method, data=data, rounds=ROUNDS, out=str(place), device="cuda", **given)  # type: ignore[arg-type]
    seconds = [r["seconds"] for r in run.files.rounds()][2:]
    return {"seconds": statistics.median(seconds), "GiB": torch.cuda.max_memory_allocated() / 2**30}


def loop(backbone: str, half: bool, compiled: bool) -> dict[str, float]:
    """What a good researcher would write: images and labels on the GPU, a fused optimiser, a copy of the model a client."""
    torch.cuda.reset_peak_memory_stats()
    torch.backends.cuda.matmul.allow_tf32 = False
    frozen = load(backbone)
    tower = copy.deepcopy(frozen.image_tower).cuda().requires_grad_(True)  # type: ignore[attr-defined]
    start = {k: v.clone() for k, v in tower.state_dict().items()}
    text = F.normalize(torch.randn(CLASSES, DIM, device="cuda"), dim=-1)
    images = torch.randint(0, 256, (CLIENTS, IMAGES, 3, 224, 224), dtype=torch.uint8, device="cuda")
    labels = torch.randint(0, CLASSES, (CLIENTS, IMAGES), device="cuda")
    forward: Callable[..., torch.Tensor] = torch.compile(tower) if compiled else tower  # type: ignore[assignment]
    taken, began = [], time.perf_counter()
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began_round = time.perf_counter()
        mean = {k: torch.zeros_like(v) for k, v in start.items()}
        for client in range(CLIENTS):
            tower.load_state_dict(start)
            optimiser = torch.optim.SGD(tower.parameters(), RATE, fused=True)
            order = torch.randperm(IMAGES, device="cuda")
            for rows in order.split(BATCH):
                with torch.autocast("cuda", torch.bfloat16) if half else nullcontext():
                    z = forward(images[client, rows])[0]
                loss = F.cross_entropy(20.0 * F.normalize(z.float(), dim=-1) @ text.T, labels[client, rows])
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
            for k, v in tower.state_dict().items():
                mean[k] += v / CLIENTS
        start = mean
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began_round)
    first = time.perf_counter() - began - sum(taken[1:])
    return {"seconds": statistics.median(taken[1:]), "first": first, "GiB": torch.cuda.max_memory_allocated() / 2**30}


def floor(half: bool) -> float:
    """Seconds of the round's matrix products at the rate of a large one of the same kind."""
    dtype = torch.bfloat16 if half else torch.float32
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(8):
            a @ b
        torch.cuda.synchronize()
        rate = 8 * 2 * 8192**3 / (time.perf_counter() - began)
    image = LAYERS * 2 * TOKENS * (12 * WIDTH**2 + 2 * TOKENS * WIDTH)
    return 3 * CLIENTS * IMAGES * image / rate


def tower(place: Path, compiled: bool) -> dict[str, object]:
    backbone = str(vit_b_16(place))
    data = made(CLIENTS, IMAGES * 10 // 6, CLASSES)
    found: dict[str, object] = {}
    for half in (True, False):
        kind = "bfloat16" if half else "float32"
        keys = {
            "backbone": backbone,
            "adapter": "tower",
            "batch": BATCH,
            "lr": RATE,
            "precision": "half" if half else "full",
        }
        jobs: dict[str, Callable[[], object]] = {
            "floor": partial(floor, half),
            "loop": partial(loop, backbone, half, False),
            "as shipped": partial(ours, "fedavg", data, place / f"shipped-{kind}", **keys),
            "bare": partial(ours, "fedavg", data, place / f"bare-{kind}", evaluate_every=100, **keys),
            "with keep and gaps": partial(ours, "fedavg", data, place / f"keep-{kind}", keep=True, gaps=True, **keys),
        }
        if compiled and half:
            jobs["compiled loop"] = partial(loop, backbone, half, True)
        for name, job in jobs.items():
            found[f"{kind}, {name}"] = job()
            print(kind, name, found[f"{kind}, {name}"], flush=True)
    return found


def prompts(place: Path) -> dict[str, object]:
    backbone, data = str(vit_b_16(place)), made(10, 160 * 10 // 6, 100)
    found: dict[str, object] = {}
    for method in ("promptfl", "focoop"):
        for precision in ("half", "full"):
            given = {"backbone": backbone, "batch": BATCH, "precision": precision}
            found[f"{method} {precision}"] = ours(method, data, place / f"{method}-{precision}", **given)
            print(method, precision, found[f"{method} {precision}"], flush=True)
    return found


def start(place: Path) -> dict[str, object]:
    own = os.environ | {"FEDVLM_CACHE": str(place / "cache"), "FEDVLM_RUNS": str(place / "runs")}

    def timed(*words: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *words], env=own, check=True, capture_output=True)
        return time.perf_counter() - began

    found = {"import torch": timed("-c", "import torch"), "run zero-shot": timed("-m", "fedvlm", "run", "zero-shot")}
    print(found, flush=True)
    return dict(found)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON")
    parser.add_argument("--only", default="start,prompts,tower")
    parser.add_argument("--compile", action="store_true", help="also the loop by torch.compile (a minute more)")
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        sys.exit("no GPU here: not measured")
    found: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in args.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FEDVLM_CACHE"] = f"{folder}/store"
            job = {"start": start, "prompts": prompts, "tower": lambda p: tower(p, args.compile)}[name]
            found[name] = job(Path(folder))
        if args.out:
            args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
