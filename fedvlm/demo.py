"""`fedvlm demo`: what federated adaptation buys over the frozen model, on real images, with nothing to fetch.

Emoji in seven drawing styles; each style is a client; each in turn is the client nobody has seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from fedvlm import console, train
from fedvlm.config import Setup, resolve
from fedvlm.report import figures, tables

METHODS = ("zero-shot", "fedavg", "fedclip", "fedot")
DEFAULTS = {
    "data": "emoji",
    "protocol": "leave-one-domain-out",
    "seeds": "50,77,98",
    "rounds": "10",
    "evaluate": "2",
    "out": "runs/demo",
}


def demo(given: dict[str, str], csv: str | None, load: Callable, go: Callable) -> None:
    began = time.monotonic()
    setups: list[Setup] = [resolve(m, DEFAULTS | given) for m in METHODS]
    pool = load(setups[0])
    jobs = [(j, train.place(j, pool)) for s in setups for j in train.runs_of(s, pool)]
    runs = go(jobs, pool, setups[0].config.jobs)
    table = tables.summarise(runs)
    console.show(table)
    for verdict in tables.against(table):
        console.out.print(verdict)
    picture = Path(setups[0].config.out) / "demo.png"
    figures.figure(runs, picture)
    if csv:
        tables.write_csv(table, Path(csv))
    console.out.print(f"figure: {picture} · runs: {picture.parent} · {time.monotonic() - began:.0f} s in all")
    console.out.print(
        "next: fedvlm predict RUN image.png · fedvlm report runs/demo · fedvlm run fedot data=YOUR/FOLDER --dry"
    )
