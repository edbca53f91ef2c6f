"""The command line that tools/convert_*.py share: `python tools/convert_NAME.py SOURCE OUT [--option …]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fedvlm.errors import FedvlmError


def parser(text: str | None) -> argparse.ArgumentParser:
    """A parser with the two places; the module's docstring is its help."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("source", type=Path)
    made.add_argument("out", type=Path, help="a new folder, or a .jsonl file for texts")
    return made


def run(convert: Callable[..., str], options: argparse.ArgumentParser, words: Sequence[str] | None) -> int:
    """Calls the converter with what was given and prints what it says; 1 after an error."""
    args = vars(options.parse_args(words))
    source, out = args.pop("source").expanduser(), args.pop("out").expanduser()
    try:
        if not source.exists():
            raise FedvlmError(f"{source}: no such file or folder")
        if out.exists() and (out.is_file() or any(out.iterdir())):
            raise FedvlmError(f"{out} is there already; give a new place")
        print(f"{out}: {convert(source, out, **args)}")
    except FedvlmError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
