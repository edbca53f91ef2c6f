"""Data sources: the list of examples, each with its domain and class, and their bytes.

A source is a folder (or zip) of `domain/class/image`, of `class/image`, or of `site/image/…` with `site/mask/…`; a .jsonl
file of texts and who said them; or the embedded emoji.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedvlm.backbones.base import PIXELS
from fedvlm.core import FedvlmError
from fedvlm.tasks import CLASSIFICATION, SEGMENTATION, TaskType

EMOJI = Path(__file__).parent / "assets" / "emoji.zip"
IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
NO_DOMAIN = "all"  # the domain of every item where the folders name none
MAX_DEPTH = 4  # levels of folders that are searched; bounds the search where a symbolic link forms a cycle
UNREADABLE = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)  # RuntimeError: an encrypted zip


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
        """The index and the bytes of every file, in order; the bytes are empty where the file cannot be read."""
        with nullcontext() if self.root.is_dir() else zipfile.ZipFile(self.root) as archive:
            for index, item in enumerate(self.items):
                try:
                    data = archive.read(item.path) if archive else (self.root / item.path).read_bytes()
                except UNREADABLE:
                    data = b""
                yield index, data


def open_source(name: str, group: str = "", domains: int = 0, stride: int = 8) -> Source:
    """Opens `emoji` or a path. The depth of the folders decides whether there are domains.

    `group` is a regular expression for file names (see `_group`). `domains` and `stride` apply to text only; images are
    all listed (`keep_domains` reduces them).
    """
    if name.endswith((".jsonl", ".jsonl.gz")):
        from fedvlm.data.text import open_text

        return open_text(Path(name).expanduser(), domains, stride)
    if name.endswith(".safetensors"):
        from fedvlm.data.embeddings import open_embeddings

        return open_embeddings(Path(name).expanduser())
    return _open(name, group)


def open_outsiders(name: str) -> Source:
    """All images below a folder, in any layout; they belong to none of the task's classes."""
    root = Path(name).expanduser()
    files = _names_in_folder(root) if root.is_dir() else []
    items = tuple(Item(n, NO_DOMAIN, "outside", "") for n in files if Path(n).suffix.lower() in IMAGES)
    if not items:
        raise FedvlmError(f"outsiders={name}: no such folder, or no images in it")
    return Source(root.resolve().name, root, items)


def sample_domains(names: Iterable[str], count: int) -> set[str]:
    """A pseudo-random sample of `count` names (0: all), ordered by hash: the same for every seed."""
    known = sorted(set(names), key=lambda n: (digest(n.encode()), n))
    if not 0 <= count <= len(known):
        raise FedvlmError(f"domains={count}: there are {len(known)}; give at most that many, or 0 for all")
    return set(known[:count] if count else known)


def keep_domains(source: Source, count: int) -> Source:
    """The source with `count` of its domains (0: all), see `sample_domains`."""
    kept = sample_domains(source.domains, count)
    rows = [k for k, i in enumerate(source.items) if i.domain in kept]
    items, masks = tuple(source.items[k] for k in rows), tuple(m for m in source.masks if m.domain in kept)
    given = source.embeddings
    return replace(source, items=items, masks=masks, embeddings=given and given._replace(x=given.x[rows]))


def _open(name: str, group: str) -> Source:
    if name == "emoji":
        # the group is the file name, which is the same for an emoji in every style
        return _collect("emoji", EMOJI, _names_in_zip(EMOJI), group or r"(.*)\.png")
    root = Path(name).expanduser()
    if not root.exists():
        raise FedvlmError(
            f"data={name}: no such folder; give a folder of domain/class/image or class/image, or data=emoji"
        )
    if root.is_file():
        if not zipfile.is_zipfile(root):
            raise FedvlmError(f"data={name} is neither a folder nor a zip file")
        return _collect(root.stem, root, _names_in_zip(root), group)
    return _collect(root.resolve().name, root, _names_in_folder(root), group)


def _names_in_folder(root: Path) -> list[str]:
    """Paths of all files relative to `root`. Symbolic links are followed: data sets are often made of them."""
    names = []
    for folder, subfolders, files in os.walk(root, followlinks=True):
        relative = Path(folder).relative_to(root)
        names += [(relative / f).as_posix() for f in files]
        if len(relative.parts) >= MAX_DEPTH:
            subfolders.clear()
    return sorted(names)


def _names_in_zip(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return sorted(n for n in archive.namelist() if not n.endswith("/"))


def _collect(name: str, root: Path, names: list[str], group: str) -> Source:
    """A source of the images among these paths; hidden files and folders are ignored."""
    images = [n for n in names if Path(n).suffix.lower() in IMAGES and not any(p.startswith(".") for p in n.split("/"))]
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


def decode(data: bytes) -> Image.Image:
    """An RGB image on white, or ValueError with the reason. Images over PIXELS are refused before they are decoded."""
    if not data:
        raise ValueError("the file is empty or cannot be read")
    try:
        image: Image.Image = Image.open(io.BytesIO(data))
        if image.width * image.height > PIXELS:
            raise ValueError(f"{image.width}×{image.height} pixels, more than {PIXELS:,}")
        if image.mode == "F":
            raise ValueError(
                "floating-point pixels, for which no black and white level is defined; save it with 8 bits"
            )
        if image.mode.startswith("I"):  # 16-bit greyscale; Pillow's own conversion clips everything above 255 to white
            image = image.convert("I").point(lambda grey: grey * (1 / 257) + 0.5).convert("L")
        if image.mode in ("RGBA", "LA", "PA") or (image.mode == "P" and "transparency" in image.info):
            flat = Image.new("RGBA", image.size, "white")
            flat.alpha_composite(image.convert("RGBA"))
            image = flat
        return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError, EOFError) as error:
        raise ValueError(f"not a readable image ({type(error).__name__})") from error
