"""`fedvlm convert KIND SOURCE OUT [key=value …]`"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedvlm import console
from fedvlm.commands.values import values
from fedvlm.errors import FedvlmError
from fedvlm.keys import Key, Range

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
    if args.kind == "leaf":
        from fedvlm.convert import leaf

        said = leaf.convert(source, out, **given)  # type: ignore[arg-type]
    else:
        from fedvlm.convert import coop

        said = coop.convert(source, out, **given)  # type: ignore[arg-type]
    console.line(f"{out}: {said}")
