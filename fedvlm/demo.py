"""`fedvlm demo`: what federated adaptation buys over the frozen model, on real images, with nothing to fetch.

Emoji in seven drawing styles; each style is a client; each in turn is the client nobody has seen.
"""

from __future__ import annotations

from pathlib import Path

from fedvlm import console
from fedvlm.report import figures, tables
from fedvlm.runs import Run

METHODS = ("zero-shot", "fedavg", "fedclip", "fedot")
DEFAULTS = {
    "data": "emoji",
    "protocol": "leave-one-domain-out",
    "seeds": "50,77,98",
    "rounds": "10",
    "evaluate": "2",
    "out": "runs/demo",
}


def conclude(runs: list[Run], picture: Path) -> None:
    """What the table says, in words, and a figure."""
    for verdict in tables.against(tables.summarise(runs)):
        console.out.print(verdict)
    figures.figure(runs, picture)
    console.out.print(f"figure: {picture} · runs: {picture.parent}")
    console.out.print(
        f"next: fedvlm predict {runs[-1].folder} IMAGE · fedvlm report {picture.parent} · fedvlm run fedot data=FOLDER --dry"
    )
