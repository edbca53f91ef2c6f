"""Many clients with ten examples each, in one process on one thread: CPU-seconds and GiB from 1,000 clients to a million.

    python benchmarks/million.py                    # 1,000, 10,000, 100,000 and 1,000,000 clients (5 CPU-minutes)
    python benchmarks/million.py --clients 1000,10000

FedAvg with a linear head on embeddings of 32 numbers, 7 classes, batch 10. `set up`: reading the file, fingerprint,
partition, run folder. `a tenth of a per cent` and `all asked`: a round of training without evaluation; `score all`: the
evaluation of all clients' splits. `GiB own` is the most memory of the process itself, `mapped` the most of mapped files that
was resident beside it, which the system takes back when it needs room; both are sampled every 20 ms (Linux). The floor of a
round is to copy the examples of the clients that are asked and to compute three batched matrix products, in chunks of 1,024
clients; that of scoring is one product with all examples.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from fedvlm.config.config import resolve
from fedvlm.core.records import RoundRecord
from fedvlm.data.pool import Pools
from fedvlm.system import console
from fedvlm.training.planned_run import PlannedRun
from fedvlm.training.train import train

EACH, DIM, CLASSES, CHUNK = 10, 32, 7, 1024
SHARES = {"a tenth of a per cent": 0.001, "all asked": 1.0}
Found = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1000,10000,100000,1000000")
    parser.add_argument("--probe", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        return print("found", json.dumps(probe(**json.loads(args.probe))))
    rows = []
    for clients in map(int, args.clients.split(",")):
        with tempfile.TemporaryDirectory() as work:
            write(Path(work) / "data.safetensors", clients)
            for name, share in SHARES.items():
                f = probe_in_process(clients=clients, share=share, work=work)
                rows.append(
                    [f"{clients:,}", name, f"{f['set up']:.2f}", f"{f['round']:.3f}", f"{f['floor']:.3f}",
                     f"{f['round'] / f['floor']:.1f}", f"{f['score']:.2f}", f"{f['score floor']:.2f}",
                     f"{f['score'] / f['score floor']:.1f}", f"{f['end']:.2f}", f"{f['RssAnon']:.2f}",
                     f"{f['RssFile']:.2f}", f"{f['data GiB']:.2f}", f"{f['folder MB']:.1f}"]
                )  # fmt: skip
    columns = [
        "clients",
        "asked",
        "set up",
        "round",
        "its floor",
        "× floor",
        "score all",
        "its floor ",
        "× floor ",
        "end",
        "GiB own",
        "mapped",
    ]
    print(f"\nCPU-seconds on 1 thread, {EACH} examples a client")
    console.rows([*columns, "GiB of data", "folder MB"], rows)


def write(path: Path, clients: int) -> None:
    draw, count = torch.Generator().manual_seed(0), clients * EACH
    tensors = {"x": torch.randn(count, DIM, generator=draw), "y": torch.randint(CLASSES, (count,), generator=draw)}
    tensors["text"] = torch.randn(CLASSES, DIM, generator=draw)
    save_file(tensors, path, {"classes": json.dumps([f"class {k}" for k in range(CLASSES)])})


def probe_in_process(**given: float | str) -> Found:
    """In a process of its own, since peak memory is measured per process."""
    call = [sys.executable, __file__, "--probe", json.dumps(given)]
    env = os.environ | {"FEDVLM_CACHE": str(Path(str(given["work"])) / "cache"), "OMP_NUM_THREADS": "1"}
    out = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    found: Found = json.loads(out[out.rindex("found") + len("found") :])
    return found


class Memory(threading.Thread):
    """Samples the resident memory of this process: its own, and that of mapped files, in GiB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stopped = threading.Event()
        self.most = {"RssAnon": 0.0, "RssFile": 0.0}

    def run(self) -> None:
        while not self.stopped.wait(0.02):
            lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
            found = {words[0].rstrip(":"): int(words[1]) / 2**20 for words in lines if words[0][:-1] in self.most}
            self.most = {k: max(v, found[k]) for k, v in self.most.items()}


def probe(clients: int, share: float, work: str) -> Found:
    """Rounds 0 and 2 are evaluated, round 1 only trains."""
    torch.set_num_threads(1)
    keys = {"data": f"{work}/data.safetensors", "partition": "iid", "clients": clients, "participation": share}
    setup = resolve("fedavg", keys | {"batch": 10, "rounds": 2, "evaluate_every": 2, "threads": 1})
    memory = Memory()
    memory.start()
    marks = [time.process_time()]
    out = Path(work) / f"run-{share}"
    planned = PlannedRun(setup, Pools().load(setup), out)
    _ = planned.method
    marks.append(time.process_time())

    def on_round(record: RoundRecord) -> None:
        marks.append(time.process_time())

    train(planned, on_round)
    end = time.process_time()
    memory.stopped.set()
    memory.join()
    began, ready, zero, one, two = marks
    x = planned.federation.data.x
    return {
        "set up": ready - began,
        "score": zero - ready,  # and the run folder is made
        "round": one - zero,
        "end": end - two,  # final outputs and the record
        **memory.most,
        "data GiB": x.nbytes / 2**30,
        "folder MB": sum(p.stat().st_size for p in out.iterdir()) / 1e6,
        "floor": floor(x, max(1, round(share * clients))),
        "score floor": score_floor(x),
    }


def floor(x: torch.Tensor, asked: int) -> float:
    weight = torch.randn(CHUNK, DIM, CLASSES)
    began = time.process_time()
    for first in range(0, asked, CHUNK):
        n = min(CHUNK, asked - first)
        rows = torch.arange(first * EACH, (first + n) * EACH).view(n, EACH)[:, :6]
        taken, mine = x.index_select(0, rows.reshape(-1)).view(n, 6, DIM), weight[:n]
        logits = torch.bmm(taken, mine)
        torch.bmm(taken.mT, logits)  # the gradient
        mine + torch.bmm(taken.mT, logits)  # as much again for the step and the loss
    return time.process_time() - began


def score_floor(x: torch.Tensor) -> float:
    weight = torch.randn(DIM, CLASSES)
    began = time.process_time()
    for part in x.split(2048):
        (part @ weight).logsumexp(-1)
    return time.process_time() - began


if __name__ == "__main__":
    main()
