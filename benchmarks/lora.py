"""FedDTL's low-rank training from stored activations, against a reference implementation on the same work in one run.

    python benchmarks/lora.py                        # CPU-seconds of a round of each stage, and the ratio
    python benchmarks/lora.py --data ../shared/data/caltech101
    python benchmarks/lora.py --gpu                  # share of the device's peak rate

A round: 5 clients with 64 images each, mini-clip, LoRA in the last 2 of 8 image layers, including the server's training of
the text tower. Stage 1 is two epochs of cross-entropy; stage 2 samples actions and makes three updates per batch. The
reference runs the pixels of every batch through all of Hugging Face's image tower, the low-rank changes added by hooks, one
client after the other (pixels are prepared beforehand: neither reading nor resizing is counted). Ours starts from the input
of layer 7, which is stored (hidden@-2; the time to compute it once is printed). Batches, noise and initial values are the
same, and both end at the same parameters: "difference" is the largest difference between the two, divided by the largest
change that training made. All times are CPU-seconds (time.process_time).

--gpu uses a random model of ViT-B/16's size and measures the trained part of a step: from random float32 activations on the
device to the gradients of all low-rank changes and Adam's step. FLOPs by formula (for products and attention roofline.py's;
t tokens, width w, rank r):
  products    the same again for gradients, except 6 w² t that the first trained layer does not need
  attention   twice that for gradients (recomputation is not counted)
  low-rank    4 r w per token and projection, twice that for gradients, except 2 r w of q, k, v in the first layer
A stage-2 batch is two forward passes (the old policy with noise, the reference model) and three with gradients. In bfloat16,
as many clients run side by side as in the stacked engine. The share is defined in roofline.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from roofline import COLUMNS, image_flops, line, mini_clip, peak_rate, random_clip, transformers_clip
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlm.backbones.base import encode_view
from fedvlm.config.config import resolve
from fedvlm.core.adapter import Task
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Batch, Data
from fedvlm.core.descent import Optimiser
from fedvlm.core.model import Model
from fedvlm.core.state import Params, State, copy_per_client, with_client_axis
from fedvlm.data.source import decode, open_source
from fedvlm.data.wording import class_phrases
from fedvlm.engines.stacked import Stacked, max_clients
from fedvlm.parts.adapters.lora import Lora
from fedvlm.parts.local.two_stage import TwoStage
from fedvlm.parts.merge.stages import Stages
from fedvlm.rounds.method import Method
from fedvlm.system import console
from fedvlm.towers.text import TextTower
from fedvlm.towers.vision import ImageLayers, Towers

if TYPE_CHECKING:
    from transformers import CLIPModel
    from transformers.models.clip.modeling_clip import CLIPEncoder

REQUIRED = 2.5  # the reference's CPU-seconds over ours, at least
TOLERANCE = 0.02  # how much the two may differ: Adam turns gradients near zero into whole steps
CLIENTS, IMAGES = 5, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="emoji", help="emoji (embedded), or a folder of class/image")
    parser.add_argument("--images", type=int, default=IMAGES, help="per client")
    parser.add_argument("--gpu", action="store_true", help="measure a model of ViT-B/16's size on a device")
    parser.add_argument("--device", default="cuda", help="with --gpu")
    parser.add_argument(
        "--clients", type=int, default=0, help="with --gpu: side by side; 0 is the stacked engine's number"
    )
    parser.add_argument("--small", action="store_true", help="with --gpu: a tiny model, to check that it runs")
    args = parser.parse_args()
    if args.gpu:
        return on_device(args.device, args.clients, args.small)
    torch.set_num_threads(1)
    rounds(args.data, args.images)


def rounds(where: str, images: int) -> None:
    backbone = mini_clip()
    source = open_source(where)
    count = CLIENTS * images
    chosen = {k * len(source.items) // count: None for k in range(count)}
    pictures = [decode(data) for k, data in source.read() if k in chosen]
    labels = torch.tensor([source.classes.index(source.items[k].label) for k in chosen])
    phrases, towers = class_phrases("a photo of a {}", source.classes), backbone.both_towers
    task = Task(tuple(source.classes), backbone.texts(phrases), backbone.dim, backbone.scale, towers, phrases=phrases)
    setup = resolve("feddtl", {})
    assert isinstance(setup.adapter, Lora) and isinstance(setup.merge, Stages)
    began = time.process_time()
    view = setup.adapter.view
    hidden = torch.cat([encode_view(backbone, pictures[k : k + 64], view) for k in range(0, len(pictures), 64)])
    print(f"{len(pictures)} images of {source.name}, {len(source.classes)} classes: the input of the trained layers,")
    print(f"computed once for all rounds: {time.process_time() - began:.2f} CPU-seconds, resizing included")
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))  # every client has most classes
    bounds = np.arange(CLIENTS)[:, None] * images + np.array([0, images, images, images])
    data = Data(hidden[mixed], labels[mixed], bounds, np.arange(CLIENTS), seed=50, rounds=2)
    pixels = replace(data, x=backbone.pixels(pictures)[mixed])
    sides: dict[str, tuple[Lora, Data]] = {
        "ours": (setup.adapter, data),
        "reference": (WholeTower(**vars(setup.adapter), model=transformers_clip(backbone.folder)), pixels),
    }
    stages: tuple[Literal["supervised", "reinforced"], ...] = ("supervised", "reinforced")
    rows: list[list[str]] = []
    state: State | None = None
    for number, stage in enumerate(stages, 1):
        merge = replace(setup.merge, stage=stage)
        seconds, ends = {}, {}
        for name, (adapter, examples) in sides.items():
            method = Method.build(adapter, setup.local, merge, task, 50)
            start = state or method.init(CLIENTS)
            engine = Stacked(method, examples, chunk=CLIENTS if name == "ours" else 1)
            began = time.process_time()
            ends[name] = method.round(start, Cohort(engine, np.arange(CLIENTS), number, rounds=2))
            seconds[name] = time.process_time() - began
        ratio, difference = seconds["reference"] / seconds["ours"], relative_difference(start, *ends.values())
        assert difference < TOLERANCE, f"reference and ours differ by {difference:.1e}: not the same work"
        rows.append(
            [f"{number}: {stage}", f"{seconds['reference']:.2f}", f"{seconds['ours']:.2f}", f"{ratio:.1f}×",
             f"{REQUIRED:g}×", "met" if ratio >= REQUIRED else "MISSED", f"{difference:.0e}"]
        )  # fmt: skip
        state = ends["ours"]
    print(f"\na FedDTL round, {CLIENTS} clients × {images} images, CPU-seconds on 1 thread")
    console.rows(["stage", "reference", "ours", "ratio", "required", "verdict", "difference"], rows)


def relative_difference(start: State, one: State, other: State) -> float:
    """The largest difference between two states over the largest change since the start, of all parameters together."""
    change = max(float((one.shared[k] - v).abs().max()) for k, v in start.shared.items())
    return max(float((one.shared[k] - other.shared[k]).abs().max()) for k in start.shared) / change


@dataclass(frozen=True)
class WholeTower(Lora):
    """The reference: x are pixels, and every batch runs through all of the image tower."""

    model: CLIPModel | None = None

    def embed(self, task: Task, params: Params, x: Tensor) -> Tensor:
        assert self.model is not None
        found = []
        for i in range(max(len(x), *map(len, params.values()))):
            mine = {k: v[i % len(v)] for k, v in params.items() if k.startswith("image.")}
            with low_rank_hooks(self.model.vision_model.encoder, mine, self.scale):
                pooled = self.model.vision_model(pixel_values=x[i % len(x)]).pooler_output
            found.append(self.model.visual_projection(pooled))
        return torch.stack(found)


@contextmanager
def low_rank_hooks(encoder: CLIPEncoder, lora: Params, scale: float) -> Iterator[None]:
    """The encoder's last layers with low-rank changes."""
    handles = []
    trained = 1 + max(int(k.split(".")[1]) for k in lora)
    for name in (k.removesuffix(".A") for k in lora if k.endswith(".A")):
        _, i, projection = name.split(".")
        layer = encoder.layers[len(encoder.layers) - trained + int(i)]
        module = layer.get_submodule(f"self_attn.{projection}_proj")
        handles.append(module.register_forward_hook(added(scale, lora[f"{name}.A"], lora[f"{name}.B"])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def added(scale: float, down: Tensor, up: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """A forward hook that adds a low-rank product to a module's output."""

    def add(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out + scale * (given[0] @ down.T @ up.T)

    return add


def on_device(device: str, clients: int, small: bool) -> None:
    images, tokens, layers = (8, 17, 3) if small else (64, 197, 3)
    model = random_clip((64, 3, 2), (64, 3, 2), 64, 32) if small else random_clip((512, 12, 8), (768, 12, 12), 224, 512)
    towers = Towers(ImageLayers.of(model), TextTower.of(model, mini_clip().tokenizer))
    text = F.normalize(torch.randn(100, len(towers.image.projection)), dim=-1)
    task = Task(tuple(map(str, range(len(text)))), text, text.shape[1], 100.0, towers).to(torch.device(device))
    peak = peak_rate(256 if small else 8192, device)
    rows = []
    precisions: tuple[tuple[Literal["full", "half"], str], ...] = (("full", "float32"), ("half", "bfloat16"))
    for precision, dtype in precisions:
        adapter = Lora(layers=layers, projections=("q", "k", "v", "out"), towers="image", precision=precision)
        forward, gradients = formula(towers.image.last(layers), tokens, adapter.rank)
        flops = {
            "forward": forward,
            "stage 1": forward + gradients,
            "stage 2": 2 * forward + 3 * (forward + gradients),
        }
        many = clients or (max_clients(adapter, device) if precision == "half" else Lora.limits.clients)
        for step, work in steps(Model(adapter, task), many, images, (tokens, towers.image.width), device).items():
            name, count = f"{step}, {dtype}, {many} clients × {images} images", many * images
            judged = precision == "half" and step != "forward"
            rows.append(line(name, count, work, count * flops[step], device, peak, judged))
    print(f"a batch, LoRA in the last {layers} of {len(towers.image.layers)} layers; stage 1 is supervised,", end=" ")
    print("stage 2 reinforced: two forward passes and three with gradients")
    console.rows(["", *COLUMNS], rows)


def steps(
    model: Model, clients: int, images: int, shape: tuple[int, int], device: str
) -> dict[str, Callable[[], None]]:
    """What is timed: a batch of each kind, as in local training."""
    start = {k: v.to(device) for k, v in model.adapter.init(model.task, 1).items()}
    params = {k: v + 0.01 * torch.randn_like(v) for k, v in copy_per_client(start, clients).items()}
    x = torch.randn(clients, images, *shape, device=device)
    y = torch.randint(len(model.task.classes), (clients, images), device=device)
    batch = Batch(x, y, torch.full((clients, images), 1 / images, device=device))
    bounds = np.arange(clients)[:, None] * images + np.array([0, images, images, images])
    data = Data(x.flatten(0, 1), y.flatten(), bounds, np.arange(clients))
    rule = TwoStage(optimiser="adam", lr=1e-3, batch=images)
    optimiser = Optimiser(rule, params)
    count = {k: torch.zeros(clients, device=device) for k in ("clipped", "flat")}
    supervised = model.gradients("cross-entropy")
    reinforced = rule.reinforce(model, with_client_axis(start), data, count)

    def forward() -> None:
        with torch.no_grad():
            model.logits(params, x)

    def stage_1() -> None:
        optimiser.step(clients, supervised(params, batch)[1], 1e-3)

    def stage_2() -> None:
        new = Batch(*batch)  # a new object: actions are sampled anew for it
        for _ in range(rule.updates):
            optimiser.step(clients, reinforced(params, new)[1], 1e-3)

    return {"forward": forward, "stage 1": stage_1, "stage 2": stage_2}


def formula(top: ImageLayers, t: int, r: int) -> tuple[float, float]:
    """FLOPs of an image, forward and for gradients; see above."""
    (products, attention), w, whole = image_flops(top, t), top.width, len(top.layers) - 1
    low_rank = 4 * r * w * (whole * 4 * t + 2 * t + 2)
    first = 3 * t if whole else 2 * t + 1  # tokens × projections whose input needs no gradient
    return products + attention + low_rank, products + 2 * attention + 2 * low_rank - (2 * w * w + 2 * r * w) * first


if __name__ == "__main__":
    main()
