"""CoOp's split files (Zhou et al., 2022): split_zhou_NAME.json with train, val and test, lists of [path, label, class].

The class's name in the file is the one that prompts use. Images are copied to OUT/class/SPLIT-number.ending; the official
split itself is not kept, as fedvlm splits by seed (docs/protocols.md), so that numbers differ from those on the official
test images by the draw. `only=test` copies one part of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fedvlm.errors import FedvlmError
from fedvlm.names import file_name

PARTS = ("train", "val", "test")


def convert(source: Path, out: Path, images: str = "", only: str = "") -> str:
    """Writes the folder `out` and says what it holds. images: the folder that paths are relative to; "": the first of
    `images` and the file's own folder in which the first image lies."""
    if only not in ("", *PARTS):
        raise FedvlmError(f"only={only}: there is {', '.join(PARTS)}")
    try:
        split = json.loads(source.read_text(encoding="utf-8"))
        entries = [(p, k, str(e[0]), str(e[2])) for p in PARTS if only in ("", p) for k, e in enumerate(split[p])]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise FedvlmError(f"{source}: not a split file of CoOp ({error}); it has train, val and test") from None
    if not entries:
        raise FedvlmError(f"{source}: no images in it")
    root = _root(source, images, entries[0][2])
    for part, number, path, label in entries:
        found = (root / path).resolve()
        if not found.is_relative_to(root.resolve()) or not found.is_file():
            raise FedvlmError(
                f"{root / path}: no such image; give images=FOLDER, which paths in {source.name} start from"
            )
        folder = out / file_name(label)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, folder / f"{part}-{number}{found.suffix}")
    return f"{len(entries)} images of {len({label for *_, label in entries})} classes"


def _root(source: Path, images: str, first: str) -> Path:
    if images:
        return Path(images).expanduser()
    choices = [source.parent, *sorted(p for p in source.parent.iterdir() if p.is_dir())]
    return next((c for c in choices if (c / first).is_file()), source.parent)
