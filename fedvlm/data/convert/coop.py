"""CoOp's split files (see `data/splits.py`), as a folder of class/image for other programs; `split=FILE` takes such a file
as it is, and keeps its split.

Images are copied to OUT/class/SPLIT-number.ending. `only=test` copies one part."""

from __future__ import annotations

import shutil
from pathlib import Path

from fedvlm.data.splits import PARTS, image_in, image_root, read_split_file
from fedvlm.errors import FedvlmError
from fedvlm.system.names import file_name


def convert(source: Path, out: Path, images: str = "", only: str = "") -> str:
    """Writes the folder `out` and says what it holds. images: the folder that paths are relative to; "": the first of
    `images` and the file's own folder in which the first image lies."""
    if only not in ("", *PARTS):
        raise FedvlmError(f"only={only}: there is {', '.join(PARTS)}")
    entries = [e for e in read_split_file(source) if only in ("", e.part)]
    if not entries:
        raise FedvlmError(f"{source}: no images in it")
    root = Path(images).expanduser() if images else image_root(source.parent, entries[0].path)
    for entry in entries:
        found = image_in(root, entry, source, "images")
        folder = out / file_name(entry.label)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, folder / f"{entry.part}-{entry.number}{found.suffix}")
    return f"{len(entries)} images of {len({e.label for e in entries})} classes"
