"""CPU-seconds of a round on one thread with stored features, against a naive implementation and a lower bound, in one run.

    python benchmarks/speed.py --data ../shared/data/pacs
    python benchmarks/speed.py gpu                                 # see speed_gpu.py
    python benchmarks/speed.py --data ../shared/data/pacs --base REV     # this version of fedvlm against another

A round is training plus the evaluation of all splits of all clients. The lower bound is the time of the round's matrix
products (and, for rotations, linear solves) alone, each kind as one large piece. The naive implementation runs both encoders
on every batch and encodes every split again each round; it is measured on a sample. Required times are printed beside the
measured ones.

--base checks out the revision REV, starts a process for each of the two versions, and runs the same rounds with them in
turn; the best of several repetitions counts, since other work on the machine only makes a round slower.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn import functional as F

import fedvlm
from fedvlm import backbones
from fedvlm.config.config import Config, Layout, Setup, resolve
from fedvlm.core.adapter import Task
from fedvlm.core.cohort import Cohort
from fedvlm.core.data import Data
from fedvlm.core.state import State
from fedvlm.data.clients import Federation, federate
from fedvlm.data.source import decode
from fedvlm.engines.stacked import Stacked
from fedvlm.evaluation.views import evaluate
from fedvlm.rounds.method import Method
from fedvlm.system import console

if TYPE_CHECKING:  # absent from versions before fedvlm.api, which --base can measure
    from fedvlm.core.state import Message
    from fedvlm.data.pool import Pool

REQUIRED = {"fedclip": 0.27, "fedavg": 0.03, "ditto": 0.06}  # CPU-seconds of a round on PACS, at most
MEMORY = 3  # GiB that 3,000 private rotations may take
SCALE = 20.5  # mini-clip's logit scale


class Case(NamedTuple):
    method: str
    clients: int = 0  # by Dirichlet 0.5; 0: one per domain, the first held out
    synthetic: bool = False  # random embeddings, 10 per client, instead of the data

    @property
    def batch(self) -> int:
        return 10 if self.clients else 32

    @property
    def name(self) -> str:
        return f"{self.method}, {self.clients:,} clients" if self.clients else f"{self.method}, one client per domain"


MANY = [Case(method, clients) for clients in (20, 100, 500) for method in ("fedavg", "ditto")]
CASES = [Case("fedclip"), Case("fedot"), *MANY]
COMPARED = [Case("fedclip"), *MANY, Case("fedavg", 30_000, synthetic=True)]


def main() -> None:
    if sys.argv[1:2] == ["gpu"]:
        import speed_gpu

        return speed_gpu.main(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", default="../shared/data/pacs", help="a folder of domain/class/image, or emoji (embedded)"
    )
    parser.add_argument("--base", default="", metavar="REV", help="compare with this revision instead")
    parser.add_argument("--repetitions", type=int, default=15, help="with --base: rounds of each case and version")
    parser.add_argument("--probe", default="", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.probe:
        return print(json.dumps(probe(**json.loads(args.probe))))
    data = str(Path(args.data).resolve()) if Path(args.data).is_dir() else "emoji"
    if args.serve:
        return serve(data)
    if data == "emoji" and args.data != "emoji":
        print(f"{args.data}: no such folder; the embedded emoji are used. Required times are for PACS")
    if args.base:
        return compare(data, args.base, args.repetitions)
    pool = encode(resolve("zero-shot", {"data": data}))
    print_rounds(pool)
    print_naive(pool)
    print_growth()
    print_rotations()


def encode(setup: Setup) -> Pool:
    if importlib.util.find_spec("fedvlm.api"):
        from fedvlm import api

        return api.new_pools().encode(setup)
    former = importlib.import_module("fedvlm.commands")
    return cast("Pool", former.encoded(setup))


def message_of(state: State) -> Message:
    """What is sent down for evaluation; before there were messages, the shared parameters themselves."""
    return state.message() if hasattr(state, "message") else cast("Message", state.shared)


def guard_of(method: Method, federation: Federation) -> dict[str, Any]:
    """The check of replies, as in every run; versions before it had none."""
    if not importlib.util.find_spec("fedvlm.rounds.guard"):
        return {}
    from fedvlm.rounds.guard import Guard

    declared, extras = np.diff(federation.data.bounds, axis=1), federation.data.extras
    return {"guard": Guard(method, federation.names, declared, extras, Config.bound)}


class Rounds:
    """A method on a federation, one round after the other."""

    def __init__(self, method: Method, federation: Federation, chunk: int = 0):
        self.method, self.federation, self.round = method, federation, 0
        self.engine = Stacked(method, federation.data, chunk)
        self.state = method.init(len(federation.names))
        self.guard = guard_of(method, federation)

    def next(self, checked: bool = True) -> tuple[float, float]:
        """CPU-seconds of the next round, and those of its training; `checked`: replies pass the guard."""
        self.round += 1
        guard = self.guard if checked else {}
        began = time.process_time()
        self.state = self.method.round(self.state, Cohort(self.engine, self.federation.seen, self.round, **guard))
        trained = time.process_time()
        everybody = Cohort(self.engine, np.arange(self.federation.scored), self.round, **guard)
        evaluate(self.method, self.federation, everybody, message_of(self.state))
        return time.process_time() - began, trained - began


def measure(method: Method, federation: Federation, chunk: int = 0, count: int = 7) -> tuple[float, float, int]:
    """Median CPU-seconds of a whole round and of its training, and the number of clients side by side."""
    rounds = Rounds(method, federation, chunk)
    rounds.next()  # warms up
    whole, train = np.median([rounds.next() for _ in range(count)], axis=0)
    return float(whole), float(train), rounds.engine.chunk


def build(name: str, task: Task, batch: int) -> Method:
    setup = resolve(name, {"batch": batch})
    return Method.build(setup.adapter, setup.local, setup.merge, task)


def prepare(case: Case, pool: Pool) -> tuple[Method, Federation]:
    if case.synthetic:
        federation = synthetic(case.clients)
    elif case.clients:
        federation = federate(pool, Layout(partition="dirichlet", alpha=0.5, clients=case.clients), 50)
    else:
        federation = federate(pool, Layout(unseen=(pool.source.domains[0],)), 50)
    return build(case.method, federation.task, case.batch), federation


def print_rounds(pool: Pool) -> None:
    rows = []
    for case in CASES:
        method, federation = prepare(case, pool)
        whole, train, chunk = measure(method, federation)
        bound = lower_bound(method, federation, case.batch)
        required = REQUIRED.get(case.method)
        verdict = "" if required is None else ("met" if whole <= required else "MISSED")
        rows.append(
            [case.method, str(len(federation.seen)), str(chunk), f"{whole:.4f}", f"{train:.4f}", f"{bound:.4f}",
             f"{whole / bound:.1f}", f"{required:.2f}" if required else "", verdict]
        )  # fmt: skip
    print(f"\na round on {pool.source.name}, CPU-seconds on 1 thread")
    columns = ["method", "clients", "chunk", "round", "of it training", "lower bound", "ratio", "required", "verdict"]
    console.rows(columns, rows)


def lower_bound(method: Method, federation: Federation, batch: int) -> float:
    """Time of the matrix products alone: three times forward for training, once for scoring, in full batches."""
    d, c = method.task.dim, len(method.task.classes)
    shapes = {"w1": (d, d), "w2": (d, d)} if "w1" in method.initial else {}
    shapes |= {"text": (c, d)}
    examples = int(federation.data.counts("train")[federation.seen].sum())
    passes = 2 if any(k.startswith("personal.") for k in method.newcomer) else 1  # Ditto trains a second model
    total = 0.0
    for rows, cols in shapes.values():
        w, x = torch.randn(rows, cols), torch.randn(batch, cols)
        total += passes * 3 * examples / batch * timed(partial(torch.matmul, x, w.T))
        total += passes * timed(partial(torch.matmul, federation.data.x, w.T), 10)
    if (
        "skew" in method.newcomer
    ):  # a factorisation with a batch of right-hand sides, and its transpose for the gradient
        a, x = torch.eye(d) + 0.01 * torch.randn(d, d), torch.randn(d, batch)
        factors = torch.linalg.lu_factor(a)
        solve = timed(lambda: torch.linalg.solve(a, x), 50) + timed(lambda: torch.linalg.lu_solve(*factors, x), 50)
        total += examples / batch * solve
        total += len(federation.seen) * timed(lambda: torch.linalg.solve(a, torch.eye(d)), 20)
    return total


def timed(work: Callable[[], object], times: int = 300) -> float:
    for _ in range(3):
        work()
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def print_naive(pool: Pool, sample: int = 48) -> None:
    """FedCLIP's round as public code runs it: every batch through both encoders, every split encoded again each round."""
    backbone = backbones.load("mini-clip")
    images = [decode(data) for k, data in pool.source.read() if k < sample]
    phrases = [f"a photo of a {c}" for c in pool.task.classes]
    method, federation = prepare(Case("fedclip"), pool)
    params = {k: v.clone().requires_grad_() for k, v in method.initial.items()}
    optimiser = torch.optim.Adam(params.values())
    y = torch.zeros(32, dtype=torch.long)

    def step() -> None:
        x, text = backbone.images(images[:32]), backbone.texts(phrases)
        assert text is not None
        mask = torch.softmax(torch.tanh(x @ params["w1"].T + params["b1"]) @ params["w2"].T + params["b2"], -1)
        loss = F.cross_entropy(SCALE * F.normalize(mask * x, dim=-1) @ text.T, y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    per_step, per_image = timed(step, 3), timed(lambda: backbone.images(images), 2) / len(images)
    steps = sum(-(-n // 32) for n in federation.data.counts("train")[federation.seen])
    naive = per_step * steps + per_image * len(federation.data.x)
    ours, _, _ = measure(method, federation)
    formula = f"{steps} steps × {per_step:.3f} + {len(federation.data.x)} images × {per_image:.4f}"
    print(f"\na naive FedCLIP round: {formula} = {naive:.1f} CPU-seconds")
    print(f"(from a sample of {len(images)} images); ours {ours:.3f}; ratio {naive / ours:.0f}×")


def synthetic(clients: int, dim: int = 256, classes: int = 7, sizes: tuple[int, int, int] = (6, 2, 2)) -> Federation:
    """Random embeddings and labels; sizes: training, validation and test examples of each client."""
    draw = torch.Generator().manual_seed(0)
    each = sum(sizes)
    text = F.normalize(torch.randn(classes, dim, generator=draw), dim=-1)
    x = F.normalize(torch.randn(clients * each, dim, generator=draw), dim=-1)
    y = torch.randint(classes, (clients * each,), generator=draw)
    bounds = np.arange(clients)[:, None] * each + np.array([0, sizes[0], sizes[0] + sizes[1], each])
    names = tuple(map(str, range(clients)))
    task = Task(tuple(map(str, range(classes))), text, dim, SCALE)
    return Federation(names, names, Data(x, y, bounds, np.arange(clients)), task)


def probe(name: str, clients: int, engine: str, count: int) -> dict[str, float]:
    """CPU-seconds of a round on synthetic data, and the peak memory of this process in GiB."""
    federation = synthetic(clients)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    method = build(name, federation.task, batch=10)
    whole, _, chunk = measure(method, federation, {"serial": 1, "stacked": 0}[engine], count)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bound = lower_bound(method, federation, 10)
    return {"round": whole, "chunk": chunk, "peak": peak / 2**20, "before": before / 2**20, "bound": bound}


def probe_in_process(name: str, clients: int, engine: str, count: int) -> dict[str, float]:
    """In a process of its own, since peak memory is measured per process."""
    given = {"name": name, "clients": clients, "engine": engine, "count": count}
    call = [sys.executable, __file__, "--probe", json.dumps(given)]
    found: dict[str, float] = json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout)
    return found


def print_growth() -> None:
    rows = []
    for clients in (3, 30, 300, 3000, 30000):
        for engine in ("stacked", "serial"):
            found = probe_in_process("fedavg", clients, engine, count=2 if clients > 3000 else 5)
            rows.append(
                [str(clients), engine, str(found["chunk"]), f"{found['round']:.4f}", f"{found['bound']:.4f}",
                 f"{found['round'] / found['bound']:.1f}", f"{found['peak']:.2f}", f"{found['before']:.2f}"]
            )  # fmt: skip
    print("\na FedAvg round (linear head, 256 dimensions, 10 images per client, batch 10), CPU-seconds and peak GiB")
    console.rows(["clients", "engine", "chunk", "round", "lower bound", "ratio", "peak GiB", "GiB before"], rows)


def print_rotations() -> None:
    found = probe_in_process("fedot", 3000, "stacked", count=1)
    verdict = "met" if found["peak"] <= MEMORY else "MISSED"
    print(
        f"\n3,000 clients with private 256×256 rotations (FedOT, all asked each round): peak {found['peak']:.2f} GiB "
        f"(at most {MEMORY} required: {verdict}), {found['round']:.1f} CPU-seconds per round"
    )


def compare(data: str, base: str, repetitions: int) -> None:
    """Runs the cases with both versions in turn, and prints the best time of each."""
    root = Path(__file__).resolve().parents[1]
    rows = []
    with worktree(root, base) as other, Version(other, data) as before, Version(root, data) as after:
        for k, case in enumerate(COMPARED):
            found: dict[Version, list[tuple[float, float]]] = {before: [], after: []}
            for repetition in range(1 + repetitions):
                for version in (before, after) if repetition % 2 else (after, before):
                    found[version].append(version.round(k))
            old, new = (np.min(found[v][1:], axis=0) for v in (before, after))  # the first round warms up
            plain, (unchecked, checked) = min(old), new
            numbers = [f"{x:.4f}" for x in (plain, unchecked, checked)]
            rows.append([case.name, *numbers, f"{unchecked / plain:.3f}", f"{checked / plain:.3f}"])
    print(
        f"\na round, CPU-seconds on 1 thread, best of {repetitions}: {base} and this tree, without and with the guard's"
    )
    print("checks of every reply; of the other version the faster of the two counts")
    console.rows(["", base, "this tree", "with checks", "ratio", "ratio with checks"], rows)


@contextmanager
def worktree(root: Path, revision: str) -> Iterator[Path]:
    """The revision, checked out in a temporary folder."""
    with tempfile.TemporaryDirectory() as work:
        tree = Path(work).resolve() / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", str(tree), revision], cwd=root, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, check=True)


class Version:
    """A process that imports fedvlm from a tree and runs rounds on request."""

    def __init__(self, tree: Path, data: str):
        self.tree, self.data = tree, data

    def __enter__(self) -> Version:
        call = [sys.executable, __file__, "--serve", "--data", self.data]
        env = os.environ | {"PYTHONPATH": str(self.tree)}
        self.process = subprocess.Popen(call, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        package = Path(self.ask())
        if not package.is_relative_to(self.tree):
            raise RuntimeError(f"fedvlm was imported from {package}, not from {self.tree}")
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it failed; `ask` says so
            self.process.stdin.close()
        self.process.wait()

    def ask(self, question: str = "") -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(question and question + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer:
            raise RuntimeError(f"fedvlm of {self.tree} failed; see the error above")
        return answer

    def round(self, case: int) -> tuple[float, float]:
        """CPU-seconds of two rounds of a case (by its place in COMPARED), without and with the checks of the guard."""
        unchecked, checked = map(float, self.ask(str(case)).split())
        return unchecked, checked


def serve(data: str) -> None:
    """Answers with the place of the imported package, then, for each case number read, with the CPU-seconds of a round."""
    answers = sys.stdout
    current, rounds = -1, None
    with redirect_stdout(sys.stderr):  # progress must not mix with the answers
        pool = encode(resolve("zero-shot", {"data": data}))
        print(Path(fedvlm.__file__).resolve(), file=answers, flush=True)
        for line in sys.stdin:
            if rounds is None or int(line) != current:
                current = int(line)
                rounds = Rounds(*prepare(COMPARED[current], pool))
            print(rounds.next(checked=False)[0], rounds.next()[0], file=answers, flush=True)


if __name__ == "__main__":
    main()
