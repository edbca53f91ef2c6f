"""`fedvlm predict RUN|EXPORT IMAGE|FOLDER … [--client NAME] [--top 5] [--out FILE] [--backbone PLACE] [--trust]`"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedvlm import api
from fedvlm.cli.commands.output import write_rows
from fedvlm.core.tasks import SEGMENTATION
from fedvlm.data.format import image_endings
from fedvlm.errors import FedvlmError
from fedvlm.predict.predictor import Predictor
from fedvlm.system import console, files
from fedvlm.system.formatting import counted
from fedvlm.system.names import file_name

BATCH = 64


def main(args: argparse.Namespace) -> None:
    if args.top < 1:
        raise FedvlmError(f"--top {args.top}: give 1 or more classes")
    paths = images_in(args.images)
    model = model_of(args)
    lines: list[list[str]] = []
    with console.progress("predicting", len(paths)) as update:
        for first in range(0, len(paths), BATCH):
            part = paths[first : first + BATCH]
            for path, best in zip(part, model.top(part, args.top), strict=True):
                lines += [[str(path), name, f"{probability:.3f}", model.whose] for name, probability in best]
            update(first + len(part), "")
    segments = model.model.adapter.task_type is SEGMENTATION
    columns = ["image", "class", "share" if segments else "probability", "model"]
    if args.masks:
        write_masks(model, paths, Path(args.masks))
    if args.out or args.csv:
        write_rows(args.out or args.csv, columns, lines)
        console.line(f"{counted(len(paths), 'image')}: written to {args.out or args.csv}")
    else:
        console.rows(columns, lines)


def model_of(args: argparse.Namespace) -> Predictor:
    backbone = args.backbone or None
    if not (Path(args.run) / "adapter.safetensors").is_file():
        from fedvlm.studies.comparison import one_run

        run = one_run(args.run, args.trust, ["predict", "{}", *args.images])
        whose = f"client {args.client}" if args.client else "the shared model"
        console.note(f"{run.record.method.label}, {whose} of {run.folder}")
        return run.predictor(args.client, backbone)
    model = api.load(args.run, backbone, trust=args.trust)
    if args.client not in ("", model.whose):
        raise FedvlmError(
            f"--client {args.client}: this export holds one model ({model.whose}); export the run again with --client"
        )
    return model


def images_in(given: list[str]) -> list[Path]:
    paths: list[Path] = []
    for path in map(Path, given):
        inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in image_endings()) if path.is_dir() else [path]
        if not inside:
            raise FedvlmError(f"{path}: no images in that folder")
        paths += inside
    for path in paths:
        if not path.is_file():
            raise FedvlmError(f"{path}: no such image or folder")
    return paths


def write_masks(model: Predictor, paths: list[Path], folder: Path) -> None:
    task_type = model.model.adapter.task_type
    if task_type is not SEGMENTATION:
        raise FedvlmError(f"--masks: this model learned {task_type.description} and draws none")
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for k, path in enumerate(paths):
            (mask,) = model.masks([path])
            mask.save(folder / f"{file_name(f'{k:04d}-{path.stem}')}.png")
    console.line(f"{len(paths)} masks in {folder}")
