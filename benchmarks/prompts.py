"""Prompt learning as public code does it (the reference) and in fedvlm, on the same work in one run.

    python tools/cifar10.py CIFAR10 --per-class 1000
    python benchmarks/prompts.py CIFAR10 --outsiders ../shared/data/textures     # CPU-seconds of a round, and the ratio
    python benchmarks/prompts.py --gpu                                           # share of the device's peak rate

A round: 5 clients, 8 shots, 2 epochs of batches of 32. The reference trains one client after the other, with every prompt at
the text tower's full length, padding included, through Hugging Face's modules; the images of every batch through the image
tower (their pixels are prepared beforehand: neither reading nor resizing is counted); autograd and torch.optim.SGD. For
FOCoOp it is Algorithm 2 on encoded prompts, as in the authors' code, with all C + U prompts encoded together for every
batch. Both sides use the same batches, noise and initial values and end at the same contexts: "difference" is the largest
difference between the two, divided by the largest change that training made. Ours includes the server and uses stored
features; the time to encode the same images once is printed. All times are CPU-seconds (time.process_time).

--gpu uses a random model of ViT-B/16's size; in bfloat16, as many clients run side by side as in the stacked engine. FLOPs
by formula, 2 per multiply-add, without padding:
  image    roofline.py's
  prompt   (L − 1)(24 w² p + 4 w p (b + p)) + 4 w² p + 20 w² + 4 w (b + p) + 2 w d     w width, L layers, d dimensions,
                                                                                  p own positions after b common ones
  prefix   (L − 1)(24 w² b + 4 w b²) + 4 w² b     once per client where classes share a context; else it is [start], a
                                                  constant
  with the gradient of the context, twice the products and 3.5 times the attention: the weights are frozen.
Images run through every layer from their patch embeddings, as in vpt and fedmaple. The share is defined in roofline.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from roofline import COLUMNS, image_flops, line, mini_clip, peak_rate, random_clip, transformers_clip
from torch import Tensor
from torch.nn import functional as F

from fedvlm.config.config import Layout, resolve
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Batch, Data
from fedvlm.core.records import RoundRecord
from fedvlm.core.state import Message, Params, Reply, State, select
from fedvlm.data.clients import Federation, federate
from fedvlm.data.nouns import nouns
from fedvlm.data.pool import Pool, Pools
from fedvlm.data.source import decode
from fedvlm.engines.base import Engine
from fedvlm.engines.stacked import Stacked, max_clients
from fedvlm.evaluation.protocols import or_nan
from fedvlm.evaluation.views import evaluate
from fedvlm.parts.adapters.outsiders import Outsiders
from fedvlm.parts.adapters.prompt import Prompt
from fedvlm.parts.local.bdro import STRIDE, Bdro, noise
from fedvlm.rounds.method import Method
from fedvlm.system import console
from fedvlm.towers import layers, text
from fedvlm.towers.text import PromptPlan, TextTower
from fedvlm.towers.vision import ImageLayers

REQUIRED = {"promptfl": 20.0, "focoop": 2.5, "focoop, bfloat16": 4.0}  # the reference's CPU-seconds over ours, at least
TOLERANCE = 1e-3  # how much the two may differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="a folder of class/image: tools/cifar10.py makes one")
    parser.add_argument("--outsiders", default="", help="a folder of images of no class, for AUROC")
    parser.add_argument("--only", default="", choices=["", "promptfl", "focoop"], help="default: both")
    parser.add_argument("--partition", default="iid", choices=["iid", "dirichlet"])
    parser.add_argument("--shots", type=int, default=8, help="training images per class and client")
    parser.add_argument("--rounds", type=int, default=1, help="after which float32 and bfloat16 are compared")
    parser.add_argument("--explore", type=int, default=Bdro.ascent_steps, help="FOCoOp's ascent steps")
    parser.add_argument("--candidates", type=int, default=4000, help="nouns among which FOCoOp's outsiders are chosen")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gpu", action="store_true", help="measure a model of ViT-B/16's size on a device")
    parser.add_argument("--device", default="cuda", help="with --gpu")
    parser.add_argument("--small", action="store_true", help="with --gpu: a tiny model, to check that it runs")
    args = parser.parse_args()
    if args.gpu:
        return on_device(args.device, args.small)
    if not args.data or not Path(args.data).is_dir():
        parser.error("a folder of class/image is needed: python tools/cifar10.py CIFAR10 --per-class 1000")
    torch.set_num_threads(args.threads)
    rounds(args)


def rounds(args: argparse.Namespace) -> None:
    layout = Layout(partition=args.partition, clients=5, shots=args.shots)
    given: dict[str, object] = {"data": args.data, "outsiders": args.outsiders, "epochs": 2, "rounds": 1}
    cases: dict[str, dict[str, object]] = {
        "promptfl": {"keep": False, "gaps": False},
        "focoop": {"ascent_steps": args.explore, "candidates": args.candidates},
    }
    rows, pools = [], Pools()
    for name in [args.only] if args.only else cases:
        setup = resolve(name, given | cases[name])
        pool = pools.encode(setup)
        federation = federate(pool, layout, 50)
        method = Method.build(setup.adapter, setup.local, setup.merge, pool.task, 50)
        reference = Reference(method, federation, pool)
        seconds, on_images, ends = reference.round()
        ours, found, state = measure(method, federation, 5 if name == "promptfl" else 1)
        rows.append(row(name, seconds, on_images, ours, relative_difference(method, ends, found)))
        print_prompt_count(name, method, federation, state)
        once = on_images / setup.local.epochs
        print(f"  encoding the clients' {reference.images} training images once: {once:.2f} CPU-seconds")
        if name == "focoop" and has_bfloat16():
            assert isinstance(method.adapter, Prompt)
            half = replace(method, adapter=replace(method.adapter, precision="half"))
            ours, _, _ = measure(half, federation, 1)
            rows.append(row("focoop, bfloat16", seconds, on_images, ours, None))
            print_precisions(method, half, federation, args.rounds)
    threads = f"{args.threads} thread{'s' * (args.threads > 1)}"
    about = f"{layout.clients} clients, {layout.shots} shots, 2 epochs, {args.partition}"
    print(f"\na round, {about}: CPU-seconds on {threads}")
    columns = ["reference", "of it images", "ours", "ratio", "without images", "required", "verdict", "difference"]
    console.rows(["", *columns], rows)


def row(name: str, reference: float, on_images: float, ours: float, difference: float | None) -> list[str]:
    ratio, required = reference / ours, REQUIRED[name]
    without_images = (reference - on_images) / ours
    verdict = "met" if ratio >= required else "MISSED"
    return [
        name, f"{reference:.2f}", f"{on_images:.2f}", f"{ours:.3f}", f"{ratio:.1f}×", f"{without_images:.1f}×",
        f"{required:g}×", verdict, "" if difference is None else f"{difference:.0e}",
    ]  # fmt: skip


def has_bfloat16() -> bool:
    found = bool(torch.cpu._is_avx512_bf16_supported())
    if not found:
        print("this CPU has no bfloat16 products (avx512_bf16), so that line is left out")
    return found


class Reference:
    """A round as public code runs it."""

    def __init__(self, method: Method, federation: Federation, pool: Pool):
        backbone, task = mini_clip(), method.task
        assert isinstance(task.tower, TextTower)
        self.method, self.federation, self.model = method, federation, transformers_clip(backbone.folder)
        self.vectors = method.initial["context"].shape[1]
        more = task.nouns[: len(method.initial["outsiders"])] if "outsiders" in method.initial else ()
        plan = task.tower.plan([name.replace("_", " ") for name in (*task.classes, *more)], self.vectors)
        self.ends = torch.tensor(plan.ends)
        self.ids = F.pad(plan.ids.clamp(min=0), (0, len(task.tower.position) - plan.ids.shape[1]))
        train = np.concatenate([np.arange(*federation.data.bounds[i, :2]) for i in federation.seen])
        places = {int(federation.items[r]): int(r) for r in train}
        files = {places[k]: decode(data) for k, data in pool.source.read() if k in places}
        self.images, self.pixels = len(files), {r: backbone.pixels([image])[0] for r, image in files.items()}
        self.image_seconds = 0.0

    def round(self) -> tuple[float, float, Params]:
        """CPU-seconds, those of the image tower among them, and the parameters of every client at the end."""
        d, ends = self.federation.data, []
        began = time.process_time()
        for i in self.federation.seen:
            one = np.array([i])
            ends.append(self.train(Data(torch.arange(len(d.x)), d.y, d.bounds[one], d.ids[one], d.seed, 1)))
        seconds = time.process_time() - began
        return seconds, self.image_seconds, {k: torch.stack([end[k] for end in ends]) for k in ends[0]}

    def train(self, data: Data) -> Params:
        """`data.x` are row numbers, by which the pixels are found."""
        local = self.method.local
        start = trained_parameters(self.method)
        params = {k: v.clone().requires_grad_() for k, v in start.items()}
        optimiser = torch.optim.SGD(params.values(), local.rate(data), local.momentum, weight_decay=local.weight_decay)
        drawn: Params = {}
        if isinstance(local, Bdro):
            sizes = {k: torch.empty(1, len(start[k]), self.method.task.dim) for k in ("context", "outsiders")}
            drawn = {k: v[0] for k, v in noise(sizes, data, local.sigma).items()}
        for batch in data.batches(local.batch, local.epochs):
            real = batch.weight[0] > 0
            y, image = batch.y[0][real], self.encode_images(batch.x[0][real])
            if isinstance(local, Bdro):
                loss = self.robust_loss(local, params, image, y, drawn, batch)
            else:
                loss = self.losses(params, image, y).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return {k: v.detach() for k, v in params.items()}

    @torch.no_grad()
    def encode_images(self, rows: Tensor) -> Tensor:
        began = time.process_time()
        pixels = torch.stack([self.pixels[r] for r in rows.tolist()])
        found = self.model.visual_projection(self.model.vision_model(pixel_values=pixels).pooler_output)
        self.image_seconds += time.process_time() - began
        return F.normalize(found, dim=-1)

    def losses(self, params: Params, image: Tensor, y: Tensor) -> Tensor:
        """One number per example."""
        return self.losses_of(self.encode(params), image, y)

    def encode(self, params: Params) -> Tensor:
        adapter, context = self.method.adapter, params["context"]
        if isinstance(adapter, Outsiders):
            own = (1 - adapter.fusion) * params["own"] + adapter.fusion * context
            context = torch.cat([own, params["outsiders"]])
        return self.encode_prompts(context)

    def losses_of(self, text: Tensor, image: Tensor, y: Tensor) -> Tensor:
        logits = self.method.task.scale * image @ text.T
        each = F.cross_entropy(logits, y, reduction="none")
        if isinstance(self.method.adapter, Outsiders):
            return each + logits.logsumexp(-1) - logits[:, : len(self.method.task.classes)].logsumexp(-1)
        return each

    def encode_prompts(self, context: Tensor) -> Tensor:
        """Every prompt at full length."""
        text = self.model.text_model
        words = text.embeddings.token_embedding(self.ids)
        prompts = torch.cat([words[:, :1], context.expand(len(words), -1, -1), words[:, 1 + self.vectors :]], 1)
        hidden = text.embeddings(inputs_embeds=prompts)
        hidden = text.encoder(inputs_embeds=hidden, attention_mask=None, is_causal=True).last_hidden_state
        pooled = text.final_layer_norm(hidden)[torch.arange(len(hidden)), self.ends]
        return F.normalize(self.model.text_projection(pooled), dim=-1)

    def robust_loss(self, rule: Bdro, params: Params, image: Tensor, y: Tensor, drawn: Params, batch: Batch) -> Tensor:
        """Algorithm 2, as interpreted in fedvlm/parts/local/bdro.py."""
        text = self.encode(params)
        fixed, classes = text.detach(), len(self.method.task.classes)
        shift, penalty = torch.zeros_like(fixed), torch.zeros(())

        def tangent(now: Tensor, part: slice, hold: float) -> tuple[Tensor, Tensor, Tensor]:
            """The objective, its penalty, and the maximiser of the objective with the loss's tangent for the loss."""
            leaf = now.clone().requires_grad_()
            loss = self.losses_of(fixed + leaf, image, y).mean()
            (up,) = torch.autograd.grad(loss, leaf)
            price = hold * now[part].square().sum() + rule.l1 * now[part].abs().sum()
            return loss.detach() - price, price, F.softshrink(up[part], rule.l1) / (2 * hold)

        parts = (("context", slice(classes), rule.penalty), ("outsiders", slice(classes, None), rule.outsider_penalty))
        for name, part, hold in parts:
            shift[part] = drawn[name].roll(batch.step * STRIDE, -1)
            value, price, aim = tangent(shift, part, hold)
            length = 1.0
            for _ in range(rule.ascent_steps):
                trial = shift.clone()
                trial[part] += length * (aim - shift[part])
                reached, paid, next_aim = tangent(trial, part, hold)
                if reached > value:
                    shift, value, price, aim, length = trial, reached, paid, next_aim, 1.0
                else:
                    length /= 4
            penalty = penalty + price
        each = self.losses_of(text + shift, image, y)
        soft = rule.temperature
        return soft * ((each / soft).logsumexp(0) - float(np.log(len(each)))) - penalty


