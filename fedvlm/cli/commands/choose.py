"""`fedvlm choose data=FOLDER [goal=…] [minutes=10] [mb=…] [private=…] [methods=A,B] [key=value …]`"""

from __future__ import annotations

import argparse

from fedvlm.cli.commands.output import show_table
from fedvlm.config.config import key_values
from fedvlm.errors import FedvlmError
from fedvlm.system import console
from fedvlm.system.formatting import duration


def main(args: argparse.Namespace) -> None:
    from fedvlm.studies import choose  # imports torch

    given: dict[str, object] = dict(key_values(args.pairs))
    for name in ("minutes", "mb", "private"):
        if name in given:
            given[name] = number(name, str(given[name]))
    if "methods" in given:
        given["methods"] = str(given["methods"]).split(",")
    if "seeds" in given:
        given["seeds"] = [int(s) for s in str(given["seeds"]).split(",")]
    found = choose.choose(**given)  # type: ignore[arg-type]
    for name in ("method", "settings", "sentence", "command", "not_tried", "seconds"):
        console.collect(name, getattr(found, name))
    console.line(found.sentence, "bold")
    console.line("")
    show_table(found.runs, args)
    for name, why in found.not_tried.items():
        console.note(f"not tried: {name}: {' '.join(why.split())}")
    console.note(f"{duration(found.seconds)} in all; the same command goes on where it stopped")
    console.line(f"next: {found.command}")


def number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FedvlmError(f"{name}={text}: expected a number") from None
