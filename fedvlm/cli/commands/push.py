"""`fedvlm push RUN|EXPORT FOLDER [--client NAME] [--with-backbone] [--onnx] [--trust]`"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from fedvlm.cli.commands.export import only_run
from fedvlm.predict.export import hub
from fedvlm.predict.export.folder import read_record
from fedvlm.system import console


def main(args: argparse.Namespace) -> None:
    folder = Path(args.folder)
    if (Path(args.run) / "adapter.safetensors").is_file():
        written = hub.push(Path(args.run), folder)
    else:
        run = only_run(args)
        with tempfile.TemporaryDirectory() as place:
            made = Path(place) / "export"
            run.export(made, args.client, with_backbone=args.with_backbone, onnx=args.onnx)
            written = hub.push(made, folder)
    console.line(f"{folder}: {', '.join(written)}")
    about = read_record(folder)
    if about.whose != "shared":
        console.warn(f"this is the own model of client {about.whose}: its private parameters are in the folder")
    console.line(f"nothing was uploaded; next: hf upload OWNER/NAME {folder}")