class Recording(Stacked):
    """An engine that keeps the parameters of each client at the end of training."""

    def __init__(self, method: Method, data: Data):
        super().__init__(method, data)
        self.ends: dict[int, Params] = {}

    def run(self, step: str, ids: np.ndarray, message: Message, round: int, exchange: int) -> Iterator[Reply]:
        for reply in super().run(step, ids, message, round, exchange):
            params = reply.shared | self.rows.read(reply.ids, round)
            self.ends |= {int(i): {k: v[at] for k, v in params.items()} for at, i in enumerate(reply.ids)}
            yield reply


def measure(method: Method, federation: Federation, times: int) -> tuple[float, dict[int, Params], State]:
    """Median CPU-seconds of the first round, the clients' parameters after it, and the server's state."""
    seconds = []
    for _ in range(times):
        engine = Recording(method, federation.data)
        began = time.process_time()
        state = method.round(method.init(len(federation.names)), Cohort(engine, federation.seen, 1))
        seconds.append(time.process_time() - began)
    return float(np.median(seconds)), engine.ends, state


def trained_parameters(method: Method) -> Params:
    """Shared and private, at the start."""
    return method.initial | select(method.newcomer, method.adapter.private)


def relative_difference(method: Method, reference: Params, ours: dict[int, Params]) -> float:
    """The largest difference over the largest change since the start, of the parameter where it is worst."""
    worst = 0.0
    for k, start in trained_parameters(method).items():
        other = torch.stack([ours[i][k] for i in sorted(ours)])
        change = (reference[k] - start).abs().max()
        assert change > 0, f"{k} was not trained"
        worst = max(worst, float((reference[k] - other).abs().max() / change))
    assert worst < TOLERANCE, f"reference and ours differ by {worst:.1e}: not the same work"
    return worst


