"""`fedvlm export RUN [--out FOLDER] [--client NAME] [--with-backbone] [--onnx] [--trust]`"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedvlm import api
from fedvlm.errors import FedvlmError
from fedvlm.system import console
from fedvlm.system.names import file_name


def main(args: argparse.Namespace) -> None:
    run = only_run(args)
    name = f"export-{file_name(args.client)}" if args.client else "export"
    folder = Path(args.out) if args.out else run.folder / name
    written = run.export(folder, args.client, with_backbone=args.with_backbone, onnx=args.onnx)
    console.line(f"{folder}: {', '.join(written)}")


def only_run(args: argparse.Namespace) -> api.Run:
    found = api.runs(args.run, trust=args.trust)
    if len(found) > 1:
        raise FedvlmError(f"{args.run} holds {len(found)} runs; give one of them, such as {found[0].folder}")
    return found[0]
