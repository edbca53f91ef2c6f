"""FedDTL's low-rank training from stored activations, against the plain way on the same work in one run.

    python benchmarks/lora.py                        # CPU-seconds of a round of each stage, and the ratio
    python benchmarks/lora.py --data ../shared/data/caltech101
    python benchmarks/lora.py --gpu                  # the share of what the device can do

A round: 5 clients of 64 images, mini-clip, LoRA in the last 2 of 8 image layers, the server's training of the text tower
with it. Stage 1 is two epochs of cross-entropy; stage 2 samples actions and descends three times. "Plainly" sends every
batch's pixels through the whole of Hugging Face's image tower, the low-rank changes added by hooks, one client after the
other (pixels stand ready: neither reading nor resizing is counted); ours starts at what enters layer 7, which is kept
(hidden@-2; what making that once costs is printed). Batches, noise and starting values are the same, and both end at the
same parameters: "apart" is the largest difference over the largest step that training took. All are CPU-seconds,
time.process_time.

--gpu takes a random model of ViT-B/16's size: the trained part of a step, from random activations that lie on the device
as float32, to the slopes of all low-rank changes and Adam's step. FLOPs by formula (roofline.py's for products and
attention; t tokens, width w, rank r):
  products    and as much again for slopes, but 6 w² t that the first trained layer needs not
  attention   and twice that for slopes (what is computed again, not counted)
  low-rank    4 r w for each place and projection, and twice that for slopes, but 2 r w of q, k, v in the first layer
A stage-2 batch is two forward passes (the old policy with noise, the reference) and three with slopes. In bfloat16 as many
clients lie side by side as the stacked engine takes there. The share is roofline.py's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from roofline import COLUMNS, image_flops, line, matrix_rate, random_clip
from torch import Tensor
from torch.nn import functional as F

from fedvlm import backbones, console
from fedvlm.adapters.base import Task
from fedvlm.adapters.lora import Lora
from fedvlm.backbones.base import look
from fedvlm.backbones.text import TextTower
from fedvlm.backbones.vision import Both, VisionTop
from fedvlm.config import resolve
from fedvlm.core import Batch, Cohort, Data, Params, State, spread, told
from fedvlm.data.federation import in_words
from fedvlm.data.source import decode, open_source
from fedvlm.engines.stacked import Stacked, widest
from fedvlm.local.descent import Walk
from fedvlm.local.model import Model
from fedvlm.local.two_stage import TwoStage
from fedvlm.method import Method

RATIO = 2.5  # fewer CPU-seconds
NEAR = 0.02  # how far apart the two sides may end: Adam makes whole steps of slopes near zero
CLIENTS, IMAGES = 5, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="emoji", help="emoji (embedded), or a folder of class/image")
    parser.add_argument("--images", type=int, default=IMAGES, help="of each client")
    parser.add_argument("--gpu", action="store_true", help="measure a ViT-B/16-sized model on a device")
    parser.add_argument("--device", default="cuda", help="with --gpu")
    parser.add_argument("--clients", type=int, default=0, help="with --gpu: side by side; 0 is what the engine takes")
    parser.add_argument("--small", action="store_true", help="with --gpu: tiny, to see that it runs")
    args = parser.parse_args()
    if args.gpu:
        return device(args.device, args.clients, args.small)
    torch.set_num_threads(1)
    rounds(args.data, args.images)


def rounds(where: str, images: int) -> None:
    backbone = backbones.load("mini-clip")
    backbone.device = torch.device("cpu")
    source = open_source(where)
    count = CLIENTS * images
    chosen = {k * len(source.items) // count: None for k in range(count)}
    shown = [decode(data) for k, data in source.read() if k in chosen]
    labels = torch.tensor([source.classes.index(source.items[k].label) for k in chosen])
    phrases, tower = in_words("a photo of a {}", source.classes), backbone.both_towers
    task = Task(tuple(source.classes), backbone.texts(phrases), backbone.dim, backbone.scale, tower, phrases=phrases)
    setup = resolve("feddtl", {})
    began = time.process_time()
    hidden = torch.cat([look(backbone, shown[k : k + 64], setup.adapter.reads) for k in range(0, len(shown), 64)])
    print(
        f"{len(shown)} images of {source.name}, {len(source.classes)} classes: what enters the trained layers, once and"
    )
    print(f"for all rounds: {time.process_time() - began:.2f} CPU-seconds, resizing with it")
    mix = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))  # every client has most classes
    bounds = np.arange(CLIENTS)[:, None] * images + np.array([0, images, images, images])
    data = Data(hidden[mix], labels[mix], bounds, np.arange(CLIENTS), seed=50, rounds=2)
    pixels = replace(data, x=backbone.pixels(shown)[mix])
    adapters = {
        "ours": (setup.adapter, data),
        "plainly": (Whole(**vars(setup.adapter), model=backbone.model), pixels),
    }
    rows, state = [], None
    for number, stage in enumerate(("supervised", "reinforced"), 1):
        merge = replace(setup.merge, stage=stage)
        took, ends = {}, {}
        for name, (adapter, seen) in adapters.items():
            method = Method.build(adapter, setup.local, merge, task, 50)
            start = state or method.init(CLIENTS)
            engine = Stacked(method, seen, chunk=CLIENTS if name == "ours" else 1)
            began = time.process_time()
            ends[name] = method.round(start, Cohort(engine, np.arange(CLIENTS), number, rounds=2))
            took[name] = time.process_time() - began
        ratio, far = took["plainly"] / took["ours"], apart(start, *ends.values())
        assert far < NEAR, f"plain and ours end {far:.1e} apart: not the same work"
        rows.append(
            [f"{number}: {stage}", f"{took['plainly']:.2f}", f"{took['ours']:.2f}", f"{ratio:.1f}×", f"{RATIO:g}×",
             "met" if ratio >= RATIO else "MISSED", f"{far:.0e}"]
        )  # fmt: skip
        state = ends["ours"]
    print(f"\na FedDTL round, {CLIENTS} clients × {images} images, CPU-seconds at 1 thread")
    console.rows(["stage", "plainly", "ours", "ratio", "bar", "verdict", "apart"], rows)


def apart(start: State, one: State, other: State) -> float:
    """The largest difference over the largest step, of all trained parameters together."""
    names = [k for k in start.shared if not told(k)]
    step = max(float((one.shared[k] - start.shared[k]).abs().max()) for k in names)
    return max(float((one.shared[k] - other.shared[k]).abs().max()) for k in names) / step


@dataclass(frozen=True)
class Whole(Lora):
    """The plain way: x are pixels, and every batch goes through all of the image tower."""

    model: Any = None  # Hugging Face's

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor:
        found = []
        for i in range(max(len(x), *map(len, params.values()))):
            mine = {k: v[i % len(v)] for k, v in params.items() if k.startswith("image.")}
            with hooked(self.model.vision_model.encoder, mine, self.scale):
                pooled = self.model.vision_model(pixel_values=x[i % len(x)]).pooler_output
            found.append(self.model.visual_projection(pooled))
        return torch.stack(found)


@contextmanager
def hooked(encoder: Any, lora: Params, scale: float) -> Iterator[None]:
    """The encoder's last layers with low-rank changes."""
    handles = []
    trained = 1 + max(int(k.split(".")[1]) for k in lora)
    for name in (k.removesuffix(".A") for k in lora if k.endswith(".A")):
        _, i, projection = name.split(".")
        down, up = lora[f"{name}.A"], lora[f"{name}.B"]

        def add(module: Any, given: Any, out: Tensor, down: Tensor = down, up: Tensor = up) -> Tensor:
            return out + scale * (given[0] @ down.T @ up.T)

        layer = encoder.layers[len(encoder.layers) - trained + int(i)]
        handles.append(getattr(layer.self_attn, f"{projection}_proj").register_forward_hook(add))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def device(name: str, clients: int, small: bool) -> None:
    images, tokens, layers = (8, 17, 3) if small else (64, 197, 3)
    model = random_clip((64, 3, 2), (64, 3, 2), 64, 32) if small else random_clip((512, 12, 8), (768, 12, 12), 224, 512)
    tower = Both(VisionTop.of(model), TextTower.of(model, None))
    words = F.normalize(torch.randn(100, len(tower.image.projection)), dim=-1)
    task = Task(tuple(map(str, range(len(words)))), words, words.shape[1], 100.0, tower).to(torch.device(name))
    roof = matrix_rate(256 if small else 8192, name)
    rows = []
    for precision, numbers in (("full", "float32"), ("half", "bfloat16")):
        adapter = Lora(layers=layers, projections=("q", "k", "v", "out"), towers="image", precision=precision)
        forward, slopes = formula(tower.image.last(layers), tokens, adapter.rank)
        work = {"forward": forward, "SFT": forward + slopes, "RL": 2 * forward + 3 * (forward + slopes)}
        many = clients or (widest(adapter, name) if precision == "half" else Lora.most)
        for what, step in steps(Model(adapter, task), many, images, (tokens, tower.image.width), name).items():
            told, count = f"{what}, {numbers}, {many} clients × {images} images", many * images
            judged = precision == "half" and what != "forward"
            rows.append(line(told, count, step, count * work[what], name, roof, judged))
    print(f"a batch, LoRA in the last {layers} of {len(tower.image.layers)} layers; in stage 2,", end=" ")
    print("two forward passes and three with slopes")
    console.rows(["", *COLUMNS], rows)