@contextmanager
def count_prompts() -> Iterator[list[int]]:
    """The number of prompts in each call of the text tower."""
    calls: list[int] = []
    inner = TextTower.features

    def features(
        self: TextTower, plan: PromptPlan, context: Tensor | None = None, *more: object, **named: object
    ) -> Tensor:
        found: Tensor = inner(self, plan, context, *more, **named)  # type: ignore[arg-type]
        calls.append(found.shape[0] * found.shape[1])
        return found

    with patch.object(TextTower, "features", features):
        yield calls


def print_prompt_count(name: str, method: Method, federation: Federation, state: State) -> None:
    """How many prompts an evaluation encodes, and how many of them differ."""
    with count_prompts() as calls:
        score(method, federation, Stacked(method, federation.data), state, 0)
    clients, classes = federation.scored, len(method.task.classes)
    distinct = classes * (1 + clients * ("own" in method.newcomer)) + len(method.initial.get("outsiders", ()))
    print(f"{name}: evaluation encoded {sum(calls)} prompts in {len(calls)} calls; {distinct} of them differ")


def score(method: Method, federation: Federation, engine: Engine, state: State, round: int) -> RoundRecord:
    return evaluate(method, federation, Cohort(engine, np.arange(federation.scored), round), state.message())


def print_precisions(full: Method, half: Method, federation: Federation, count: int) -> None:
    """Accuracy and AUROC after some rounds, float32 and bfloat16; ± is the standard error over the test images."""
    rows = []
    images = int(federation.data.counts("test").sum())
    for name, method in (("before", full), ("float32", full), ("bfloat16", half)):
        engine, state = Stacked(method, federation.data), method.init(len(federation.names))
        last = 0 if name == "before" else count
        for round in range(1, last + 1):
            state = method.round(state, Cohort(engine, federation.seen, round))
        found = score(method, federation, engine, state, last)
        own, shared = or_nan(found["personal"]["test"]), or_nan(found["shared"]["test"])
        detection = found.get("detection", {}).get("personal", {})
        auroc = f"{100 * or_nan(detection['auroc']):.2f}" if detection else "–"
        error = 100 * (own * (1 - own) / images) ** 0.5
        rows.append([name, f"{100 * own:.2f} ± {error:.2f}", f"{100 * shared:.2f}", auroc])
    print(f"\nFOCoOp after {count} round{'s' * (count > 1)}, {images} test images")
    console.rows(["", "own models", "shared model", "AUROC"], rows)


