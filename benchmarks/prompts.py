"""Prompt learning as public code does it, and ours, on the same work in one run.

    python tools/cifar10.py CIFAR10 --per-class 1000
    python benchmarks/prompts.py CIFAR10 --outsiders ../shared/data/textures     # CPU-seconds of a round, and the ratio
    python benchmarks/prompts.py --gpu                                           # the share of what the device can do

A round: 5 clients, 8 shots, 2 epochs of batches of 32. "Plainly" is one client after the other; every prompt at the text
tower's full length, padding included, through Hugging Face's modules; every batch's images through the image tower again
(their pixels stand ready: neither reading nor resizing is counted); autograd and torch.optim.SGD. For FOCoOp it is the
paper's Algorithm 2 on contexts, all C + U prompts read together for every loss; the authors' code explores features in
place of contexts. Both sides take the same batches, noise and starting values, and end at the same contexts: "apart" is
the largest difference over the largest step that training took. Ours includes the server, and has features stored;
what encoding the same images once costs is printed. All are CPU-seconds, time.process_time.

--gpu takes a random model of ViT-B/16's size (speed does not ask what weights say), in bfloat16 as many clients side by
side as the stacked engine takes there. FLOPs by formula, 2 a multiply-add, padding not counted:
  image    roofline.py's
  prompt   (L − 1)(24 w² p + 4 w p (b + p)) + 4 w² p + 20 w² + 4 w (b + p) + 2 w d     w width, L layers, d dimensions,
                                                                                  p own places after b seen before
  prefix   (L − 1)(24 w² b + 4 w b²) + 4 w² b     once a client where classes share a context, else [start]: a constant
  and with the slope in the context twice the products and 3.5 times the attention: the weights are frozen.
Images go through every layer from their patches' embeddings, as vpt and fedmaple run them; the share is roofline.py's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from roofline import COLUMNS, image_flops, line, matrix_rate, random_clip
from torch import Tensor
from torch.nn import functional as F

from fedvlm import backbones, console
from fedvlm.adapters.prompt import Prompt
from fedvlm.backbones import layers, text
from fedvlm.backbones.text import Plan, TextTower
from fedvlm.backbones.vision import VisionTop
from fedvlm.commands import encoded
from fedvlm.config import resolve
from fedvlm.core import Batch, Cohort, Data, Engine, Params, State, only
from fedvlm.data.federation import Federation, Layout, Pool, federate
from fedvlm.data.nouns import nouns
from fedvlm.data.source import decode
from fedvlm.engines.stacked import Stacked, widest
from fedvlm.evaluate.views import evaluate
from fedvlm.local.bdro import STRIDE, Bdro, noise
from fedvlm.method import Method

BARS = {"promptfl": 20.0, "focoop": 2.5, "focoop, bfloat16": 4.0}
NEAR = 1e-3  # how far apart the two sides may end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="a folder of class/image: tools/cifar10.py makes one")
    parser.add_argument("--outsiders", default="", help="a folder of images of no class, for AUROC")
    parser.add_argument("--only", default="", help="promptfl or focoop; else both")
    parser.add_argument("--partition", default="iid", choices=["iid", "dirichlet"])
    parser.add_argument("--shots", type=int, default=8, help="training images a class and client")
    parser.add_argument("--rounds", type=int, default=1, help="after which float32 and bfloat16 are compared")
    parser.add_argument("--explore", type=int, default=1, help="FOCoOp's steps up")
    parser.add_argument("--candidates", type=int, default=4000, help="nouns that FOCoOp's outsiders are chosen from")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gpu", action="store_true", help="measure a ViT-B/16-sized model on a device")
    parser.add_argument("--device", default="cuda", help="with --gpu")
    parser.add_argument("--small", action="store_true", help="with --gpu: tiny, to see that it runs")
    args = parser.parse_args()
    if args.gpu:
        return device(args.device, args.small)
    if not args.data or not Path(args.data).is_dir():
        parser.error("a folder of class/image is needed: python tools/cifar10.py CIFAR10 --per-class 1000")
    torch.set_num_threads(args.threads)
    rounds(args)


def rounds(args: argparse.Namespace) -> None:
    layout = Layout(partition=args.partition, clients=5, shots=args.shots)
    given: dict[str, Any] = {"data": args.data, "outsiders": args.outsiders, "epochs": 2, "rounds": 1}
    cases: dict[str, dict[str, Any]] = {
        "promptfl": {"keep": False, "gaps": False},
        "focoop": {"explore": args.explore, "candidates": args.candidates},
    }
    rows = []
    for name in [args.only] if args.only else cases:
        setup = resolve(name, given | cases[name])
        pool = encoded(setup)
        federation = federate(pool, layout, 50)
        method = Method.build(setup.adapter, setup.local, setup.merge, pool.task, 50)
        public = Plain(method, federation, pool)
        plain, of_images, ends = public.round()
        ours, found, state = measure(method, federation, 5 if name == "promptfl" else 1)
        rows.append(row(name, plain, of_images, ours, apart(method, ends, found)))
        report(name, method, federation, state)
        once = of_images / setup.local.epochs
        print(f"  encoding the clients' {public.images} training images once and for all: {once:.2f} CPU-seconds")
        if name == "focoop" and halves():
            half = replace(method, adapter=replace(method.adapter, precision="half"))
            ours, _, _ = measure(half, federation, 1)
            rows.append(row("focoop, bfloat16", plain, of_images, ours, None))
            compare(method, half, federation, args.rounds)
    who = f"{args.threads} thread{'s' * (args.threads > 1)}"
    print(
        f"\na round, {layout.clients} clients, {layout.shots} shots, 2 epochs, {args.partition}: CPU-seconds at {who}"
    )
    console.rows(["", "plainly", "of it images", "ours", "ratio", "without images", "bar", "verdict", "apart"], rows)


def row(name: str, plain: float, of_images: float, ours: float, far: float | None) -> list[str]:
    ratio, bar = plain / ours, BARS[name]
    told = "" if far is None else f"{far:.0e}"
    verdict = "met" if ratio >= bar else "MISSED"
    return [
        name, f"{plain:.2f}", f"{of_images:.2f}", f"{ours:.3f}", f"{ratio:.1f}×", f"{(plain - of_images) / ours:.1f}×",
        f"{bar:g}×", verdict, told,
    ]  # fmt: skip


def halves() -> bool:
    able = torch.cpu._is_avx512_bf16_supported()
    if not able:
        print("this CPU computes no bfloat16 products (avx512_bf16): no such line")
    return bool(able)


class Plain:
    """A round the public way."""

    def __init__(self, method: Method, federation: Federation, pool: Pool):
        backbone = backbones.load("mini-clip")
        backbone.device = torch.device("cpu")
        self.method, self.federation, self.model = method, federation, backbone.model
        self.vectors = method.initial["context"].shape[1]
        tower, task = method.task.tower, method.task
        more = task.nouns[: len(method.initial["outsiders"])] if "outsiders" in method.initial else ()
        plan = tower.plan([name.replace("_", " ") for name in (*task.classes, *more)], self.vectors)
        self.ends = torch.tensor(plan.ends)
        self.ids = F.pad(plan.ids.clamp(min=0), (0, len(tower.position) - plan.ids.shape[1]))
        train = np.concatenate([np.arange(*federation.data.bounds[i, :2]) for i in federation.seen])
        places = {int(federation.items[r]): int(r) for r in train}
        files = {places[k]: decode(data) for k, data in pool.source.read() if k in places}
        self.images, self.pixels = len(files), {r: backbone.pixels([image])[0] for r, image in files.items()}
        self.of_images = 0.0

    def round(self) -> tuple[float, float, Params]:
        """CPU-seconds, those of the image tower among them, and what every client ends at."""
        d, ends = self.federation.data, []
        began = time.process_time()
        for i in self.federation.seen:
            me = np.array([i])
            ends.append(self.train(Data(torch.arange(len(d.x)), d.y, d.bounds[me], d.ids[me], d.seed, 1)))
        took = time.process_time() - began
        return took, self.of_images, {k: torch.stack([end[k] for end in ends]) for k in ends[0]}

    def train(self, data: Data) -> Params:
        local = self.method.local
        start = learned(self.method)
        params = {k: v.clone().requires_grad_() for k, v in start.items()}
        walk = torch.optim.SGD(params.values(), local.rate(data), local.momentum, weight_decay=local.weight_decay)
        robust = isinstance(local, Bdro)
        shared = {k: start[k][None] for k in self.method.initial}
        drawn = {k: v[0] for k, v in noise(shared, data, local.sigma).items()} if robust else {}
        for batch in data.batches(local.batch, local.epochs):
            real = batch.weight[0] > 0
            y, image = batch.y[0][real], self.see(batch.x[0][real])
            loss = self.robust(params, image, y, drawn, batch) if robust else self.losses(params, image, y).mean()
            walk.zero_grad()
            loss.backward()
            walk.step()
        return {k: v.detach() for k, v in params.items()}

    @torch.no_grad()
    def see(self, rows: Tensor) -> Tensor:
        began = time.process_time()
        pixels = torch.stack([self.pixels[r] for r in rows.tolist()])
        found = self.model.visual_projection(self.model.vision_model(pixel_values=pixels).pooler_output)
        self.of_images += time.process_time() - began
        return F.normalize(found, dim=-1)

    def losses(self, params: Params, image: Tensor, y: Tensor) -> Tensor:
        context, classes = params["context"], len(self.method.task.classes)
        if "outsiders" in params:
            fusion = self.method.adapter.fusion
            context = torch.cat([(1 - fusion) * params["own"] + fusion * context, params["outsiders"]])
        logits = self.method.task.scale * image @ self.read(context).T
        each = F.cross_entropy(logits, y, reduction="none")
        return each + logits.logsumexp(-1) - logits[:, :classes].logsumexp(-1) if "outsiders" in params else each

    def read(self, context: Tensor) -> Tensor:
        """Every prompt at full length."""
        text = self.model.text_model
        words = text.embeddings.token_embedding(self.ids)
        prompts = torch.cat([words[:, :1], context.expand(len(words), -1, -1), words[:, 1 + self.vectors :]], 1)
        hidden = text.embeddings(inputs_embeds=prompts)
        hidden = text.encoder(inputs_embeds=hidden, attention_mask=None, is_causal=True).last_hidden_state
        pooled = text.final_layer_norm(hidden)[torch.arange(len(hidden)), self.ends]
        return F.normalize(self.model.text_projection(pooled), dim=-1)

    def robust(self, params: Params, image: Tensor, y: Tensor, drawn: Params, batch: Batch) -> Tensor:
        """Algorithm 2, as fedvlm/local/bdro.py reads it."""
        rule = self.method.local
        assert isinstance(rule, Bdro)
        away: Params = {}
        cost = torch.zeros(())
        for name, hold in (("context", rule.hold), ("outsiders", rule.hold_outsiders)):
            here = drawn[name].roll(batch.step * STRIDE, -1)
            for _ in range(rule.explore):
                here = here.detach().requires_grad_()
                moved = params | {k: params[k] + v for k, v in (away | {name: here}).items()}
                far = hold * here.square().sum() + rule.sparse * here.abs().sum()
                (up,) = torch.autograd.grad(self.losses(moved, image, y).mean() - far, here)
                here = here + rule.ascent * up
            away[name] = here.detach()
            cost = cost + hold * away[name].square().sum() + rule.sparse * away[name].abs().sum()
        each = self.losses(params | {k: params[k] + v for k, v in away.items()}, image, y)
        soft = rule.hold_outsiders * rule.evenness
        return soft * ((each / soft).logsumexp(0) - np.log(len(each))) - cost


class Kept:
    """An engine, and what its clients ended at."""

    def __init__(self, engine: Stacked):
        self.engine, self.ends = engine, dict[int, Params]()

    def run(
        self, step: str, ids: np.ndarray, down: Params, round: int, exchange: int
    ) -> Iterator[tuple[np.ndarray, Params]]:
        for part, up in self.engine.run(step, ids, down, round, exchange):
            rows = up | self.engine.rows.read(part, round)
            self.ends |= {int(i): {k: v[at] for k, v in rows.items()} for at, i in enumerate(part)}
            yield part, up


def measure(method: Method, federation: Federation, times: int) -> tuple[float, dict[int, Params], State]:
    """Median CPU-seconds of the first round, what the clients ended at, and the server after it."""
    took = []
    for _ in range(times):
        kept = Kept(Stacked(method, federation.data))
        began = time.process_time()
        state = method.round(method.init(len(federation.names)), Cohort(kept, federation.seen, 1))
        took.append(time.process_time() - began)
    return float(np.median(took)), kept.ends, state


def learned(method: Method) -> Params:
    """What is trained, where it starts: shared and private."""
    return method.initial | only(method.newcomer, method.adapter.private)


def apart(method: Method, plain: Params, ours: dict[int, Params]) -> float:
    """The largest difference over the largest step, of all parameters the worst."""
    worst = 0.0
    for k, start in learned(method).items():
        other = torch.stack([ours[i][k] for i in sorted(ours)])
        step = (plain[k] - start).abs().max()
        worst = max(worst, float((plain[k] - other).abs().max() / step))
        assert step > 0, f"{k} was not trained"
    assert worst < NEAR, f"plain and ours end {worst:.1e} apart: not the same work"
    return worst


@contextmanager
def counted() -> Iterator[list[int]]:
    """The prompts that go through the text tower meanwhile, call by call."""
    calls: list[int] = []
    inner = TextTower.features

    def features(self: TextTower, plan: Plan, context: Tensor | None = None, *more: Any, **named: Any) -> Tensor:
        found = inner(self, plan, context, *more, **named)
        calls.append(found.shape[0] * found.shape[1])
        return found

    TextTower.features = features
    try:
        yield calls
    finally:
        TextTower.features = inner


def report(name: str, method: Method, federation: Federation, state: State) -> None:
    """How often evaluation reads a prompt."""
    with counted() as calls:
        score(method, federation, Stacked(method, federation.data), state, 0)
    clients, classes = federation.scored, len(method.task.classes)
    distinct = classes * (1 + clients * ("own" in method.newcomer)) + len(method.initial.get("outsiders", ()))
    print(f"{name}: evaluation read {sum(calls)} prompts in {len(calls)} calls; {distinct} of them differ")


def score(method: Method, federation: Federation, engine: Engine, state: State, round: int) -> dict[str, Any]:
    return evaluate(method, federation, Cohort(engine, np.arange(federation.scored), round), state.shared)


def compare(full: Method, half: Method, federation: Federation, count: int) -> None:
    """Accuracy and AUROC after some rounds, float32 and bfloat16; ± is the standard error of a share of the test images."""
    rows = []
    images = int(federation.data.counts("test").sum())
    for name, method in (("before", full), ("float32", full), ("bfloat16", half)):
        engine, state = Stacked(method, federation.data), method.init(len(federation.names))
        last = 0 if name == "before" else count
        for round in range(1, last + 1):
            state = method.round(state, Cohort(engine, federation.seen, round))
        found = score(method, federation, engine, state, last)
        own, detection = found["personal"]["test"], found.get("detection", {}).get("personal", {})
        auroc = f"{100 * detection['auroc']:.2f}" if detection else "–"
        error = 100 * (own * (1 - own) / images) ** 0.5
        rows.append([name, f"{100 * own:.2f} ± {error:.2f}", f"{100 * found['shared']['test']:.2f}", auroc])
    print(f"\nFOCoOp after {count} round{'s' * (count > 1)}, {images} test images")
    console.rows(["", "own models", "shared model", "AUROC"], rows)


def device(name: str, small: bool) -> None:
    model = random_clip((64, 2, 2), (64, 2, 2), 32, 64) if small else random_clip((512, 12, 8), (768, 12, 12), 224, 512)
    tower = TextTower.of(model, backbones.load("mini-clip").tokenizer)
    roof = matrix_rate(256 if small else 8192, name)
    if name == "cuda":
        ours, own = kernels_apart(tower.to(device=name))
        print(f"bfloat16 is {ours:.1e} from float32 by our kernels, {own:.1e} by torch alone")
    images, tokens = (4, 5) if small else (256, 197)
    rows = [
        *see(VisionTop.of(model), images, tokens, name, roof),
        *read(tower, 2 if small else Prompt.most, (20, 5) if small else (1000, 100), name, roof),
    ]
    console.rows(["", *COLUMNS], rows)


def kernels_apart(tower: TextTower) -> list[float]:
    """How far text features, and their slopes over the largest, are from those of float32 by torch alone: by our kernels
    in bfloat16, and by torch in bfloat16."""
    plan, start = tower.plan(nouns()[:300:3], 16), torch.Generator().manual_seed(1)
    context = 0.02 * torch.randn(2, 100, 16, tower.width, generator=start)
    found = []
    for kind, fast in ((torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)):
        here, leaf = tower.to(kind), context.to(tower.token.device).requires_grad_()
        with nullcontext() if fast else only_torch():
            features = here.features(plan, leaf)
        found.append((features.detach(), torch.autograd.grad(features.square().cumsum(-1).sum(), leaf)[0]))
    (true, slope), *others = found
    return [float(max((z - true).abs().max(), (g - slope).abs().max() / slope.abs().max())) for z, g in others]


@contextmanager
def only_torch() -> Iterator[None]:
    inner = layers.kernels
    layers.kernels = text.kernels = lambda x: None
    try:
        yield
    finally:
        layers.kernels = text.kernels = inner


def see(top: VisionTop, images: int, tokens: int, device: str, roof: float) -> list[list[str]]:
    hidden = torch.randn(1, images, tokens, top.width, device=device)
    flops = images * sum(image_flops(top, tokens))
    rows = []
    for kind in (torch.float32, torch.bfloat16):
        here = top.to(kind, device)

        def work(here: VisionTop = here) -> None:
            with torch.no_grad():
                here.features(hidden)

        rows.append(line(f"images, {str(kind)[6:]}", images, work, flops, device, roof, kind is torch.bfloat16))
    return rows


def read(tower: TextTower, few: int, prompts: tuple[int, int], device: str, roof: float) -> list[list[str]]:
    """So many prompts that share a context, and so many with their own."""
    known = nouns()
    rows = []
    for kind in (torch.float32, torch.bfloat16):
        here, half = tower.to(dtype=kind, device=device), kind is torch.bfloat16
        clients = widest(Prompt(), device) if half and device != "cpu" else few
        for what, classes in zip(("shared", "own"), prompts, strict=True):
            own = what == "own"
            plan = here.plan([known[k * len(known) // classes] for k in range(classes)], 16)
            context = torch.randn(clients, classes if own else 1, 16, here.token.shape[1], device=device) * 0.02
            along = torch.randn(clients, classes, len(here.projection), device=device)

            def forward(here: TextTower = here, plan: Plan = plan, context: Tensor = context) -> None:
                with torch.no_grad():
                    here.features(plan, context)

            def both(
                here: TextTower = here, plan: Plan = plan, context: Tensor = context, along: Tensor = along
            ) -> None:
                leaf = context.clone().requires_grad_()
                torch.autograd.grad((here.features(plan, leaf) * along).sum(), leaf)

            products, attention = formula(here, plan, clients, own)
            name = f"{clients} clients × {classes} prompts, {what} context, {str(kind)[6:]}"
            count, rest = clients * classes, (device, roof, half)
            rows.append(line(name, count, forward, products + attention, *rest))
            rows.append(line(f"{name}, with slopes", count, both, 2 * products + 3.5 * attention, *rest))
    return rows


def formula(tower: TextTower, plan: Plan, clients: int, own: bool) -> tuple[float, float]:
    """FLOPs of the products and of attention, forward."""
    w, deep, dim = tower.token.shape[1], len(tower.layers) - 1, len(tower.projection)
    before = 1 if own else plan.shared
    places = np.array(plan.ends) + 1 - before
    products = (deep * 24 * w * w * places + 4 * w * w * places + 20 * w * w + 2 * w * dim).sum()
    attention = (4 * w * (before + places) * (deep * places + 1)).sum()
    if not own:
        products += (24 * deep + 4) * w * w * before
        attention += deep * 4 * w * before**2
    return float(clients * products), float(clients * attention)


if __name__ == "__main__":
    main()