def steps(
    model: Model, clients: int, images: int, shape: tuple[int, int], device: str
) -> dict[str, Callable[[], None]]:
    """What is timed: a batch of each kind, as local training does it."""
    start = {k: v.to(device) for k, v in model.adapter.init(model.task, 1).items()}
    params = {k: v + 0.01 * torch.randn_like(v) for k, v in spread(start, clients).items()}
    x = torch.randn(clients, images, *shape, device=device)
    y = torch.randint(len(model.task.classes), (clients, images), device=device)
    batch = Batch(x, y, torch.full((clients, images), 1 / images, device=device))
    bounds = np.arange(clients)[:, None] * images + np.array([0, images, images, images])
    data = Data(x.flatten(0, 1), y.flatten(), bounds, np.arange(clients))
    rule = TwoStage(optimiser="adam", lr=1e-3, batch=images)
    walk = Walk(rule, params)
    count = {k: torch.zeros(clients, device=device) for k in ("clipped", "flat")}
    supervised = model.slopes("cross-entropy")
    reinforced = rule.reinforce(model, {k: v[None] for k, v in start.items()}, data, count)

    def forward() -> None:
        with torch.no_grad():
            model.logits(params, x)

    def sft() -> None:
        walk.step(clients, supervised(params, batch)[1], 1e-3)

    def rl() -> None:
        new = Batch(*batch)  # sampled anew, as for any next batch
        for _ in range(rule.updates):
            walk.step(clients, reinforced(params, new)[1], 1e-3)

    return {"forward": forward, "SFT": sft, "RL": rl}


def formula(top: VisionTop, t: int, r: int) -> tuple[float, float]:
    """FLOPs of an image, forward and for slopes; see above."""
    (products, attention), w, whole = image_flops(top, t), top.width, len(top.layers) - 1
    low_rank = 4 * r * w * (whole * 4 * t + 2 * t + 2)
    first = 3 * t if whole else 2 * t + 1  # places × projections whose input needs no slope
    return products + attention + low_rank, products + 2 * attention + 2 * low_rank - (2 * w * w + 2 * r * w) * first


if __name__ == "__main__":
    main()
