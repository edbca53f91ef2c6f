"""`fedvlm export RUN [--out FOLDER] [--client NAME] [--with-backbone] [--onnx] [--trust]`"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedvlm.studies import comparison
from fedvlm.system import console
from fedvlm.system.names import file_name


def main(args: argparse.Namespace) -> None:
    run = comparison.one_run(args.run, args.trust, ["export", "{}"])
    name = f"export-{file_name(args.client)}" if args.client else "export"
    folder = Path(args.out) if args.out else run.folder / name
    written = run.export(folder, args.client, with_backbone=args.with_backbone, onnx=args.onnx)
    console.line(f"{folder}: {', '.join(written)}")