def on_device(device: str, small: bool) -> None:
    model = random_clip((64, 2, 2), (64, 2, 2), 32, 64) if small else random_clip((512, 12, 8), (768, 12, 12), 224, 512)
    tower = TextTower.of(model, mini_clip().tokenizer)
    peak = peak_rate(256 if small else 8192, device)
    if device == "cuda":
        ours, torch_only = bfloat16_errors(tower.to(device=device))
        print(f"bfloat16 differs from float32 by {ours:.1e} with our kernels, by {torch_only:.1e} with torch alone")
    images, tokens = (4, 5) if small else (256, 197)
    rows = [
        *image_lines(ImageLayers.of(model), images, tokens, device, peak),
        *prompt_lines(tower, 2 if small else Prompt.limits.clients, (20, 5) if small else (1000, 100), device, peak),
    ]
    console.rows(["", *COLUMNS], rows)


def bfloat16_errors(tower: TextTower) -> list[float]:
    """How far text features (absolute) and their gradients (relative to the largest) are from those of torch in float32:
    with our kernels in bfloat16, and with torch alone in bfloat16."""
    plan, start = tower.plan(nouns()[:300:3], 16), torch.Generator().manual_seed(1)
    context = 0.02 * torch.randn(2, 100, 16, tower.width, generator=start)
    found = []
    for dtype, fast in ((torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)):
        converted, leaf = tower.to(dtype), context.to(tower.token.device).requires_grad_()
        with nullcontext() if fast else without_kernels():
            features = converted.features(plan, leaf)
        found.append((features.detach(), torch.autograd.grad(features.square().cumsum(-1).sum(), leaf)[0]))
    (exact, gradient), *others = found
    return [float(max((z - exact).abs().max(), (g - gradient).abs().max() / gradient.abs().max())) for z, g in others]


