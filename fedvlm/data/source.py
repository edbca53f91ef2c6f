"""Data sources: the list of examples, each with its domain and class, and their bytes.

A source is a folder (or zip) of `domain/class/image`, of `class/image`, or of `site/image/…` with `site/mask/…`; a .jsonl
file of texts and who said them; or the embedded emoji.
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedvlm.data.images import BadImage, Unreadable, read_file, read_member
from fedvlm.data.images import decode as decode
from fedvlm.errors import FedvlmError, nearest
from fedvlm.tasks import CLASSIFICATION, SEGMENTATION, TaskType

EMOJI = Path(__file__).parent / "assets" / "emoji.zip"
IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
NO_DOMAIN = "all"  # the domain of every item where the folders name none
MAX_DEPTH = 4  # levels of folders that are searched; bounds the search where a symbolic link forms a cycle
NOT_TEXT = re.compile("[\ud800-\udfff]")  # how Python reads bytes in names that are not UTF-8
MAX_ITEMS = 20_000_000  # examples, or names in a folder: more take tens of gigabytes, and were hardly meant


@dataclass(frozen=True)
class Item:
    path: str  # inside the source, separated by /
    domain: str
    label: str
    group: str  # items of one group are kept in the same split; "": the item is a group by itself


class Embeddings(NamedTuple):
    """Embeddings that the user computed, instead of images."""

    x: Tensor  # [items, dim], L2-normalised
    text: Tensor | None  # [classes, dim] in the order of the classes' names, L2-normalised
    scale: float  # logit scale


@dataclass(frozen=True)
class Source:
    name: str
    root: Path  # a folder, or a zip or text file
    items: tuple[Item, ...]
    task_type: TaskType = CLASSIFICATION
    masks: tuple[Item, ...] = ()  # segmentation: the mask of each item, in the same order
    tokens: np.ndarray | None = None  # text: the input characters of each item, [items, characters]
    embeddings: Embeddings | None = None  # of each item, where the user computed them

    @property
    def domains(self) -> list[str]:
        return sorted({i.domain for i in self.items})

    @property
    def classes(self) -> list[str]:
        return sorted({i.label for i in self.items})

    def read(self) -> Iterator[tuple[int, bytes]]:
        """The index and the bytes of every file, in order; `Unreadable` where a file cannot be read."""
        with nullcontext() if self.root.is_dir() else _open_zip(self.root) as archive:
            for index, item in enumerate(self.items):
                try:
                    data = read_member(archive, item.path) if archive else read_file(self.root / item.path)
                except BadImage as error:
                    existing(str(self.root), "data", "it was removed while it was read")
                    data = Unreadable(str(error))
                yield index, data


def open_source(name: str, group: str = "", domains: int = 0, stride: int = 8, keep: Sequence[str] = ()) -> Source:
    """Opens `emoji` or a path. The depth of the folders decides whether there are domains.

    `group` is a regular expression for file names (see `_group`). `domains`, `stride` and `keep` (see `sample_domains`)
    apply to text only; images are all listed (`keep_domains` reduces them).
    """
    if name.endswith((".jsonl", ".jsonl.gz")):
        from fedvlm.data.text import open_text

        return open_text(Path(name).expanduser(), domains, stride, keep)
    if name.endswith(".safetensors"):
        from fedvlm.data.embeddings import open_embeddings

        return open_embeddings(Path(name).expanduser())
    return _open(name, group)


def open_outsiders(name: str) -> Source:
    """All images below a folder, in any layout; they belong to none of the task's classes."""
    root = existing(name, "outsiders", "give a folder of images")
    items = tuple(Item(n, NO_DOMAIN, "outside", "") for n in _names_in_folder(root)) if root.is_dir() else ()
    if not items:
        raise FedvlmError(f"outsiders={name}: no such folder, or no images in it")
    return Source(root.resolve().name, root, items)


def sample_domains(names: Iterable[str], count: int, keep: Sequence[str] = ()) -> set[str]:
    """A pseudo-random sample of `count` names (0: all), ordered by hash: the same for every seed. Names in `keep` (those
    that are held out) are always among them."""
    known = sorted(set(names), key=lambda n: (n not in keep, digest(n.encode()), n))
    if not 0 <= count <= len(known):
        raise FedvlmError(f"domains={count}: there are {len(known)}; give at most that many, or 0 for all")
    return set(known[:count] if count else known)


def keep_domains(source: Source, count: int, keep: Sequence[str] = ()) -> Source:
    """The source with `count` of its domains (0: all), see `sample_domains`."""
    kept = sample_domains(source.domains, count, keep)
    return _only(source, [k for k, i in enumerate(source.items) if i.domain in kept])


def keep_classes(source: Source, names: Sequence[str]) -> Source:
    """The source with these classes only; all of them where none is named."""
    known = source.classes
    for wanted in names:
        if wanted not in known:
            raise FedvlmError(f"classes={wanted}: no such class in data={source.name}; {nearest(wanted, known)}")
    if not names:
        return source
    if len(set(names)) < 2:
        raise FedvlmError(f"classes={names[0]}: a classifier needs at least two; name more, or leave classes= out")
    found = _only(source, [k for k, i in enumerate(source.items) if i.label in names])
    given = found.embeddings
    if given is None or given.text is None:
        return found
    rows = [known.index(c) for c in found.classes]
    return replace(found, embeddings=given._replace(text=given.text[rows]))


