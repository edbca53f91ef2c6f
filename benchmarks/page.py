"""How long the page takes and how large it is: `python benchmarks/page.py` (12 methods × 12 runs; 12 runs of 500 clients,
without and with --details).

The run folders are made up; see `written`.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from fedvlm.core.records import (
    BackboneRecord,
    ClientScores,
    DataRecord,
    MethodRecord,
    PartRecord,
    Result,
    RoundRecord,
    RunRecord,
)
from fedvlm.report.page import PageOptions, page
from fedvlm.training.folder import RunFolder

SHARED = PartRecord("mean")


def written(root: Path, method: str, seed: int, unseen: str, clients: list[str], rounds: int) -> RunFolder:
    """A run folder with random scores, weights and gaps, in the form that training writes."""
    draw = np.random.default_rng([seed, *method.encode()])
    skill = 0.5 + 0.3 * draw.random(len(clients))
    records: list[RoundRecord] = []
    for k in range(0 if method == "zero-shot" else rounds, -1, -1):
        score = np.clip(skill * (1 - np.exp(-(rounds - k + 2 + 4 * draw.random()) / 8)), 0, 1).round(6).tolist()
        own: dict[str, ClientScores] = {
            n: {"shared": {"test": s}} | ({} if n == unseen else {"personal": {"test": s}})  # type: ignore[misc]
            for n, s in zip(clients, score, strict=True)
        }
        trained = [n for n in clients if n != unseen]
        mean = float(np.mean([own[n]["personal"]["test"] or 0 for n in trained]))
        record: RoundRecord = {
            "round": rounds - k,
            "clients": own,
            "personal": {"test": mean},
            "shared": {"test": mean},
        }
        record |= {"G": own[unseen]["shared"]["test"], "P": mean, "asked": len(trained), "seconds": 1.0}
        record |= {"bytes_up": 10_000, "bytes_down": 10_000, "gap_variance": float(draw.random())}
        record["weights"] = dict(zip(trained, draw.dirichlet(np.ones(len(trained))).tolist(), strict=True))
        records.append(record)
    result = Result(
        records[-1], records[-1], {"shared": 9, "private": 0}, 10_000 * rounds, 10_000 * rounds, 9.0, [unseen]
    )
    record_of_run = RunRecord(
        identity=f"{method}-{unseen}-{seed}",
        method=MethodRecord(method),
        adapter=PartRecord("head"),
        local=PartRecord("sgd"),
        merge=SHARED,
        config={"rounds": rounds, "seed": seed, "unseen": [unseen], "split": [60, 20, 20], "protocol": "one"},
        given={},
        data=DataRecord("made-up", "f", "accuracy", 1000, clients[:10], ["a", "b"]),
        backbone=BackboneRecord("tiny", "1", 4, 1.0),
        clients=clients,
        result=result,
    )
    run = RunFolder(root / record_of_run.identity)
    run.write("run.json", replace(record_of_run, homes={c: c for c in clients}).to_json().encode())
    for one in records:
        run.append(one)
    return run


def many_methods(root: Path, methods: int = 12, seeds: int = 3, rounds: int = 100) -> list[RunFolder]:
    """Each method with four targets and so many seeds."""
    clients = ["art", "cartoon", "photo", "sketch"]
    names = ["zero-shot", *(f"method-{k}" for k in range(1, methods))]
    return [written(root, m, s, u, clients, rounds) for m in names for s in range(seeds) for u in clients]


def many_clients(root: Path, clients: int = 500, methods: int = 4, seeds: int = 3, rounds: int = 50) -> list[RunFolder]:
    names = [f"client-{k:03}" for k in range(clients)]
    return [
        written(root, m, s, names[0], names, rounds)
        for m in ["zero-shot", *(f"method-{k}" for k in range(1, methods))]
        for s in range(seeds)
    ]


def with_outputs(runs: list[RunFolder], each: int = 20) -> list[RunFolder]:
    """Random answers to so many test images of each client."""
    for seed, run in enumerate(runs):
        draw, classes = np.random.default_rng(seed), len(run.record.data.classes)
        client = np.repeat(np.arange(len(run.record.clients)), each)
        found = {"client": client, "label": draw.integers(0, classes, len(client)), "item": np.arange(len(client))}
        for view in ("shared", "personal"):
            found[f"{view}.logits"] = draw.normal(size=(len(client), classes))
            found[f"{view}.features"] = draw.normal(size=(len(client), 64))
        run.write("outputs.safetensors", save(found))
    return runs


def main() -> None:
    cases = {
        "12 methods × 12 runs": (many_methods, PageOptions()),
        "500 clients, 12 runs": (many_clients, PageOptions()),
        "the same with --details": (lambda root: with_outputs(many_clients(root)), PageOptions(details=True)),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, (make, options) in cases.items():
            runs, path = make(Path(folder) / name.split()[0]), Path(folder) / f"{name.split()[0]}.html"
            began, used = time.perf_counter(), time.process_time()
            page(runs, path, options)
            took, cpu = time.perf_counter() - began, time.process_time() - used
            print(f"{name}: {took:.1f} s ({cpu:.1f} CPU-s), {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
