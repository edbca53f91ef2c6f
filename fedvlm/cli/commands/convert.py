"""`fedvlm convert KIND SOURCE OUT [key=value …]`"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from fedvlm.cli.commands.values import values
from fedvlm.config.keys import Key
from fedvlm.core.ranges import Range
from fedvlm.errors import FedvlmError
from fedvlm.system import console

KEYS = {
    "leaf": [
        Key("users", "str", [], "only these", length=-1),
        Key("classes", "int", 0, "only the first so many; 10 are the digits", range=Range(0)),
        Key("at_least", "int", 1, "examples that a user must have", range=Range(1)),
    ],
    "coop": [
        Key("images", "str", "", "the folder that the file's paths start from"),
        Key("only", "str", "", "train, val or test"),
    ],
    "domainnet": [
        Key("classes", "str", [], "only these; none: FedBN's ten", length=-1),
        Key("only", "str", "", "train or test"),
    ],
    "prostate": [Key("every", "int", 1, "take only every so many slices", range=Range(1))],
}


def main(args: argparse.Namespace) -> None:
    given, source, out = (
        values(KEYS[args.kind], args.pairs),
        Path(args.source).expanduser(),
        Path(args.out).expanduser(),
    )
    if not source.exists():
        raise FedvlmError(f"{source}: no such file or folder")
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise FedvlmError(f"{out} is there already; give a new place")
    converter = import_module(f"fedvlm.data.convert.{args.kind}")
    said = converter.convert(source, out, **given)
    console.line(f"{out}: {said}")