def _only(source: Source, rows: list[int]) -> Source:
    """The source with these items."""
    items, masks = (tuple(part[k] for k in rows if part) for part in (source.items, source.masks))
    given = source.embeddings
    return replace(source, items=items, masks=masks, embeddings=given and given._replace(x=given.x[rows]))


def existing(name: str, key: str, advice: str) -> Path:
    """The path of what exists under this name, or an error."""
    try:
        root = Path(name).expanduser()
        root.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FedvlmError(f"{key}={name}: no such folder; {advice}") from error
    except (OSError, RuntimeError, ValueError) as error:  # a home directory that is not known, a zero byte
        raise FedvlmError(f"{key}={name}: cannot be opened ({getattr(error, 'strerror', '') or error})") from error
    return root


def _open(name: str, group: str) -> Source:
    if name == "emoji":
        # the group is the file name, which is the same for an emoji in every style
        return _collect("emoji", EMOJI, _names_in_zip(EMOJI), group or r"(.*)\.png")
    root = existing(name, "data", "give a folder of domain/class/image or class/image, or data=emoji")
    if root.is_dir():
        return _collect(root.resolve().name, root, _names_in_folder(root), group)
    if not root.is_file() or not zipfile.is_zipfile(root):
        raise FedvlmError(f"data={name} is neither a folder nor a zip file")
    return _collect(root.stem, root, _names_in_zip(root), group)


def _is_image(name: str) -> bool:
    """By the ending of its name; hidden files and folders are ignored."""
    return PurePosixPath(name).suffix.lower() in IMAGES and not any(p.startswith(".") for p in name.split("/"))


def _names_in_folder(root: Path) -> list[str]:
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


def _names_in_zip(path: Path) -> list[str]:
    with _open_zip(path) as archive:
        names = sorted(n for n in archive.namelist() if not n.endswith("/"))
    outside = [f"{n} lies outside of it" for n in names if n.startswith("/") or ".." in n.split("/")]
    twice = [f"{n} occurs twice" for n, following in pairwise(names) if n == following]
    for fault in outside + twice:
        raise FedvlmError(f"data={path}: its member {fault}; zip the folder again")
    return [n for n in names if _is_image(n)]


def _open_zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except Exception as error:  # of untrusted bytes: zipfile lets struct's, Unicode's and its own errors pass
        raise FedvlmError(f"data={path}: cannot be read as a zip file ({error})") from error


def _collect(name: str, root: Path, images: list[str], group: str) -> Source:
    """A source of these images."""
    depths = Counter(n.count("/") for n in images)
    if not images:
        raise FedvlmError(f"data={name}: no images in it; expected domain/class/image or class/image")
    depth = depths.most_common(1)[0][0]
    if depth not in (1, 2):
        raise FedvlmError(
            f"data={name}: images lie {depth} folders deep; expected class/image (1) or domain/class/image (2)"
        )
    other = [n for n in images if n.count("/") != depth]
    if other:
        raise FedvlmError(
            f"data={name}: most images lie {depth} folders deep, but {other[0]} does not (and {len(other) - 1} more); "
            "move them, or give the folder that directly contains the domains or classes"
        )
    items = []
    for n in images:
        *domain, label, file = n.split("/")
        items.append(Item(n, domain[0] if domain else NO_DOMAIN, label, _group(group, file)))
    if depth == 2 and {i.label for i in items} == {"image", "mask"}:
        return _with_masks(name, root, items)
    source = Source(name, root, tuple(items))
    if len(source.classes) < 2:
        raise FedvlmError(f"data={name}: only one class ({source.classes[0]}); a classifier needs at least two")
    return source


def _with_masks(name: str, root: Path, items: list[Item]) -> Source:
    """A segmentation source: each site/image/NAME with site/mask/NAME (suffixes may differ), and one class, "inside"."""
    by_name: dict[tuple[str, ...], Item] = {}
    for item in items:
        by_name.setdefault((item.label, item.domain, PurePosixPath(item.path).stem), item)
    images = [i for i in items if i.label == "image"]
    masks = [by_name.get(("mask", i.domain, PurePosixPath(i.path).stem)) for i in images]
    if None in masks or len(by_name) != len(items) or 2 * len(images) != len(items):
        missing = next((i.path for i, m in zip(images, masks, strict=True) if m is None), "")
        fault = f"{missing} has none" if missing else "a name occurs twice, or a mask has no image"
        raise FedvlmError(f"data={name}: every site/image/NAME needs exactly one site/mask/NAME; {fault}")
    labelled = [replace(i, label="inside") for i in images]
    return Source(name, root, tuple(labelled), SEGMENTATION, tuple(m for m in masks if m))


def _group(pattern: str, file: str) -> str:
    """What the pattern's first capture group matches in a file name; "" (a group by itself) where nothing matches."""
    if not pattern:
        return ""
    try:
        match = re.search(pattern, file)
        return match.group(1) if match else ""
    except (re.error, IndexError) as error:
        raise FedvlmError(
            f"group={pattern}: expected a regular expression with one capture group, such as (patient\\d+) ({error})"
        ) from error


def digest(data: bytes) -> bytes:
    """A 16-byte content hash."""
    return hashlib.blake2b(data, digest_size=16).digest()
