"""A folder or zip of images: domain/class/image, class/image, or site/image/… with site/mask/…."""

from __future__ import annotations

import os
import zipfile
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePosixPath

from fedvlm.core.tasks import SEGMENTATION
from fedvlm.data.format import Format, Options, image_endings, require_decoders
from fedvlm.data.source import (
    EMOJI,
    MAX_ITEMS,
    NO_DOMAIN,
    NOT_TEXT,
    Item,
    Source,
    existing,
    group_of,
    open_zip,
    with_classes,
)
from fedvlm.data.splits import split_folders
from fedvlm.errors import FedvlmError

MAX_DEPTH = 4  # levels of folders that are searched; bounds the search where a symbolic link forms a cycle


class Folder(Format):
    in_threads = True

    def recognises(self, name: str) -> bool:
        return True  # it is asked last

    def open(self, name: str, options: Options) -> Source:
        if name == "emoji":
            # the group is the file name, which is the same for an emoji in every style
            return collected("emoji", EMOJI, names_in_zip(EMOJI), options.group or r"(.*)\.png")
        root = existing(name, "data", "give a folder of domain/class/image or class/image, or data=emoji")
        if root.is_dir():
            return collected(root.resolve().name, root, names_in_folder(root), options.group)
        if not root.is_file() or not zipfile.is_zipfile(root):
            raise FedvlmError(f"data={name} is neither a folder nor a zip file")
        images = names_in_zip(root)
        return collected(root.stem, root, images, options.group, _top_folder(images))


def _is_image(name: str) -> bool:
    """Whether a name ends like an image's; hidden files and folders are ignored."""
    return PurePosixPath(name).suffix.lower() in image_endings() and not any(p.startswith(".") for p in name.split("/"))


def names_in_folder(root: Path) -> list[str]:
    """Paths of all images relative to `root`. Symbolic links are followed: data sets are often made of them."""
    names, seen = list[str](), 0
    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=_cannot_list):
        relative = Path(folder).relative_to(root)
        names += [n for f in files if _is_image(n := (relative / f).as_posix())]
        subfolders[:] = [s for s in subfolders if len(relative.parts) < MAX_DEPTH and not s.startswith(".")]
        seen += 1 + len(files)
        if seen > MAX_ITEMS:
            raise FedvlmError(f"{root}: more than {MAX_ITEMS:,} files and folders in it; give a smaller folder")
    for name in filter(NOT_TEXT.search, names):
        raise FedvlmError(f"{root}: the name {name!a} is not valid UTF-8; rename it")
    return sorted(names)


def _cannot_list(error: OSError) -> None:
    raise FedvlmError(f"the folder {error.filename} cannot be read ({error.strerror}); make it readable") from error


def names_in_zip(path: Path) -> list[str]:
    with open_zip(path) as archive:
        names = sorted(n for n in archive.namelist() if not n.endswith("/"))
    outside = [f"{n} lies outside of it" for n in names if n.startswith("/") or ".." in n.split("/")]
    twice = [f"{n} occurs twice" for n, following in pairwise(names) if n == following]
    for fault in outside + twice:
        raise FedvlmError(f"data={path}: its member {fault}; zip the folder again")
    return [n for n in names if _is_image(n)]


def collected(name: str, root: Path, images: list[str], group: str, wrapper: str = "") -> Source:
    """A source of these images; `wrapper`: a folder with a slash that holds all of them, and is left out."""
    require_decoders(images)
    if not images:
        raise FedvlmError(f"data={name}: no images in it; expected domain/class/image or class/image")
    places = {n: n.removeprefix(wrapper) for n in images}
    tops, notes = split_folders(list(places.values()))
    notes += (f"everything in {root.name} lies in {wrapper}, which is left out",) if wrapper else ()
    below = {n: place.partition("/")[2] if tops else place for n, place in places.items()}
    depths = Counter(place.count("/") for place in below.values())
    depth = depths.most_common(1)[0][0]
    if depth not in (1, 2):
        deep = depth + bool(tops)
        inner = Counter(place.partition("/")[0] for place in below.values()).most_common(1)[0][0]
        hint = f"; perhaps data={name}/{wrapper}{inner}" if depth > 2 else ""
        raise FedvlmError(
            f"data={name}: images lie {deep} folders deep; expected class/image (1) or domain/class/image (2){hint}"
        )
    other = [n for n, place in below.items() if place.count("/") != depth]
    if other:
        more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
        raise FedvlmError(
            f"data={name}: most images lie {depth} folders deep, but {other[0]} does not{more}; "
            "move them, or give the folder that directly contains the domains or classes"
        )
    items = []
    for n, place in below.items():
        *domain, label, file = place.split("/")
        split = tops.get(places[n].partition("/")[0], "")
        items.append(Item(n, domain[0] if domain else NO_DOMAIN, label, group_of(group, file), split))
    if (depth == 2 or tops) and {i.label for i in items} == {"image", "mask"}:
        return replace(_with_masks(name, root, items), notes=notes)
    return with_classes(Source(name, root, tuple(items), notes=notes))


def _top_folder(images: list[str]) -> str:
    """The folder of a zip that holds everything, with a slash; "" where there is none. One site of images and masks is
    no such folder."""
    tops = {n.partition("/")[0] for n in images}
    below = {n.split("/")[1] for n in images if n.count("/") > 1}
    return f"{tops.pop()}/" if len(tops) == 1 and below and below != {"image", "mask"} else ""


def _with_masks(name: str, root: Path, items: list[Item]) -> Source:
    """A segmentation source: each site/image/NAME with site/mask/NAME (suffixes may differ), and one class, "inside"."""
    by_name: dict[tuple[str, ...], Item] = {}
    for item in items:
        by_name.setdefault((item.label, item.domain, item.split, PurePosixPath(item.path).stem), item)
    images = [i for i in items if i.label == "image"]
    masks = [by_name.get(("mask", i.domain, i.split, PurePosixPath(i.path).stem)) for i in images]
    if None in masks or len(by_name) != len(items) or 2 * len(images) != len(items):
        missing = next((i.path for i, m in zip(images, masks, strict=True) if m is None), "")
        fault = f"{missing} has none" if missing else "a name occurs twice, or a mask has no image"
        raise FedvlmError(f"data={name}: every site/image/NAME needs exactly one site/mask/NAME; {fault}")
    labelled = [replace(i, label="inside") for i in images]
    return Source(name, root, tuple(labelled), SEGMENTATION, tuple(m for m in masks if m))
