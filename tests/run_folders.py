"""Run folders written by hand, so that every number of a table or page is known without training."""

from __future__ import annotations

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
    Settings,
)
from fedvlm.training.folder import RunFolder

DOMAINS = ("art", "photo", "sketch")


def write(
    root: Path,
    method: str,
    unseen: str | None = None,
    seed: int = 1,
    rounds: int = 3,
    shares: bool = True,
    domains: tuple[str, ...] = DOMAINS,
    on: str = "",
    metrics: dict[str, float] | None = None,
    budget: int = 0,
    **more: float,
) -> RunFolder:
    """A run folder as `train` writes it; the test accuracy of client j in round k is 0.3 + (10 j + seed + 5 k) / 100.

    metrics: further metrics, by name the mean over clients; all examples together give half of it. budget: rounds= of the
    run, where it needed fewer. more: settings of the local rule."""
    records: list[RoundRecord] = []
    for k in range(rounds + 1):
        clients: dict[str, ClientScores] = {}
        for j, name in enumerate(domains):
            score = {"test": round(0.3 + (10 * j + seed + 5 * k) / 100, 6)}
            clients[name] = {"shared": score} if shares else {}
            clients[name] |= {"personal": score} if name != unseen else {}
        own = float(np.mean([c["personal"]["test"] for c in clients.values() if "personal" in c]))
        g = clients[unseen]["shared"]["test"] if unseen and shares else None
        record: RoundRecord = {"round": k, "personal": {"test": own}, "clients": clients, "G": g, "P": own, "asked": 2}
        record |= {"bytes_up": 1500 * (k > 0), "bytes_down": 500 * (k > 0)}
        if metrics:
            record["metrics"] = {m: {"personal": {"test": v, "test_pooled": v / 2}} for m, v in metrics.items()}
        records.append(record)
    config: Settings = {
        "rounds": budget or rounds,
        "seed": seed,
        "unseen": [unseen] if unseen else [],
        "split": [60, 20, 20],
    }
    config["protocol"] = "one"
    result = Result(
        last=records[-1],
        selected=records[-1],
        parameters={"shared": 4, "private": 0},
        bytes_down=sum(r["bytes_down"] for r in records),
        bytes_up=sum(r["bytes_up"] for r in records),
        seconds=1.0,
        unseen=[unseen] if unseen else [],
    )
    record = RunRecord(
        identity="-".join(map(str, [method + on, unseen, seed, rounds, *more.values()])),
        method=MethodRecord(method, on=on),
        adapter=PartRecord("head"),
        local=PartRecord("sgd", {"lr": 0.1, **more}),
        merge=PartRecord("mean"),
        config=config,
        given={},
        data=DataRecord("toy", "f", "accuracy", 90, list(domains), ["a", "b"]),
        backbone=BackboneRecord("tiny", "1", 4, 1.0),
        versions={"fedvlm": "0", "commit": "abc"},
        clients=list(domains),
        result=result,
    )
    run = RunFolder(root / record.identity.replace("/", "_"))
    run.write("run.json", record.to_json().encode())
    for one in records:
        run.append(one)
    return run


def many(root: Path, seeds: tuple[int, ...] = (1, 2)) -> list[RunFolder]:
    """Three targets × two seeds; methods that needed different numbers of rounds; one that shares nothing."""
    runs = []
    for target in DOMAINS:
        for seed in seeds:
            runs += [write(root, "zero-shot", target, seed, 0), write(root, "fedavg", target, seed, 3, budget=7)]
            runs += [write(root, "fedot", target, seed, 7)]
            runs += [write(root, "local-only", target, seed, 3, shares=False, budget=7)]
    return runs


CASES = {
    "one run, names with $": lambda root: [write(root, "fedavg", "a$^", domains=("a$^", "$b", "c"))],
    "frozen only": lambda root: [write(root, "zero-shot", "art", rounds=0)],
    "many": many,
    "three seeds": lambda root: many(root, (1, 2, 3)),
    "no client held out": lambda root: [write(root, "zero-shot", rounds=0), write(root, "fedavg")],
    "nothing shared": lambda root: [write(root, "local-only", d, shares=False) for d in DOMAINS],
    "nine methods": lambda root: [write(root, f"method-{k}-of-a-long-name", "art", k) for k in range(9)],
}


def with_outputs(run: RunFolder, seed: int = 0, shift: float = 0.0) -> None:
    """Twelve test images of each client, with logits that are right more often the larger the shift is."""
    rng, record = np.random.default_rng(seed), run.record
    client = np.repeat(np.arange(len(record.clients)), 12)
    label = rng.integers(0, len(record.data.classes), len(client))
    item = np.arange(len(client))
    logits = rng.normal(size=(len(client), len(record.data.classes)))
    logits[item, label] += shift
    features = rng.normal(size=(len(client), 5))
    found = {"client": client, "label": label, "item": item, "shared.logits": logits, "personal.logits": logits + 0.1}
    found["personal.logits"] = logits + rng.normal(size=logits.shape)
    run.write("outputs.safetensors", save(found | {"shared.features": features, "personal.features": features + shift}))
