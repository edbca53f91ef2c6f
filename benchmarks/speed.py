"""CPU-seconds of a round at one thread, features stored, against the naive way and the arithmetic floor, in one run.

    python benchmarks/speed.py --data ../shared/data/pacs

A round is training plus the evaluation of all splits of all clients. "floor" is the time of the round's matrix products
(and, for rotations, solves) alone, in the shapes they have in one large piece; "naive" runs both encoders on every batch
and encodes every split again each round, measured on a sample in this run. Bars are printed beside the numbers.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from fedvlm import backbones, console
from fedvlm.adapters.base import Task
from fedvlm.commands import encoded
from fedvlm.config import resolve
from fedvlm.core import Cohort, Data
from fedvlm.data.federation import Federation, Layout, federate
from fedvlm.data.source import decode
from fedvlm.engines.stacked import Stacked
from fedvlm.evaluate.views import evaluate
from fedvlm.method import Method

BARS = {"fedclip": 0.27, "fedavg": 0.03, "ditto": 0.06}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data/pacs")
    parser.add_argument("--probe", default="", help="(internal) one measurement in a process of its own, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.probe:
        print(json.dumps(probe(**json.loads(args.probe))))
        return
    data = args.data if Path(args.data).is_dir() else "emoji"
    if data == "emoji":
        print(f"{args.data} is not there: the embedded emoji instead; the bars are for PACS")
    pool = encoded(resolve("zero-shot", {"data": data}))
    rounds(pool)
    naive(pool)
    growth()
    rotations()


def measure(method: Method, federation: Federation, chunk: int = 0, count: int = 7) -> tuple[float, float, int]:
    """Median CPU-seconds of a whole round and of its training, and the clients side by side."""
    engine = Stacked(method, federation.data, chunk)
    state = method.init(len(federation.names))
    took = []
    for round in range(1, count + 2):
        began = time.process_time()
        state = method.round(state, Cohort(engine, federation.seen, round))
        trained = time.process_time()
        evaluate(method, federation, Cohort(engine, np.arange(federation.scored), round), state.shared)
        took.append((time.process_time() - began, trained - began))
    whole, train = np.median(took[1:], axis=0)  # the first round warms up
    return float(whole), float(train), engine.chunk


def build(name: str, task: Task, **given) -> Method:
    setup = resolve(name, given)
    return Method.build(setup.adapter, setup.local, setup.merge, task)


def rounds(pool) -> None:
    rows = []
    target = pool.source.domains[0]
    cases = [("fedclip", Layout(unseen=(target,)), {"batch": 32}), ("fedot", Layout(unseen=(target,)), {"batch": 32})]
    for clients in (20, 100, 500):
        layout = Layout(partition="dirichlet", alpha=0.5, clients=clients)
        cases += [("fedavg", layout, {"batch": 10}), ("ditto", layout, {"batch": 10})]
    for name, layout, given in cases:
        federation = federate(pool, layout, 50)
        method = build(name, pool.task, **given)
        whole, train, chunk = measure(method, federation)
        least = floor(method, federation, given["batch"])
        bar = BARS.get(name)
        verdict = "" if bar is None else ("met" if whole <= bar else "MISSED")
        rows.append(
            [name, str(len(federation.seen)), str(chunk), f"{whole:.4f}", f"{train:.4f}", f"{least:.4f}",
             f"{whole / least:.1f}", f"{bar:.2f}" if bar else "", verdict]
        )  # fmt: skip
    print(f"\na round on {pool.source.name}, CPU-seconds at 1 thread")
    console.rows(["method", "clients", "chunk", "round", "of it training", "floor", "ratio", "bar", "verdict"], rows)


def floor(method: Method, federation: Federation, batch: int) -> float:
    """Time of the matrix products alone: three times forward for training, once for scoring, in full batches."""
    d, c = method.task.dim, len(method.task.classes)
    shapes = {"w1": (d, d), "w2": (d, d)} if "w1" in method.initial else {}
    shapes |= {"text": (c, d)}
    examples = int(federation.data.counts("train")[federation.seen].sum())
    passes = 2 if any(k.startswith("personal.") for k in method.newcomer) else 1
    total = 0.0
    for rows, cols in shapes.values():
        w, x = torch.randn(rows, cols), torch.randn(batch, cols)
        total += passes * 3 * examples / batch * timed(lambda w=w, x=x: x @ w.T)
        total += passes * timed(lambda w=w: federation.data.x @ w.T, 10)
    if "skew" in method.newcomer:  # a factorisation with a batch of right-hand sides, and its transpose for the slope
        a, x = torch.eye(d) + 0.01 * torch.randn(d, d), torch.randn(d, batch)
        factors = torch.linalg.lu_factor(a)
        solve = timed(lambda: torch.linalg.solve(a, x), 50) + timed(lambda: torch.linalg.lu_solve(*factors, x), 50)
        total += examples / batch * solve
        total += len(federation.seen) * timed(lambda: torch.linalg.solve(a, torch.eye(d)), 20)
    return total


def timed(work, times: int = 300) -> float:
    for _ in range(3):
        work()
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def naive(pool, sample: int = 48) -> None:
    """The public way on a sample: every batch through both encoders, every split encoded again each round."""
    backbone = backbones.load("mini-clip")
    images = [decode(data) for k, data in pool.source.read() if k < sample]
    phrases = [f"a photo of a {c}" for c in pool.task.classes]
    federation = federate(pool, Layout(unseen=(pool.source.domains[0],)), 50)
    method = build("fedclip", pool.task, batch=32)
    params = {k: v.clone().requires_grad_() for k, v in method.initial.items()}
    walk = torch.optim.Adam(params.values())
    y = torch.zeros(32, dtype=torch.long)

    def step() -> None:
        x, text = backbone.images(images[:32]), backbone.texts(phrases)
        mask = torch.softmax(torch.tanh(x @ params["w1"].T + params["b1"]) @ params["w2"].T + params["b2"], -1)
        loss = F.cross_entropy(20.5 * F.normalize(mask * x, dim=-1) @ text.T, y)
        walk.zero_grad()
        loss.backward()
        walk.step()

    a_step, an_image = timed(step, 3), timed(lambda: backbone.images(images), 2) / len(images)
    steps = sum(-(-n // 32) for n in federation.data.counts("train")[federation.seen])
    slow = a_step * steps + an_image * len(federation.data.x)
    fast = measure(method, federation)[0]
    print(
        f"\nFedCLIP's round the naive way: {steps} steps × {a_step:.3f} + {len(federation.data.x)} images × {an_image:.4f}"
    )
    print(
        f"= {slow:.1f} CPU-seconds (from a sample of {len(images)} images); ours {fast:.3f}; ratio {slow / fast:.0f}×"
    )


def synthetic(clients: int, dim: int = 256, classes: int = 7, sizes=(6, 2, 2)) -> Federation:
    draw = torch.Generator().manual_seed(0)
    per = sum(sizes)
    text = F.normalize(torch.randn(classes, dim, generator=draw), dim=-1)
    x = F.normalize(torch.randn(clients * per, dim, generator=draw), dim=-1)
    y = torch.randint(classes, (clients * per,), generator=draw)
    bounds = np.arange(clients)[:, None] * per + np.array([0, sizes[0], sizes[0] + sizes[1], per])
    names = tuple(map(str, range(clients)))
    task = Task(tuple(map(str, range(classes))), text, dim, 20.5)
    return Federation(names, names, Data(x, y, bounds, np.arange(clients)), task)


def probe(name: str, clients: int, engine: str, count: int = 2) -> dict:
    federation = synthetic(clients)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    method = build(name, federation.task, batch=10)
    chunk = {"serial": 1, "stacked": 0}[engine]
    whole, _, chunk = measure(method, federation, chunk, count)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "round": whole,
        "chunk": chunk,
        "peak": peak / 2**20,
        "before": before / 2**20,
        "floor": floor(method, federation, 10),
    }


def apart(**what) -> dict:
    """In a process of its own, so that peak memory is its own."""
    call = [sys.executable, __file__, "--probe", json.dumps(what)]
    return json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout)


def growth() -> None:
    rows = []
    for clients in (3, 30, 300, 3000, 30000):
        for engine in ("stacked", "serial"):
            found = apart(name="fedavg", clients=clients, engine=engine, count=2 if clients > 3000 else 5)
            rows.append(
                [str(clients), engine, str(found["chunk"]), f"{found['round']:.4f}", f"{found['floor']:.4f}",
                 f"{found['round'] / found['floor']:.1f}", f"{found['peak']:.2f}", f"{found['before']:.2f}"]
            )  # fmt: skip
    print("\na FedAvg round (linear head, 256 dimensions, 10 images a client, batch 10), CPU-seconds and peak GiB")
    console.rows(["clients", "engine", "chunk", "round", "floor", "ratio", "peak GiB", "GiB before"], rows)


def rotations() -> None:
    found = apart(name="fedot", clients=3000, engine="stacked", count=1)
    verdict = "met" if found["peak"] <= 3 else "MISSED"
    print(
        f"\n3,000 clients with private 256×256 rotations (FedOT, all asked each round): peak {found['peak']:.2f} GiB "
        f"(bar 3: {verdict}), {found['round']:.1f} CPU-seconds a round"
    )


if __name__ == "__main__":
    main()
