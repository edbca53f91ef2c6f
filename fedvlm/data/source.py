"""Where examples come from: a folder (or zip) of `domain/class/image`, of `class/image`, or of `site/image/…` beside
`site/mask/…`; a .jsonl file of who said what; or the embedded emoji."""

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

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedvlm.backbones.base import PIXELS
from fedvlm.core import FedvlmError
from fedvlm.tasks import CLASSES, MASKS, Kind

EMOJI = Path(__file__).parent / "assets" / "emoji.zip"
IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
ALONE = "all"  # the domain of a folder that has none
DEEP = 4  # folders: images below are an error already at 3, and a link may lead back up
UNREADABLE = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)  # RuntimeError: a zip with a password


@dataclass(frozen=True)
class Item:
    path: str  # inside the source, with /
    domain: str
    label: str
    group: str  # items of one group never stand on both sides of a split; "" is a group of its own


@dataclass(frozen=True)
class Source:
    name: str
    root: Path
    items: tuple[Item, ...]
    kind: Kind = CLASSES
    masks: tuple[Item, ...] = ()  # of each item, in the same order
    tokens: np.ndarray | None = None  # of each item, where the items are text

    @property
    def domains(self) -> list[str]:
        return sorted({i.domain for i in self.items})

    @property
    def classes(self) -> list[str]:
        return sorted({i.label for i in self.items})

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Every file's bytes, in order; empty where it cannot be read."""
        with nullcontext() if self.root.is_dir() else zipfile.ZipFile(self.root) as box:
            for k, item in enumerate(self.items):
                try:
                    data = box.read(item.path) if box else (self.root / item.path).read_bytes()
                except UNREADABLE:
                    data = b""
                yield k, data


def open_source(name: str, group: str = "", domains: int = 0, stride: int = 8) -> Source:
    """`emoji`, or a path. The depth of the folders says whether there are domains. `domains` and `stride` are for text;
    of images all are listed (see `fewer`)."""
    if name.endswith((".jsonl", ".jsonl.gz")):
        from fedvlm.data.text import open_text

        return open_text(Path(name).expanduser(), domains, stride)
    return _open(name, group)


def open_outsiders(name: str) -> Source:
    """Any images below a folder, however they lie: they are of no class."""
    root = Path(name).expanduser()
    found = _names_in_folder(root) if root.is_dir() else []
    items = tuple(Item(n, ALONE, "outside", "") for n in found if Path(n).suffix.lower() in IMAGES)
    if not items:
        raise FedvlmError(f"outsiders={name}: no such folder, or no images in it")
    return Source(root.resolve().name, root, items)


def drawn(names: Iterable[str], count: int) -> set[str]:
    """So many of the names (0: all), as good as at random and always the same."""
    known = sorted(set(names), key=lambda n: (digest(n.encode()), n))
    if not 0 <= count <= len(known):
        raise FedvlmError(f"domains={count}: there are {len(known)}; give at most that, or 0 for all")
    return set(known[:count] if count else known)


def fewer(source: Source, count: int) -> Source:
    """Only so many of its domains, drawn by their names, the same for every seed."""
    kept = drawn(source.domains, count)
    items = tuple(i for i in source.items if i.domain in kept)
    return replace(source, items=items, masks=tuple(m for m in source.masks if m.domain in kept))


def _open(name: str, group: str) -> Source:
    if name == "emoji":
        return _collect("emoji", EMOJI, _names_in_zip(EMOJI), group or r"(.*)\.png")  # the same emoji in every style
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
    """Links are followed: a data set is often a folder of them."""
    names = []
    for folder, inner, files in os.walk(root, followlinks=True):
        place = Path(folder).relative_to(root)
        names += [(place / f).as_posix() for f in files]
        if len(place.parts) >= DEEP:
            inner.clear()
    return sorted(names)


def _names_in_zip(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as box:
        return sorted(n for n in box.namelist() if not n.endswith("/"))


def _collect(name: str, root: Path, names: list[str], group: str) -> Source:
    shown = [n for n in names if Path(n).suffix.lower() in IMAGES and not any(p.startswith(".") for p in n.split("/"))]
    depths = Counter(n.count("/") for n in shown)
    if not shown:
        raise FedvlmError(f"data={name}: no images in it; expected domain/class/image or class/image")
    depth = depths.most_common(1)[0][0]
    if depth not in (1, 2):
        raise FedvlmError(
            f"data={name}: images lie {depth} folders deep; expected class/image (1) or domain/class/image (2)"
        )
    odd = [n for n in shown if n.count("/") != depth]
    if odd:
        raise FedvlmError(
            f"data={name}: most images lie {depth} folders deep, but {odd[0]} does not (and {len(odd) - 1} more); "
            "move them or give the folder that holds the federation"
        )
    items = []
    for n in shown:
        *domain, label, file = n.split("/")
        items.append(Item(n, domain[0] if domain else ALONE, label, _group(group, file)))
    if depth == 2 and {i.label for i in items} == {"image", "mask"}:
        return _paired(name, root, items)
    source = Source(name, root, tuple(items))
    if len(source.classes) < 2:
        raise FedvlmError(f"data={name}: only one class ({source.classes[0]}); a classifier needs at least two")
    return source


def _paired(name: str, root: Path, items: list[Item]) -> Source:
    """Each image with the mask of the same name; what is inside the mask is the one thing to find."""
    at: dict[tuple[str, ...], Item] = {}
    for item in items:
        at.setdefault((item.label, item.domain, PurePosixPath(item.path).stem), item)
    images = [i for i in items if i.label == "image"]
    masks = [at.get(("mask", i.domain, PurePosixPath(i.path).stem)) for i in images]
    if None in masks or len(at) != len(items) or 2 * len(images) != len(items):
        alone = next((i.path for i, m in zip(images, masks, strict=True) if m is None), "a name that is there twice")
        raise FedvlmError(f"data={name}: every site/image/NAME needs one site/mask/NAME; look at {alone}")
    inside = [replace(i, label="inside") for i in images]
    return Source(name, root, tuple(inside), MASKS, tuple(m for m in masks if m))


def _group(pattern: str, file: str) -> str:
    """What the pattern's first bracket finds in a file's name; nothing is a group of its own."""
    if not pattern:
        return ""
    try:
        found = re.search(pattern, file)
        return found.group(1) if found else ""
    except (re.error, IndexError) as error:
        raise FedvlmError(
            f"group={pattern}: expected a regular expression with one bracket, such as (patient\\d+) ({error})"
        ) from error


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def decode(data: bytes) -> Image.Image:
    """An RGB image, or ValueError with a reason; what is too large is refused before it is decoded."""
    if not data:
        raise ValueError("the file is empty or cannot be read")
    try:
        image: Image.Image = Image.open(io.BytesIO(data))
        if image.width * image.height > PIXELS:
            raise ValueError(f"{image.width}×{image.height} pixels, more than {PIXELS:,}")
        if image.mode == "F":
            raise ValueError("floating-point pixels, whose black and white nobody has said; save it with 8 bits")
        if image.mode.startswith("I"):  # 16 bits of grey; Pillow alone would make all above 255 white
            image = image.convert("I").point(lambda grey: grey * (1 / 257) + 0.5).convert("L")
        if image.mode in ("RGBA", "LA", "PA") or (image.mode == "P" and "transparency" in image.info):
            flat = Image.new("RGBA", image.size, "white")
            flat.alpha_composite(image.convert("RGBA"))
            image = flat
        return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError, EOFError) as error:
        raise ValueError(f"not a readable image ({type(error).__name__})") from error