@contextmanager
def without_kernels() -> Iterator[None]:
    """With torch's operations only."""
    with patch.object(layers, "kernels", lambda x: None), patch.object(text, "kernels", lambda x: None):
        yield


def image_lines(top: ImageLayers, images: int, tokens: int, device: str, peak: float) -> list[list[str]]:
    hidden = torch.randn(1, images, tokens, top.width, device=device)
    flops = images * sum(image_flops(top, tokens))
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        converted = top.to(dtype, device)

        def forward(converted: ImageLayers = converted) -> None:
            with torch.no_grad():
                converted.features(hidden)

        rows.append(line(f"images, {str(dtype)[6:]}", images, forward, flops, device, peak, dtype is torch.bfloat16))
    return rows


def prompt_lines(tower: TextTower, clients: int, prompts: tuple[int, int], device: str, peak: float) -> list[list[str]]:
    """`prompts`: how many share a context, and how many have their own; `clients`: side by side, except on a GPU in
    bfloat16."""
    known = nouns()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        converted, half = tower.to(dtype=dtype, device=device), dtype is torch.bfloat16
        many = max_clients(Prompt(), device) if half and device != "cpu" else clients
        for what, classes in zip(("shared", "own"), prompts, strict=True):
            own = what == "own"
            plan = converted.plan([known[k * len(known) // classes] for k in range(classes)], 16)
            context = torch.randn(many, classes if own else 1, 16, converted.width, device=device) * 0.02
            along = torch.randn(many, classes, len(converted.projection), device=device)

            def forward(tower: TextTower = converted, plan: PromptPlan = plan, context: Tensor = context) -> None:
                with torch.no_grad():
                    tower.features(plan, context)

            def gradient(
                tower: TextTower = converted, plan: PromptPlan = plan, context: Tensor = context, along: Tensor = along
            ) -> None:
                leaf = context.clone().requires_grad_()
                torch.autograd.grad((tower.features(plan, leaf) * along).sum(), leaf)

            products, attention = formula(converted, plan, many, own)
            name = f"{many} clients × {classes} prompts, {what} context, {str(dtype)[6:]}"
            count, rest = many * classes, (device, peak, half)
            rows.append(line(name, count, forward, products + attention, *rest))
            rows.append(line(f"{name}, with gradients", count, gradient, 2 * products + 3.5 * attention, *rest))
    return rows


def formula(tower: TextTower, plan: PromptPlan, clients: int, own: bool) -> tuple[float, float]:
    """FLOPs of the products and of attention, forward; see above."""
    w, whole, dim = tower.width, len(tower.layers) - 1, len(tower.projection)
    before = 1 if own else plan.shared
    positions = np.array(plan.ends) + 1 - before
    products = (whole * 24 * w * w * positions + 4 * w * w * positions + 20 * w * w + 2 * w * dim).sum()
    attention = (4 * w * (before + positions) * (whole * positions + 1)).sum()
    if not own:
        products += (24 * whole + 4) * w * w * before
        attention += whole * 4 * w * before**2
    return float(clients * products), float(clients * attention)


if __name__ == "__main__":
    main()
