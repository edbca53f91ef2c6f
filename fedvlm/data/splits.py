"""The split that data come with: folders train/, val/ and test/, or CoOp's split file (Zhou et al., 2022), which is JSON
with train, val and test, lists of [path, label, class]. The class's name in the file is the one that prompts use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedvlm.data.format import require_decoders
from fedvlm.data.source import NO_DOMAIN, Item, Source, existing, group_of, with_classes
from fedvlm.errors import FedvlmError

PARTS = ("train", "val", "test")
FOLDERS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val"}
FOLDERS |= {"test": "test", "testing": "test"}


class SplitLine(NamedTuple):
    """A line of a split file."""

    part: str
    number: int  # in its part
    path: str
    label: str


def split_folders(paths: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Top folder → its part of the split, and what to say about it; {} where the top folders are something else."""
    tops = {p.partition("/")[0] for p in paths}
    parts = {top: FOLDERS[top.lower()] for top in sorted(tops) if top.lower() in FOLDERS}
    deep = all(p.count("/") > 1 for p in paths)
    if not deep or len(set(parts.values())) < max(2, len(tops)) or "train" not in parts.values():
        return {}, ()
    classes: dict[str, set[str]] = {part: set() for part in parts.values()}
    for path in paths:
        top, *_, label, _ = path.split("/")
        classes[parts[top]].add(label)
    listed = ", ".join(f"{top}/" for top in sorted(parts, key=lambda t: PARTS.index(parts[t])))
    odd = sorted(set().union(*classes.values()) - classes["train"])
    if odd:
        where = next(top for top in parts if odd[0] in classes[parts[top]])
        return {}, (
            f"{listed} are taken as domains, not as a split: {where}/{odd[0]} is no class of the training images",
        )
    return parts, (f"{listed} are kept as the split{from_train(set(parts.values()))}",)


def from_train(present: set[str]) -> str:
    """Which part is drawn from train, in words."""
    missing = [part for part in PARTS if part not in present]
    return f"; {' and '.join(missing)} images are drawn from train" if missing else ""


def read_split_file(file: Path) -> list[SplitLine]:
    try:
        split = json.loads(file.read_text(encoding="utf-8"))
        found = [SplitLine(p, k, str(e[0]), str(e[2])) for p in PARTS for k, e in enumerate(split[p])]
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise FedvlmError(f"{file}: not a split file of CoOp ({error}); it has train, val and test") from None
    if not found:
        raise FedvlmError(f"{file}: no images in it")
    return found


def image_root(folder: Path, first: str) -> Path:
    """The folder that paths of a split file start from: `folder`, or the first one in it that has the first image."""
    choices = [folder, *sorted(p for p in folder.iterdir() if p.is_dir())]
    return next((c for c in choices if (c / first).is_file()), folder)


def image_in(root: Path, entry: SplitLine, file: Path, key: str) -> Path:
    """The image of an entry; an error where it is not there, or lies outside of the folder."""
    found = (root / entry.path).resolve()
    if not found.is_relative_to(root.resolve()) or not found.is_file():
        raise FedvlmError(
            f"{root / entry.path}: no such image; give {key}=FOLDER, which paths in {file.name} start from"
        )
    return found


def open_split_file(data: str, split_file: str, group: str) -> Source:
    """The images that the file names, with its split and its classes; other images of the folder are left out."""
    folder = existing(data, "data", "give the folder of images that the split file belongs to")
    if not folder.is_dir():
        raise FedvlmError(f"split={split_file} needs a folder of images, and data={folder} is none; unpack it")
    file = existing(split_file, "split", "give CoOp's split file, or three shares such as 60,20,20")
    entries = read_split_file(file)
    root = image_root(folder, entries[0].path)
    seen: dict[str, SplitLine] = {}
    for entry in entries:
        image_in(root, entry, file, "data")
        before = seen.setdefault(entry.path, entry)
        if before is not entry:
            raise FedvlmError(f"{file}: {entry.path} is in {before.part} and again in {entry.part}; remove one of them")
    require_decoders(seen)
    items = tuple(Item(e.path, NO_DOMAIN, e.label, group_of(group, e.path.rpartition("/")[2]), e.part) for e in entries)
    said = f"the split of {file.name} is kept{from_train({e.part for e in entries})}"
    return with_classes(Source(folder.resolve().name, root, items, notes=(said,)))


def check_groups(source: Source) -> None:
    """An error where the data's own split has a group (a patient) on two sides."""
    side: dict[str, Item] = {}
    for item in source.items if source.has_split else ():
        first = side.setdefault(item.group, item) if item.group else item
        if first.split != item.split:
            raise FedvlmError(
                f"data={source.name}: the group {item.group} is in {first.split} ({first.path}) and in {item.split} "
                f"({item.path}); move all of it to one side"
            )
