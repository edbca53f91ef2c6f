"""`fedvlm export RUN [--out FOLDER] [--client NAME] [--trust]`"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedvlm import api, console
from fedvlm.errors import FedvlmError
from fedvlm.names import file_name


def main(args: argparse.Namespace) -> None:
    found = api.runs(args.run, trust=args.trust)
    if len(found) > 1:
        raise FedvlmError(f"{args.run} holds {len(found)} runs; give one of them, such as {found[0].folder}")
    name = f"export-{file_name(args.client)}" if args.client else "export"
    folder = Path(args.out) if args.out else found[0].folder / name
    written = found[0].export(folder, args.client)
    console.line(f"{folder}: {', '.join(written)}")
